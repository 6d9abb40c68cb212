"""The shell of a job after a fault: on another node of the job, in another job, or the end."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from atoll import run_dir
from atoll.cluster.job_script import around_job, launch_script
from atoll.cluster.start import write_run_folder
from atoll.health.exclusions import Exclusion, exclude
from atoll.health.faults import Fault, add_fault, faults

# Each start of the ranks does what its own file says, and is a line of the log.
SRUN = """#!/bin/bash
if [[ $* == *outlive* ]]; then
    # it outlives the job's processes from when the log has it
    exec setsid bash -c 'printf "beside %s\\n" "$0" >> {log}; exec "$@"' "$6" "${{@:9}}"
fi
echo srun "$@" >> {log}
source {starts}/$(grep -c ^srun {log})
"""
SCONTROL = """#!/bin/bash
echo scontrol "$@" >> {log}
[[ $1 != show ]] || printf '%s\\n' {nodes}
"""
NODES_BY_LIST = """#!/bin/bash
[[ $3 == all ]] && printf '%s\\n' {all} || printf '%s\\n' {RUNNING}
"""
SBATCH = """#!/bin/bash
echo sbatch "$@" >> {log}
echo 8
"""
ECHO = """#!/bin/bash
printf '%s\\n' {words}
"""


class Job:
    """A job of a run, with programs in the scheduler's place."""

    def __init__(self, folder: Path, script: str, work: Path) -> None:
        self.folder, self.script, self.work = folder, script, work
        self.log, self.starts, self.bin = work / "log", work / "starts", work / "bin"
        self.starts.mkdir()
        self.bin.mkdir()
        self.environment = {"PATH": f"{self.bin}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        self.environment["ENVIRONMENT"] = "BATCH"
        self.program("srun", SRUN.format(log=self.log, starts=self.starts))
        self.program("sbatch", SBATCH.format(log=self.log))
        self.program("scancel", f'#!/bin/bash\necho scancel "$@" >> {self.log}\n')
        self.nodes("n1 n2 n3")
        self.says(squeue="RUNNING", sinfo="n1=allocated n2=allocated n3=allocated")

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def nodes(self, names: str) -> None:
        self.program("scontrol", SCONTROL.format(log=self.log, nodes=names))

    def says(self, **words: str) -> None:
        for name, text in words.items():
            quoted = " ".join(f"'{word}'" for word in text.split())
            self.program(name, ECHO.format(words=quoted) if text else "#!/bin/bash\nexit 1\n")

    def start(self, number: int, *, fault: Fault | None = None, step: int = 0, text: str = ""):
        """What the ranks do the `number`th time; with nothing they end well."""
        lines = []
        if step:
            checkpoint = run_dir.checkpoint(self.folder, step)
            lines += [f"mkdir -p {checkpoint}", f"touch {checkpoint}/manifest.json"]
        if fault is not None:
            example = self.work / f"fault-{number}"
            example.mkdir()
            add_fault(example, fault)
            lines += [f"cat {run_dir.faults_file(example)} >> {run_dir.faults_file(self.folder)}"]
            lines += ["exit 9"]
        (self.starts / str(number)).write_text("\n".join([*lines, text]))

    def begin(self, **how: bool) -> subprocess.Popen:
        pipe = subprocess.PIPE
        run_dir.write_whole(run_dir.launch_script(self.folder), self.script)
        words = ["bash", str(run_dir.launch_script(self.folder))]
        return subprocess.Popen(
            words, env=self.environment, stdout=pipe, stderr=pipe, text=True, **how
        )

    def end(self) -> tuple[int, str]:
        process = self.begin()
        texts = process.communicate(timeout=60)
        return process.returncode, "".join(texts)

    def logged(self, program: str) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith(f"{program} ")]


