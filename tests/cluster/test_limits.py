"""What a facility does not allow is refused before anything is queued."""

import pytest

from atoll.cluster.limits import check_time
from atoll.cluster.start import write_run_folder
from atoll.cluster.submit import with_allocated_nodes
from atoll.cluster.submit_checks import check
from atoll.errors import UserError

SLURM = "facility=generic_slurm"
SAMPLES = "training.global_batch_samples=9600"  # divided by every number of ranks here
CASES = [
    (["facility=laptop", "nodes=2"], "at most 1 nodes, not 2", "nodes=1"),
    ([SLURM, "nodes=64", "facility.limits.max_nodes=32"], "at most 32 nodes, not 64", "nodes=32"),
    ([SLURM, "nodes=8", "facility.limits.min_nodes=16"], "at least 16 nodes, not 8", "nodes=16"),
    (
        [SLURM, "nodes=32", "spare_nodes=1", "facility.limits.max_nodes=32"],
        "at most 32 nodes, not 33 (32 and 1 spare)",
        "nodes=31",
    ),
    (
        [SLURM, "ranks_per_node=2"],
        "ranks_per_node (2) is more than the devices of a node (1)",
        "=1",
    ),
    (
        [SLURM, "facility.walltime_minutes=99", "facility.limits.max_walltime_minutes=60"],
        "allows 60 minutes, not 99",
        "facility.walltime_minutes=60",
    ),
    ([SLURM, "facility.limits.needs_account=true"], "needs an account", "facility.account=NAME"),
]


@pytest.mark.parametrize(("overrides", "found", "hint"), CASES, ids=lambda case: str(case))
def test_a_job_beyond_the_limits_is_refused(overrides, found, hint, composed):
    with pytest.raises(UserError) as caught:
        check(composed(*overrides).run, here=False, environment={})
    assert found in caught.value.found
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["frontier", "nodes=60", "facility.walltime_minutes=1440"], "allows 120 minutes"),
        (["polaris", "nodes=10", "facility.walltime_minutes=1440"], "for 10 nodes, allows 180"),
        (["polaris", "nodes=30", "facility.walltime_minutes=361"], "for 30 nodes, allows 360"),
    ],
)
def test_the_longest_job_goes_by_its_size(overrides, found, composed):
    words = (*overrides[1:], "facility.account=a", "image=none", SAMPLES)
    run = composed(f"facility={overrides[0]}", *words)
    with pytest.raises(UserError, match=found):
        check_time(run.run)


@pytest.mark.parametrize(
    "words",
    [
        ["frontier", "nodes=60", "facility.submit.partition=extended"],
        ["polaris", "nodes=100"],
        ["polaris", "nodes=4", "facility.submit.q=capacity"],
    ],
)
def test_a_queue_of_its_own_has_its_own_limits(words, composed):
    line = [f"facility={words[0]}", *words[1:], "facility.walltime_minutes=1440", "image=none"]
    check_time(composed(*line, "facility.account=a", SAMPLES).run)


def test_a_job_within_the_limits_is_not(composed):
    line = ["nodes=8", "facility.limits.max_nodes=8", "facility.limits.min_nodes=8"]
    account = ["facility.limits.needs_account=true", "facility.account=mine"]
    time = ["facility.walltime_minutes=60", "facility.limits.max_walltime_minutes=60"]
    check(composed(SLURM, *line, *account, *time).run, here=False, environment={})


def test_on_processors_there_may_be_more_ranks_than_devices(composed):
    check(composed("facility=laptop", "ranks_per_node=4").run, here=False, environment={})


def test_inside_a_job_nobody_asks_who_pays(composed):
    run = composed(SLURM, "nodes=4", "facility.limits.needs_account=true").run
    check(run, here=True, environment={"SLURM_JOB_NUM_NODES": "4"})
    with pytest.raises(UserError, match="this job has 8 nodes, the run asks for 4"):
        check(run, here=True, environment={"SLURM_JOB_NUM_NODES": "8"})


def test_a_job_s_nodes_are_taken_unless_others_are_named():
    job = {"SLURM_JOB_NUM_NODES": "3"}
    assert with_allocated_nodes(["a=1"], job) == ["a=1", "nodes=3"]
    assert with_allocated_nodes(["nodes=2"], job) == ["nodes=2"]
    assert with_allocated_nodes(["++nodes=2"], job) == ["++nodes=2"]
    assert with_allocated_nodes(["a=1"], {}) == ["a=1"]
    assert with_allocated_nodes(["spare_nodes=1"], job) == ["spare_nodes=1", "nodes=2"]


def test_a_job_s_spare_nodes_are_counted(composed):
    run = composed(SLURM, "nodes=2", "spare_nodes=1").run
    check(run, here=True, environment={"SLURM_JOB_NUM_NODES": "3"})
    with pytest.raises(UserError, match=r"has 2 nodes, the run asks for 3 \(2 and 1 spare\)"):
        check(run, here=True, environment={"SLURM_JOB_NUM_NODES": "2"})
    limit = ("facility.limits.walltime_minutes_up_to_nodes={2: 10, 4: 5}", "nodes=2")
    long = composed(SLURM, *limit, "spare_nodes=1", "facility.walltime_minutes=10").run
    with pytest.raises(UserError, match="for 3 nodes, allows 5 minutes"):
        check(long, here=False, environment={})


@pytest.mark.parametrize("words", [["facility=laptop"], ["facility=testbed_pbs"]])
def test_a_spare_needs_srun(words, composed):
    with pytest.raises(UserError, match="spare_nodes=1: a spare takes a node's place by srun"):
        composed(*words, "spare_nodes=1")


def test_a_folder_that_cannot_be_written_is_named(composed, here):
    (here / "runs").write_text("a file where a folder should be")
    with pytest.raises(UserError, match="cannot write the run folder"):
        write_run_folder(composed("facility=laptop"))


def test_a_job_that_lacks_cores_is_told_so_before_its_step(composed):
    run = composed("facility=testbed", "nodes=1", "facility.node.cores=4").run
    job = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_CPUS_PER_NODE": "4"}
    check(run, True, job)
    check(run, True, {"SLURM_JOB_NUM_NODES": "1"})
    with pytest.raises(UserError) as error:
        check(run, True, job | {"SLURM_JOB_CPUS_PER_NODE": "4(x3),2"})
    assert "2 cores on a node, the run's 2 tasks of 2 cores need 4" in error.value.found
    assert "--ntasks-per-node=2 --cpus-per-task=2" in error.value.hint


def test_a_heterogeneous_job_is_called_so(composed):
    run = composed("facility=testbed", "nodes=1").run
    job = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1"}
    with pytest.raises(UserError, match="heterogeneous: 2 components"):
        check(run, True, job)
