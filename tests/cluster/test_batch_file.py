"""sbatch/train.sbatch in a clone of its own, with programs that write down how they were called.

tokenize, launch and generate, sbatch and srun are replaced; all that is between them is real.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from atoll.commands import COMMANDS
from atoll.health.exclusions import Exclusion, exclude

ROOT = Path(__file__).parents[2]
STAND_IN = """\
import json, os, sys
def record(argv):
    call = {{"argv": argv, "parent": os.getppid(), "environment": dict(os.environ)}}
    with open({calls!r}, "a") as file:
        print(json.dumps(call), file=file)
"""
COMMAND = """
def main(argv):
    record([{name!r}, *argv])
    return int(os.environ.get({name!r}.upper() + "_CODE", 0))
"""
PROGRAM = """
record([{name!r}, *sys.argv[1:]])
sys.stderr.write(os.environ.get("SLURM_SAYS", ""))
print({answer!r})
sys.exit(bool(os.environ.get("SLURM_SAYS")))
"""


class Clone:
    """A clone on this machine, and a login node's programs on a PATH of their own."""

    def __init__(self, folder: Path) -> None:
        self.root, self.calls_file = folder / "a clone", folder / "calls.jsonl"
        self.programs, self.spool = folder / "programs", folder / "spool" / "job1"
        skip = shutil.ignore_patterns("local", "__pycache__", "*.egg-info")
        for part in ("hydra_conf", "sbatch", "src"):
            shutil.copytree(ROOT / part, self.root / part, ignore=skip)
        self.batch_file = self.root / "sbatch" / "train.sbatch"
        for command in ("tokenize", "launch", "generate"):
            self._replace_command(command)
        self._make_environment()
        self.programs.mkdir()
        self.spool.mkdir(parents=True)
        self.add_program("srun", "")

    def add_program(self, name: str, answer: str) -> None:
        stand_in = STAND_IN.format(calls=str(self.calls_file))
        path = self.programs / name
        path.write_text(f"#!{sys.executable}\n{stand_in}{PROGRAM.format(name=name, answer=answer)}")
        path.chmod(0o755)

    def _replace_command(self, command: str) -> None:
        path = self.root.joinpath("src", *COMMANDS[command][0].split("."))
        if path.is_dir():
            shutil.rmtree(path)
        stand_in = STAND_IN.format(calls=str(self.calls_file))
        path.with_suffix(".py").write_text(stand_in + COMMAND.format(name=command))

    def _make_environment(self) -> None:
        """An environment that holds the clone's code, and what this one has installed."""
        python = self.root / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.symlink_to(os.path.realpath(sys.executable))
        home = Path(os.path.realpath(sys.executable)).parent
        (self.root / ".venv" / "pyvenv.cfg").write_text(f"home = {home}\n")
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = self.root / ".venv" / "lib" / version / "site-packages"
        packages.mkdir(parents=True)
        lines = [str(self.root / "src"), sysconfig.get_path("purelib")]
        (packages / "clone.pth").write_text("\n".join(lines))

    def type(self, *words: str, script: Path | None = None, **variables: str):
        """Type the batch file and its arguments, in the clone's folder."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith("SLURM_")}
        kept["PATH"] = f"{self.programs}:{kept['PATH']}"
        return subprocess.run(
            [str(script or self.batch_file), *words],
            cwd=self.root,
            env=kept | variables,
            capture_output=True,
            text=True,
        )

    def run_as_job(self, *words: str, nodes: int, **variables: str):
        """What Slurm does in a job: run a copy of the file, from its spool."""
        copy = Path(shutil.copy(self.batch_file, self.spool / "slurm_script"))
        job = {
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_SUBMIT_DIR": str(self.root),
        }
        return self.type(*words, script=copy, **job | variables)

    def calls(self) -> list[dict]:
        if not self.calls_file.exists():
            return []
        calls = [json.loads(line) for line in self.calls_file.read_text().splitlines()]
        return [call for call in calls if "--test-only" not in call["argv"]]  # queues nothing

    def called(self) -> list[list[str]]:
        return [call["argv"] for call in self.calls()]


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


def only_run(clone: Clone) -> Path:
    [folder] = (clone.root / "runs").iterdir()
    return folder


def test_the_file_is_one_page_that_can_be_executed():
    path = ROOT / "sbatch" / "train.sbatch"
    assert os.access(path, os.X_OK)
    assert len(path.read_text().splitlines()) <= 60
    assert "#PBS" not in path.read_text()


def test_without_a_scheduler_the_run_takes_place_here(clone):
    done = clone.type("facility=laptop")
    assert done.returncode == 0, done.stderr
    folder = only_run(clone)
    assert clone.called() == [
        ["tokenize", str(folder)],
        ["launch", "--fork", "2", str(folder)],
        ["generate", str(folder)],
    ]
    settings = yaml.safe_load((folder / "run.yaml").read_text())
    assert settings["folders"]["runs"] == str(clone.root / "runs")
    for place in ("metrics.jsonl", "checkpoints", "export", "sample.txt"):
        assert str(folder / place) in done.stdout


def test_the_same_line_goes_on_in_the_same_folder(clone):
    assert clone.type("facility=laptop", LAUNCH_CODE="75").returncode == 75
    folder = only_run(clone)
    assert clone.called() == [["tokenize", str(folder)], ["launch", "--fork", "2", str(folder)]]
    assert clone.type("facility=laptop").returncode == 0
    assert only_run(clone) == folder
    assert [argv[0] for argv in clone.called()[2:]] == ["tokenize", "launch", "generate"]


def test_the_batch_file_becomes_the_run_so_that_signals_reach_it(clone):
    log = clone.root / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [clone.batch_file, "facility=laptop"],
            cwd=clone.root,
            env=os.environ,
            stdout=file,
            stderr=file,
        )
        assert process.wait() == 0, log.read_text()
    assert {call["parent"] for call in clone.calls()} == {process.pid}


def test_a_run_is_not_started_twice_at_once(clone):
    clone.type("facility=laptop", "name=x", LAUNCH_CODE="75")
    folder = clone.root / "runs" / "x"
    script = [f"source {shlex.quote(str(folder / 'job.sh'))} {shlex.quote(str(folder))} none"]
    line = ["bash", "-c", "\n".join(["set -euo pipefail", *script, "echo holds", "read -r"])]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        done = clone.type("facility=laptop", "name=x")
        other.communicate(b"end\n")
    assert done.returncode == 2
    assert "run x is running already" in done.stderr
    assert len(clone.called()) == 2
    assert clone.type("facility=laptop", "name=x").returncode == 0


def test_several_runs_take_turns_without_a_scheduler(clone):
    done = clone.type("--multirun", "facility=laptop", "seed=1,2")
    assert done.returncode == 0, done.stderr
    assert [argv[0] for argv in clone.called()] == ["tokenize", "launch", "generate"] * 2
    failing = clone.type("-m", "facility=laptop", "seed=3,4", TOKENIZE_CODE="2")
    assert failing.returncode == 2
    assert len(clone.called()) == 7


def test_a_login_node_queues_exactly_what_a_dry_run_prints(clone):
    clone.add_program("sbatch", "4711;a_cluster")
    line = ("facility=generic_slurm", "nodes=2", "facility.account=mine")
    printed = clone.type("--dry-run", *line)
    assert printed.returncode == 0, printed.stderr
    assert not (clone.root / "runs").exists()
    assert clone.called() == []
    done = clone.type(*line)
    assert done.returncode == 0, done.stderr
    folder = only_run(clone)
    assert done.stdout == f"job 4711: {folder}\n"
    assert clone.called() == [shlex.split(printed.stdout.splitlines()[0])]
    assert clone.called()[0][-2:] == [str(clone.batch_file), str(folder)]
    assert (folder / "launch.sh").read_text() in printed.stdout


def test_a_sweep_queues_a_job_for_each_combination(clone):
    clone.add_program("sbatch", "4711")
    done = clone.type("--multirun", "facility=generic_slurm", "nodes=1,2,4")
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["job 4711"] * 3
    nodes = [next(w for w in argv if w.startswith("--nodes")) for argv in clone.called()]
    assert nodes == ["--nodes=1", "--nodes=2", "--nodes=4"]


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition "
            "combination specified",
            "facility.account, facility.submit.partition",
        ),
        ("sbatch: error: invalid partition specified: x", "facility.submit.partition"),
        ("sbatch: error: Batch job submission failed: Invalid qos", "facility.submit.qos"),
        ("sbatch: error: Unable to contact slurm controller", "--dry-run"),
    ],
)
def test_a_refusal_comes_in_slurm_s_own_words_and_leaves_nothing(words, setting, clone):
    clone.add_program("sbatch", "")
    done = clone.type("facility=generic_slurm", SLURM_SAYS=words)
    assert done.returncode == 2
    _, found, hint = done.stderr.splitlines()  # behind what the run would take
    assert found == f"atoll: {words.replace('error: ', '')}"
    assert setting in hint
    assert list((clone.root / "runs").iterdir()) == []


def test_a_refusal_names_the_nodes_that_the_run_leaves_out(clone):
    clone.add_program("sbatch", "4711")
    assert clone.type("facility=generic_slurm").returncode == 0
    folder = only_run(clone)
    exclude(folder, {"n2": Exclusion("died", "xid 79", "5", "yesterday")})
    words = "sbatch: error: Batch job submission failed: Requested node configuration is not ..."
    done = clone.type("facility=generic_slurm", SLURM_SAYS=words)
    assert done.returncode == 2
    hint = done.stderr.splitlines()[-1]
    assert hint.startswith("       see nodes, ranks_per_node, facility.node.cores; without n2 (")
    assert f"atoll exclusions {folder} --take-back NODE" in hint


def bare_path(clone: Clone) -> Path:
    """A PATH of what the batch file itself needs, whatever this machine has."""
    folder = clone.root / "bare"
    folder.mkdir()
    for name in ("bash", "env", "dirname"):
        (folder / name).symlink_to(shutil.which(name))
    return folder


def test_a_machine_without_slurm_says_so(clone):
    done = clone.type("facility=generic_slurm", PATH=str(bare_path(clone)))
    assert done.returncode == 2
    assert done.stderr.splitlines()[1] == "atoll: cannot start sbatch: No such file or directory"


def test_a_job_with_a_run_folder_runs_it(clone):
    clone.add_program("sbatch", "1")
    assert clone.type("facility=generic_slurm", "nodes=2").returncode == 0
    folder = only_run(clone)
    done = clone.run_as_job(str(folder), nodes=2)
    assert done.returncode == 0, done.stderr
    _, *job = clone.called()
    assert [argv[0] for argv in job] == ["tokenize", "srun", "generate"]
    assert job[1][1] == "--nodes=2"


def test_a_job_queued_by_hand_composes_with_the_nodes_it_has(clone):
    done = clone.run_as_job("facility=generic_slurm", nodes=4)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load((only_run(clone) / "run.yaml").read_text())["nodes"] == 4
    assert [argv[0] for argv in clone.called()] == ["tokenize", "srun", "generate"]
    assert clone.called()[1][1] == "--nodes=4"


def test_a_job_and_its_run_must_agree_on_nodes(clone):
    done = clone.run_as_job("facility=generic_slurm", "nodes=2", nodes=4)
    assert done.returncode == 2
    assert "this job has 4 nodes, the run asks for 2" in done.stderr
    assert clone.called() == []


def test_a_job_finds_its_clone_from_the_folder_of_the_batch_file(clone):
    submitted_in = str(clone.root / "sbatch")
    done = clone.run_as_job("facility=laptop", nodes=1, SLURM_SUBMIT_DIR=submitted_in)
    assert done.returncode == 0, done.stderr


def test_a_job_queued_from_elsewhere_is_told_where_to_type(clone, tmp_path):
    done = clone.run_as_job("facility=laptop", nodes=1, SLURM_SUBMIT_DIR=str(tmp_path / "here"))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2
    assert "type sbatch in the clone's folder" in done.stderr


ALLOCATION = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_MEM_PER_CPU": "9"}


def test_the_shell_of_an_allocation_queues_a_job_that_knows_nothing_of_it(clone):
    clone.add_program("sbatch", "2")
    done = clone.type("facility=generic_slurm", **ALLOCATION, SLURM_CONF="/etc/slurm.conf")
    assert done.stdout.startswith("job 2: ")
    [call] = clone.calls()
    inherited = {name for name in call["environment"] if name.startswith("SLURM_")}
    assert inherited == {"SLURM_CONF"}


def test_the_shell_of_an_allocation_can_be_used_itself(clone):
    done = clone.type("--here", "facility=generic_slurm", **ALLOCATION)
    assert done.returncode == 0, done.stderr
    assert clone.called()[1][:2] == ["srun", "--nodes=2"]


def test_here_needs_an_allocation(clone):
    done = clone.type("--here", "facility=generic_slurm")
    assert done.returncode == 2
    assert "neither SLURM_JOB_NUM_NODES nor PBS_NODEFILE is set" in done.stderr


def test_a_clone_without_an_environment_says_how_to_make_one(clone):
    shutil.rmtree(clone.root / ".venv")
    done = clone.type("facility=laptop")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2
    assert "make setup" in done.stderr


@pytest.mark.parametrize(
    "value",
    ["$(touch pwned)", "; touch pwned", "\n#SBATCH -A theirs\ntouch pwned", "`touch pwned`"],
)
def test_values_of_the_command_line_are_never_run(value, clone):
    clone.add_program("sbatch", "1")
    words = (f"generation.prompt='{value}'", f"facility.submit.comment='{value}'")
    done = clone.type("facility=generic_slurm", "name=x", f"folders.runs='{value}'", *words)
    assert done.returncode == 0, done.stderr
    [[*_, script, folder]] = clone.called()
    assert clone.run_as_job(folder, nodes=1).returncode == 0
    settings = yaml.safe_load((Path(folder) / "run.yaml").read_text())
    assert settings["generation"]["prompt"] == value
    assert script == str(clone.batch_file)
    assert not list(clone.root.rglob("pwned"))


def test_secrets_of_the_shell_are_in_no_file_of_the_run(clone):
    done = clone.type("facility=laptop", HF_TOKEN="hf_very_secret")
    assert done.returncode == 0
    assert clone.calls()[0]["environment"]["HF_TOKEN"] == "hf_very_secret"
    texts = [path.read_text() for path in only_run(clone).rglob("*") if path.is_file()]
    assert len(texts) == 6  # run.yaml, launch.sh, job.sh, prediction.json, held.txt, lease/1
    assert not [text for text in texts if "hf_very_secret" in text]
    assert "hf_very_secret" not in done.stdout + done.stderr


def test_a_site_s_settings_of_python_are_not_ours(clone, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "yaml.py").write_text("raise SystemExit('a yaml of the site')")
    done = clone.type("facility=laptop", PYTHONPATH=str(tmp_path / "site"), PYTHONHOME="/opt/conda")
    assert done.returncode == 0, done.stderr
    assert not {"PYTHONPATH", "PYTHONHOME"} & set(clone.calls()[0]["environment"])


def test_a_cdpath_leads_into_no_other_folder(clone, tmp_path):
    """The shell's own: `cd sbatch/..` looks there first, and prints where it went."""
    (tmp_path / "sbatch").mkdir()
    for path in (f".:{tmp_path}", str(tmp_path)):
        words = ("--dry-run", "facility=laptop")
        done = clone.type(*words, script=Path("sbatch/train.sbatch"), CDPATH=path)
        assert done.returncode == 0, done.stderr
