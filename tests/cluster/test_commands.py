"""The exact commands of a run, and values that a shell must never read."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll import run_dir
from atoll.cluster import submit
from atoll.cluster.container import container_prefix
from atoll.cluster.job_script import launch_script
from atoll.cluster.launchers import LAUNCHERS, TASKS_PER_NODE, launch_step, on_each_rank
from atoll.cluster.pbs import qsub_argv
from atoll.cluster.slurm import as_words, sbatch_argv, sbatch_exports
from atoll.cluster.slurm import requeue_function as requeue_on_slurm
from atoll.config.binds import binds
from atoll.health.exclusions import Exclusion, exclude

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable
RUN = Path("/runs/x")
SLURM = ("facility=generic_slurm", "name=x", "folders.runs=/runs")
NODES = ("nodes=2", "facility.node.devices=4", "facility.node.cores=32")

LAPTOP = f"""\
# /runs/x/launch.sh
#!/bin/bash
# What this run does. Written when it was submitted; started again, it goes on where it stopped.
source /runs/x/job.sh /runs/x none
set -euo pipefail
unset PYTHONHOME PYTHONPATH PYTHONSTARTUP SLURM_EXPORT_ENV
export PYTHONSAFEPATH=1
{PYTHON} -m atoll tokenize /runs/x
{PYTHON} -m atoll launch --fork 2 /runs/x
{PYTHON} -m atoll generate /runs/x
{PYTHON} -m atoll summary /runs/x
"""

SBATCH = f"""\
sbatch --parsable --job-name=x --nodes=2 --ntasks-per-node=4 --cpus-per-task=8 --time=90 \
--account=mine --output=/runs/x/slurm-%j.out --signal=B:USR2@180 --requeue \
--dependency=singleton --partition=gpu --gpus-per-node=4 {ROOT}/sbatch/train.sbatch /runs/x"""

CHAINED = SBATCH.replace(f" {ROOT}", f' ${{excluded:+"--exclude=$excluded"}} {ROOT}')
GENERIC_SLURM = f"""\
{SBATCH}