@pytest.fixture
def job(composed, tmp_path):
    def make(*overrides: str) -> Job:
        words = ("facility=generic_slurm", "facility.account=a", "image=none", "name=x")
        composition = composed(*words, "nodes=2", *overrides)
        folder = write_run_folder(composition)
        run_dir.write_whole(run_dir.job_script(folder), around_job())
        script = launch_script(composition.run, folder, Path("/clone/sbatch/train.sbatch"))
        left = (" tokenize ", " generate ")  # which are not of this test
        lines = [text for text in script.splitlines() if not any(word in text for word in left)]
        return Job(folder, "\n".join(lines), tmp_path)

    return make


STOPPED = Fault("stalled", "node", "every process of the node is stopped", node="n2", rank=1)


def test_a_spare_takes_the_place_of_a_node_in_the_same_job(job):
    it = job("spare_nodes=1")
    it.start(1, step=10, fault=STOPPED)
    it.start(2)
    code, output = it.end()
    assert code == 0, output
    first, second = it.logged("srun")
    assert "--nodelist=n1,n2 " in first and "--nodes=2 " in first and "--ntasks=2 " in first
    assert "--nodelist=n1,n3 " in second and "--nodes=2 " in second
    assert "n2: every process of the node is stopped; the run leaves out n2" in output
    assert it.logged("sbatch") == []
    [restart] = run_dir.restarts_file(it.folder).read_text().splitlines()
    assert json.loads(restart)["excluded"] == ["n2"]
    assert run_dir.jobs_file(it.folder).read_text() == "slurm 7\n"


def test_without_a_spare_another_job_leaves_the_node_out(job):
    it = job()
    it.nodes("n1 n2")
    it.start(1, fault=STOPPED)
    code, output = it.end()
    assert code == 9
    assert "goes on in another job" in output and "time of job" not in output
    assert [line for line in it.logged("scontrol") if "requeue" in line] == []
    [chained] = it.logged("sbatch")
    assert "--exclude=n2 /clone/sbatch/train.sbatch " in chained
    assert run_dir.jobs_file(it.folder).read_text() == "slurm 7\nslurm 8\n"
    assert not run_dir.restart_file(it.folder).exists()


def test_a_node_that_the_facility_s_flags_leave_out_stays_out(job):
    it = job("++facility.submit.exclude=n9")
    it.nodes("n1 n2")
    it.start(1, fault=STOPPED)
    it.end()
    [chained] = it.logged("sbatch")
    assert chained.rindex("--exclude=n9,n2") > chained.index("--exclude=n9")


def test_where_nobody_is_to_blame_the_same_nodes_go_on(job):
    it = job()
    it.nodes("n1 n2")
    it.start(1, fault=Fault("stalled", "unknown", "nobody knows"))
    it.start(2, fault=Fault("stalled", "unknown", "nobody knows"))
    code, output = it.end()
    assert code == 9
    assert len(it.logged("srun")) == 2
    assert "twice in a row" in output
    assert it.logged("sbatch") == []


@pytest.mark.parametrize(
    "fault", [None, Fault("died", "code", "ValueError: x", node="n2"), Fault("spike", "data", "y")]
)
def test_what_no_node_is_to_blame_for_ends_the_run(fault, job):
    it = job("spare_nodes=1")
    it.start(1, fault=fault, text="exit 9")
    assert it.end()[0] == 9
    assert len(it.logged("srun")) == 1
    assert it.logged("sbatch") == []
    assert not run_dir.excluded_file(it.folder).exists()


def test_a_node_that_slurm_calls_down_is_left_out(job):
    it = job("spare_nodes=1")
    it.says(sinfo="n1=allocated n2=down* n3=allocated")
    it.start(1, text="exit 1")
    it.start(2)
    code, output = it.end()
    assert code == 0, output
    assert "--nodelist=n1,n3 " in it.logged("srun")[1]


def test_a_job_that_slurm_ends_itself_is_left_to_it(job):
    """A node failed: Slurm requeues the job, so another one would train the run twice."""
    it = job()
    it.says(squeue="COMPLETING", sinfo="n1=allocated n2=down*")
    it.start(1, fault=STOPPED)
    assert it.end()[0] == 9
    assert len(it.logged("srun")) == 1
    assert it.logged("sbatch") == []


def test_a_cancelled_job_is_no_fault(job):
    it = job("spare_nodes=1")
    text = "trap : TERM\nuntil [[ -e {0} ]]; do sleep 0.1; done\n"
    ready = it.work / "ready"
    it.start(1, text=f"touch {ready}\n{text.format(it.work / 'cancelled')}")
    add_fault(it.work, STOPPED)
    process = it.begin()
    wait_for(ready.exists)
    process.send_signal(signal.SIGTERM)
    faults = run_dir.faults_file(it.work).read_text()
    run_dir.faults_file(it.folder).write_text(faults)  # by ranks that are told to end
    (it.starts / "2").write_text("")
    (it.work / "cancelled").touch()
    process.communicate(timeout=30)
    assert len(it.logged("srun")) == 1
    assert it.logged("sbatch") == []


def test_ranks_that_are_out_of_time_are_no_fault(job):
    it = job("spare_nodes=1")
    it.start(1, text=f"touch {run_dir.stop_file(it.folder)}; exit 143")
    assert it.end()[0] == 143
    assert len(it.logged("srun")) == 1


def test_a_stall_that_lasts_until_the_notice_goes_on_in_another_job(job):
    it = job("spare_nodes=1")
    it.start(1, text=f"touch {run_dir.stop_file(it.folder)}", fault=None)
    text = (it.starts / "1").read_text()
    it.start(1, fault=STOPPED)
    (it.starts / "1").write_text(f"{text}\n{(it.starts / '1').read_text()}")
    assert it.end()[0] == 9
    assert "--exclude=n2" in it.logged("sbatch")[0]


def test_a_later_job_of_the_run_keeps_to_what_was_left_out(job):
    it = job("spare_nodes=1")
    exclude(it.folder, {"n1": Exclusion("died", "xid 79", "5", "yesterday")})
    it.start(1)
    assert it.end()[0] == 0
    assert "--nodelist=n2,n3 " in it.logged("srun")[0]


def test_a_job_of_excluded_nodes_alone_says_so_and_trains(job):
    it = job()
    it.nodes("n1 n2")
    exclude(it.folder, {"n1": Exclusion("died", "xid 79", "5", "yesterday")})
    it.start(1)
    code, output = it.end()
    assert code == 0
    assert "this job has n1, which excluded.json leaves out" in output
    assert "--nodelist" not in it.logged("srun")[0]


def test_a_time_limit_after_an_exclusion_queues_another_job(job):
    """The same one, requeued, would ask for the same nodes."""
    it = job("spare_nodes=1")
    exclude(it.folder, {"n1": Exclusion("died", "xid 79", "5", "yesterday")})
    it.start(1, text=f"touch {run_dir.restart_file(it.folder)}; exit 143")
    code, output = it.end()
    assert code == run_dir.REQUEUED_CODE
    assert "the time of job 7 is nearly over" in output
    assert "--exclude=n1" in it.logged("sbatch")[0]


STEPS = """#!/bin/bash
[[ $* == *--steps* ]] && printf '7.0 outlive\\n7.1 bash\\n7.batch batch\\n' || echo RUNNING
"""


def test_a_launcher_that_waits_for_a_lost_node_is_killed(job):
    it = job("spare_nodes=1")
    it.script = it.script.replace("run_ranks ", "ending_seconds=3\nrun_ranks ")
    it.start(1, fault=STOPPED)
    text = (it.starts / "1").read_text().replace("exit 9", "exec sleep 99")
    (it.starts / "1").write_text(text)
    it.start(2)
    it.program("squeue", STEPS)
    begun = time.monotonic()
    code, output = it.end()
    assert code == 0, output
    assert time.monotonic() - begun < 30
    assert "their launcher is killed" in output
    assert "--nodelist=n1,n3 " in it.logged("srun")[1]
    assert it.logged("scancel") == ["scancel --signal=KILL 7.1"], "the step of keep_beside stays"