# /runs/x/launch.sh
#!/bin/bash
# What this run does. Written when it was submitted; started again, it goes on where it stopped.
source /runs/x/job.sh /runs/x slurm
set -euo pipefail
unset PYTHONHOME PYTHONPATH PYTHONSTARTUP SLURM_EXPORT_ENV
export PYTHONSAFEPATH=1
atoll() {{
    {PYTHON} -m atoll "$@"
}}
requeue() {{
    [[ -n $excluded ]] || ! scontrol requeue "$SLURM_JOB_ID" || return 0
    for name in "${{!SLURM_@}}"; do [[ $name == SLURM_CONF ]] || unset "$name"; done
    note_job "$({CHAINED})"
}}
export NCCL_SOCKET_IFNAME=hsn0,hsn1
{PYTHON} -m atoll tokenize /runs/x
run_ranks srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task=8 --kill-on-bad-exit=1 \
--cpu-bind=cores {PYTHON} -m atoll launch --port 3442 --address-suffix=i /runs/x
{PYTHON} -m atoll generate /runs/x
printf '%-12s %s\\n' run /runs/x metrics /runs/x/metrics.jsonl checkpoints /runs/x/checkpoints \
export /runs/x/export sample /runs/x/sample.txt
"""

NASTY = [
    "a; touch pwned",
    "$(touch pwned)",
    "`touch pwned`",
    "'; touch pwned; '",
    '" && touch pwned && "',
    "a\ntouch pwned\n#SBATCH --account=theirs",
    "a\r\ntouch pwned",
    "${HOME}",
    "* ? [a-z] ~ !! \\",
    "",
]


def test_the_commands_of_the_laptop(composed):
    run = composed("facility=laptop", "name=x", "folders.runs=/runs").run
    assert submit.dry_run(run) == LAPTOP


def test_the_commands_of_a_slurm_cluster(composed):
    run = composed(
        *SLURM,
        *NODES,
        "facility.account=mine",
        "facility.walltime_minutes=90",
        "facility.submit.partition=gpu",
        "facility.step=['--cpu-bind=cores']",
        "facility.environment.NCCL_SOCKET_IFNAME='hsn0,hsn1'",
        "facility.address_suffix=i",
        "facility.port=3442",
    ).run
    assert submit.dry_run(run) == GENERIC_SLURM


@pytest.mark.parametrize(
    ("binding", "is_bound"),
    [
        ("'--cpu-bind',cores", True),
        ("'--cpu-bind=list:0-7:8-15'", True),
        ("'-bind-to',core", True),
        ("'--bind-to',none", False),
        ("'--cpu-bind=none'", False),
        ("'--depth=8'", False),
    ],
)
def test_ranks_of_mpiexec_hear_whether_they_are_bound(binding, is_bound, composed):
    words = (*SLURM, *NODES, "launcher=mpiexec")
    for key in ("step", "task_binding"):
        run = composed(*words, f"facility.{key}=[{binding}]").run
        assert ("--bound" in launch_step(run, RUN)) == is_bound
        assert ("--bound" in on_each_rank(run, "scores", ["x"])) == is_bound


def test_inside_a_job_nothing_is_queued(composed):
    assert "sbatch" not in submit.dry_run(composed(*SLURM).run, here=True)


def test_static_starts_a_task_for_each_rank_and_static_node_one_for_each_node(composed):
    atoll = [PYTHON, "-m", "atoll", "launch"]
    srun = ["srun", "--nodes=2"]
    step = launch_step(composed(*SLURM, *NODES, "launcher=static").run, RUN)
    assert step[:5] == [*srun, "--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=8"]
    assert step[6:] == [*atoll, "/runs/x"]
    step = launch_step(composed(*SLURM, *NODES, "launcher=static_node").run, RUN)
    assert step[:5] == [*srun, "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=32"]
    assert step[6:] == [*atoll, "--fork", "4", "/runs/x"]
    step = launch_step(composed(*SLURM, *NODES, "launcher=torchrun").run, RUN)
    assert step[6:] == [*atoll, "--torchrun", "4", "/runs/x"]
    step = launch_step(composed(*SLURM, *NODES, "launcher=mpiexec").run, RUN)
    assert step == ["mpiexec", "-n", "8", "--ppn", "4", *atoll, "/runs/x"]
    laptop = ("facility=laptop", "name=x", "folders.runs=/runs")
    assert launch_step(composed(*laptop, "launcher=static").run, RUN) == [
        *atoll,
        "--local-ranks",
        "2",
        "/runs/x",
    ]


def test_cores_that_nobody_knows_are_not_asked_for(composed):
    run = composed(*SLURM).run
    words = [*launch_step(run, RUN), *sbatch_argv(run, Path("b"), RUN)]
    assert not [word for word in words if word.startswith("--cpus-per-task")]


def test_every_launcher_has_its_file_and_its_function():
    files = {path.stem for path in (ROOT / "hydra_conf" / "launcher").glob("*.yaml")}
    assert files == set(LAUNCHERS) == set(TASKS_PER_NODE)


def test_a_facility_s_own_flags_are_taken_as_they_are_and_win(composed):
    run = composed(
        *SLURM,
        "facility.submit.exclusive=true",
        "facility.submit.requeue=false",
        "facility.submit.gpus-per-node=null",
        "facility.submit.gres='gpu:4'",
        "facility.submit.dependency=null",
    ).run
    words = sbatch_argv(run, Path("train.sbatch"), RUN)
    assert words[0:2] == ["sbatch", "--parsable"]
    assert words[-2:] == ["train.sbatch", "/runs/x"]
    assert "--exclusive" in words
    assert "--gres=gpu:4" in words
    for absent in ("requeue", "gpus-per-node", "dependency", "partition", "account"):
        assert not [word for word in words if word.startswith(f"--{absent}")]


def changed(run, submit=None, **facility):
    """The run at a facility that differs in this."""
    facility |= {} if submit is None else {"submit": submit}
    return run.model_copy(update={"facility": run.facility.model_copy(update=facility)})


def test_how_a_flag_s_value_is_written_for_sbatch():
    flags = {"a": True, "b": False, "c": None, "d": 0, "e": 1, "f": "x y", "g": ["p", None, "q"]}
    assert as_words(flags) == ["--a", "--d=0", "--e=1", "--f=x y", "--g=p", "--g=q"]
    assert as_words({"h": [True, False, 2], "i": []}) == ["--h", "--h=2"]


def test_slurm_is_asked_for_a_notice_where_there_is_a_time(composed):
    run = composed(*SLURM).run
    timed = changed(run, submit={}, walltime_minutes=90, requeue=False)
    assert sbatch_argv(timed, Path("b"), RUN) == [
        *("sbatch", "--parsable", "--job-name=x", "--nodes=1"),
        f"--ntasks-per-node={run.facility.node.devices}",
        *("--time=90", "--output=/runs/x/slurm-%j.out", "--signal=B:USR2@180", "--no-requeue"),
        *("--dependency=singleton", "b", "/runs/x"),
    ]
    words = sbatch_argv(changed(run, submit={}, walltime_minutes=None), Path("b"), RUN)
    assert not [word for word in words if word.startswith(("--time", "--signal"))]
    assert "--requeue" in words


def test_flags_that_a_variable_can_carry_are_exported(composed):
    submit = {"exclusive": True, "qos": None, "gres": "gpu:4", "hint": False, "comment": "x"}
    run = changed(composed(*SLURM).run, submit=submit, walltime_minutes=90, requeue=True)
    assert sbatch_exports(run) == [
        ["export", "SBATCH_TIMELIMIT=90"],
        ["export", "SBATCH_SIGNAL=B:USR2@180"],
        ["export", "SBATCH_REQUEUE="],
        ["export", "SBATCH_EXCLUSIVE="],
        ["export", "SBATCH_GRES=gpu:4"],
    ]


def test_a_run_goes_on_in_this_job_or_in_the_next(composed):
    run = changed(composed(*SLURM).run, submit={}, requeue=True)
    out = ' ${excluded:+"--exclude=$excluded"}'
    queued = shlex.join(sbatch_argv(run, Path("b"), RUN)).replace(" b ", f"{out} b ")
    lines = [line.strip() for line in requeue_on_slurm(run, RUN, Path("b")).splitlines()]
    assert lines[-4] == '[[ -n $excluded ]] || ! scontrol requeue "$SLURM_JOB_ID" || return 0'
    assert lines[-2:] == [f'note_job "$({queued})"', "}"]
    taken = requeue_on_slurm(changed(run, requeue=False), RUN, None)
    assert "scontrol" not in taken
    assert taken.splitlines()[-2:] == ['    note_job "$(false)"', "}"]


def test_a_job_with_a_spare_outlives_a_node(composed):
    run = composed(*SLURM, "nodes=2", "spare_nodes=1").run
    words = sbatch_argv(run, Path("b"), RUN)
    assert {"--nodes=3", "--no-kill", "--requeue"} <= set(words)
    assert "--nodes=2" in launch_script(run, RUN, Path("b"))
    without = sbatch_argv(composed(*SLURM, "nodes=2").run, Path("b"), RUN)
    assert "--no-kill" not in without  # Slurm requeues it
    alone = composed(*SLURM, "nodes=2", "facility.requeue=false").run
    assert "--no-kill" in sbatch_argv(alone, Path("b"), RUN)  # else nobody would


def test_what_an_earlier_job_left_out_a_new_one_does_not_ask_for(composed, tmp_path, here):
    words = ("facility=generic_slurm", "name=x", "++facility.submit.exclude=n9")
    run = composed(*words).run
    folder = run_dir.folder(run)
    assert "--exclude=n9" in sbatch_argv(run, Path("b"), folder)
    exclude(folder, {"n2": Exclusion("died", "xid 79", "5", "yesterday")})
    assert "--exclude=n9,n2" in sbatch_argv(run, Path("b"), folder)


def qsub(run, **submit):
    return qsub_argv(changed(run, submit=submit), Path("b"), RUN)


def test_the_command_of_a_pbs_cluster(composed):
    run = changed(composed(*SLURM).run, account="mine", walltime_minutes=605, submit={})
    start = ["qsub", "-N", "x", "-A", "mine", "-j", "oe", "-o", "/runs/x/pbs.out"]
    end = ["--", "b", "/runs/x"]
    assert qsub(run) == [*start, "-l", "walltime=10:05:00", *end]
    assert "walltime=09:59:00" in qsub(changed(run, walltime_minutes=599))
    assert qsub(run, l="select=2")[9:-3] == ["-l", "select=2", "-l", "walltime=10:05:00"]
    select = ["select=2", "walltime=01:00:00", None]
    assert qsub(run, l=select)[9:-3] == ["-l", "select=2", "-l", "walltime=01:00:00"]
    odd = qsub(run, q="prod", W=["a=b", None, "c=d"], V=True, h=False, p=0)
    assert odd[9:-5] == [*("-q", "prod", "-W", "a=b", "-W", "c=d", "-V", "-p", "0")]
    assert qsub(changed(run, walltime_minutes=None)) == [*start, *end]
    assert qsub(run, j="eo", A=None)[3:7] == ["-j", "eo", "-o", "/runs/x/pbs.out"]
    long = run.model_copy(update={"name": "x" * 63 + "yz"})
    assert qsub(long)[1:3] == ["-N", "x" * 63 + "y"]


def test_pbs_s_time_is_watched_by_the_job_itself(composed):
    run = composed("facility=testbed_pbs", "facility.walltime_minutes=59", "name=x").run
    assert "/job.sh " in (text := launch_script(run, RUN, Path("b")))
    assert f"\nsource /runs/x/job.sh /runs/x pbs {59 * 60 - 180}\n" in text
    words = shlex.join(qsub_argv(run, Path("b"), RUN)[1:])
    assert f'    note_job "$(qsub -W depend=afterany:"$job" {words})"\n' in text
    words = ("facility=testbed_pbs", "name=x", "facility.submit.l=['select=1']")
    endless = launch_script(changed(composed(*words).run, walltime_minutes=None), RUN)
    assert "\nsource /runs/x/job.sh /runs/x pbs\n" in endless
    assert '    note_job "$(false)"\n' in endless


def test_a_container_stands_before_the_command_and_brings_its_own_python(composed):
    binds = "facility.binds=[/scratch,/a:/b]"
    folders = "folders.prepared=/prepared"
    image = ("image.file=/images/x.sif", "image.run_flags=['--nv']")
    run = composed(*SLURM, *image, binds, folders).run
    prefix = [
        *("apptainer", "-q", "exec", "--nv", "--bind", "/scratch", "--bind", "/a:/b"),
        *("--bind", "/prepared", "--bind", "/runs", "/images/x.sif"),
    ]
    assert container_prefix(run) == prefix
    assert container_prefix(composed(*SLURM, binds).run) == []
    assert launch_step(run, RUN)[-len(prefix) - 5 :] == [
        *prefix,
        *("python3", "-m", "atoll", "launch", "/runs/x"),
    ]
    other = composed(*SLURM, *image, "facility.container=singularity").run
    assert container_prefix(other)[0] == "singularity"


def test_links_on_the_way_to_a_folder_are_followed_by_its_bind(composed, tmp_path):
    (tmp_path / "disk7").mkdir()
    (tmp_path / "scratch").symlink_to("disk7")
    scratch = tmp_path / "scratch"
    folders = (f"folders.runs={scratch}/runs", f"folders.prepared={scratch}/runs/prepared")
    run = composed("facility=generic_slurm", "image.file=/x.sif", *folders).run
    real = f"{tmp_path}/disk7/runs"
    assert binds(run) == [real, f"{real}:{scratch}/runs"]


def test_the_files_that_a_run_names_are_bound_too(composed, tmp_path):
    text = tmp_path / "texts" / "a.txt"
    text.parent.mkdir()
    text.write_text("a")
    (tmp_path / "more").mkdir()
    run = composed(
        *SLURM,
        "image.file=/x.sif",
        "folders.prepared=/runs/prepared",
        "data=text_files",
        f"data.files=[{text},{tmp_path}/more/**/*.jsonl]",
    ).run
    assert binds(run) == [*sorted([f"{tmp_path}/texts", f"{tmp_path}/more", "/runs"])]


def carrying(run, value):
    """The run with a text in each place that reaches a command."""
    changed = {
        "environment": {"VALUE": value},
        "step": [f"--flag={value}"],
        "submit": {"comment": value},
    }
    return run.model_copy(update={"facility": run.facility.model_copy(update=changed)})


@pytest.mark.parametrize("value", NASTY)
def test_values_stay_values_in_a_shell(value, composed, here):
    script = launch_script(carrying(composed(*SLURM).run, value), RUN)
    exports, _, _ = script.partition(f"\n{PYTHON} -m atoll")
    exports = exports.replace("source /runs/x/job.sh /runs/x slurm\n", "")
    done = subprocess.run(
        ["bash", "-c", f'{exports}\nprintf %s "$VALUE"'], capture_output=True, check=True
    )
    assert done.stdout.decode() == value
    assert list(here.iterdir()) == []


def test_every_word_survives_the_shell_s_reading(composed):
    base = composed(*SLURM).run

    @settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
    def check(value):
        run = carrying(base, value)
        words = shlex.split(launch_script(run, RUN), comments=True)
        assert f"VALUE={value}" in words
        assert f"--flag={value}" in words
        # for sbatch it is one argument: never a line of a script, so never an #SBATCH directive
        assert f"--comment={value}" in sbatch_argv(run, Path("train.sbatch"), RUN)

    check()