# squeue shows a job that ends with those of its nodes that still do
NODES_OF_JOB = """#!/bin/bash
case "$3" in all | RUNNING) printf '%s\\n' {host} n2 n3 ;; *) echo n3 ;; esac
"""
ENDED = [
    ("down", "FAILED NonZeroExitCode", 1),
    ("idle", "COMPLETING JobLaunchFailure", 1),
    ("down", "CANCELLED None", 0),
    ("mixed", "COMPLETING None", 0),
]


@pytest.mark.parametrize(
    ("way", "state", "watch_seconds", "left"),
    [
        ("spare_nodes=1", "down*", 99, "HOST n2 n3"),
        ("facility.requeue=false", "allocated*", 4, "HOST n2 n3"),
        ("spare_nodes=1", "mixed*", 99, "n2 n3"),
    ],
)
def test_a_job_whose_first_node_is_gone_goes_on_in_another_one(
    way, state, watch_seconds, left, job
):
    """With --no-kill Slurm leaves it as it is, without a shell."""
    it = job(way)
    it.environment["SLURM_JOB_NODELIST"] = "all"
    nodes = {"all": "HOST n2 n3", "RUNNING": left}  # RUNNING: what squeue says of anything
    it.program("scontrol", NODES_BY_LIST.format(**nodes).replace("HOST", os.uname().nodename))
    seconds = f"renew_seconds=2 watch_seconds={watch_seconds}"
    it.script = it.script.replace("run_ranks ", f"{seconds}\nrun_ranks ")
    it.start(1, text="exec sleep 99")
    process = it.begin(start_new_session=True)
    wait_for(lambda: len(it.logged("srun")) == len(it.logged("beside")) == 1)
    assert it.logged("beside") == ["beside --nodelist=n3"]
    it.says(sinfo=state)
    os.killpg(process.pid, signal.SIGKILL)
    wait_for(lambda: it.logged("scancel"))
    assert it.logged("scancel") == ["scancel 7"]
    [chained] = it.logged("sbatch")
    host = os.uname().nodename
    assert f"--exclude={host} /clone/sbatch/train.sbatch " in chained
    assert run_dir.jobs_file(it.folder).read_text() == "slurm 7\nslurm 8\n"
    assert [fault.node for fault in faults(it.folder)] == [host]


@pytest.mark.login_node
@pytest.mark.parametrize(("sinfo", "squeue", "queued"), ENDED)
def test_a_job_that_ends_as_its_first_node_is_called_down(sinfo, squeue, queued, job):
    """Slurm then ends all of it, at once; not where its user cancelled it, or it just ended."""
    it = job("spare_nodes=1")
    it.environment["SLURM_JOB_NODELIST"] = "all"
    it.program("scontrol", NODES_OF_JOB.format(host=os.uname().nodename))
    it.script = it.script.replace("run_ranks ", "renew_seconds=2\nrun_ranks ")
    it.start(1, text="exec sleep 99")
    process = it.begin(start_new_session=True)
    lease = str(run_dir.lease_folder(it.folder))
    wait_for(lambda: len(it.logged("srun")) == len(it.logged("beside")) == 1)
    it.says(sinfo=sinfo)
    it.program("squeue", ECHO.format(words=f"'{squeue}'"))
    os.killpg(process.pid, signal.SIGKILL)
    subprocess.run(["pkill", "-f", f"outlive.*{lease}"], check=True)
    wait_for(lambda: subprocess.run(["pgrep", "-f", lease], capture_output=True).returncode)
    assert len(it.logged("sbatch")) == queued


@pytest.mark.login_node
def test_what_waits_beside_a_job_ends_with_it(job):
    it = job("spare_nodes=1")
    it.start(1)
    assert it.end()[0] == 0
    lease = str(run_dir.lease_folder(it.folder))
    wait_for(lambda: subprocess.run(["pgrep", "-f", lease], capture_output=True).returncode)
    assert it.logged("scancel") == it.logged("sbatch") == []


def wait_for(ready, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ready()
