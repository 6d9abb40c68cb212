"""Ranks, address and port are read from what a scheduler left in the environment."""

import subprocess
import sys
from pathlib import Path

import pytest

from atoll.errors import UserError
from atoll.launch import Placement, device_index, placement_from
from atoll.launch.command import threads_per_rank
from atoll.launch.master import port_from

EXPLICIT = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
MASTER = {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "14",
    "SLURM_STEP_NODELIST": "g[1-2]n[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x3),2",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}
PALS = {
    "PMI_RANK": "6",
    "PMI_SIZE": "8",
    "PALS_LOCAL_RANKID": "2",
    "PMI_LOCAL_RANK": "2",
    "PALS_LOCAL_SIZE": "4",
    "PBS_JOBID": "99.polaris",
    "PALS_APID": "abc",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prte-7@1",
}


def placed(environ: dict[str, str], port: int | None = None, suffix: str = "") -> Placement:
    return placement_from(environ, "here", port, suffix)


def test_alone() -> None:
    assert placed({}) == Placement(0, 1, 0, 1, 0, 1, "127.0.0.1", 0, "single")


def test_explicit() -> None:
    found = placed({**EXPLICIT, **MASTER}, suffix="i")
    assert found == Placement(5, 8, 1, 4, 1, 2, "head", 29500, "explicit")


def test_slurm_step_with_uneven_nodes() -> None:
    port = port_from("4711", "0")
    assert placed(STEP) == Placement(9, 14, 1, 4, 2, 4, "g1n03", port, "slurm")
    last = {**STEP, "SLURM_PROCID": "13", "SLURM_NODEID": "3"}
    assert placed(last) == Placement(13, 14, 1, 2, 3, 4, "g1n03", port, "slurm")


def test_slurm_step_places_every_rank_once() -> None:
    counts, rank = [4, 4, 4, 2], 0
    for node_rank, count in enumerate(counts):
        for local_rank in range(count):
            numbers = {"SLURM_PROCID": rank, "SLURM_LOCALID": local_rank, "SLURM_NODEID": node_rank}
            found = placed({**STEP, **{name: str(number) for name, number in numbers.items()}})
            assert (found.rank, found.local_rank, found.local_world_size, found.node_rank) == (
                rank,
                local_rank,
                count,
                node_rank,
            )
            rank += 1


def test_slurm_step_without_node_id() -> None:
    environ = {name: value for name, value in STEP.items() if name != "SLURM_NODEID"}
    assert placed(environ).node_rank == 2


@pytest.mark.parametrize(
    ("host", "suffix", "address"),
    [
        ("x3006c0s13b1n0", ".hsn.cm.site.gov", "x3006c0s13b1n0.hsn.cm.site.gov"),
        ("x3006c0s13b1n0.hsn.cm.site.gov", ".hsn.cm.site.gov", "x3006c0s13b1n0.hsn.cm.site.gov"),
        ("n1.cluster.org", ".ib.cluster.org", "n1.ib.cluster.org"),
        ("n1.cluster.org", "i", "n1i.cluster.org"),
        ("n1", "-ib0", "n1-ib0"),
    ],
)
def test_a_node_file_with_full_names_doubles_no_suffix(
    host: str, suffix: str, address: str, tmp_path: Path
) -> None:
    node_file = tmp_path / "nodes"
    node_file.write_text(f"{host}\nother.cluster.org\n")
    found = placed({**PALS, "PBS_NODEFILE": str(node_file)}, suffix=suffix)
    assert found.master_address == address


def test_suffix_and_port_of_a_facility() -> None:
    found = placed(STEP, port=3442, suffix="i.cluster")
    assert (found.master_address, found.master_port) == ("g1n03i.cluster", 3442)


def test_one_node_talks_to_itself() -> None:
    one_node = {"SLURM_STEP_NODELIST": "n7", "SLURM_STEP_TASKS_PER_NODE": "14"}
    ninth = {"SLURM_LOCALID": "9", "SLURM_NODEID": "0"}
    assert placed({**STEP, **one_node, **ninth}, suffix="i").master_address == "127.0.0.1"


def test_explicit_master_wins_over_the_step() -> None:
    found = placed({**STEP, **MASTER}, suffix="i")
    assert (found.master_address, found.master_port, found.source) == ("head", 29500, "slurm")


@pytest.mark.parametrize("step_id", ["batch", "4294967291", "extern", "interactive"])
def test_the_batch_script_is_no_step(step_id: str) -> None:
    assert placed({**STEP, "SLURM_STEP_ID": step_id}).source == "single"


def test_a_job_without_a_step_is_a_single_process() -> None:
    batch = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    assert placed(batch) == placed({})


def test_pals(tmp_path: Path) -> None:
    node_file = tmp_path / "nodes"
    node_file.write_text("x1.hsn\nx1.hsn\nx2.hsn\n")
    found = placed({**PALS, "PBS_NODEFILE": str(node_file)}, suffix=".local")
    port = port_from("99.polaris", "abc")
    assert found == Placement(6, 8, 2, 4, 1, 2, "x1.hsn.local", port, "pals")


def test_pals_without_a_world_size_counts_the_nodes(tmp_path: Path) -> None:
    node_file = tmp_path / "nodes"
    node_file.write_text("x1\nx2\nx3\n")
    stated = {name: value for name, value in PALS.items() if not name.startswith("PMI_")}
    found = placed({**stated, "PALS_RANKID": "6", "PBS_NODEFILE": str(node_file)})
    assert (found.world_size, found.node_count, found.node_rank) == (12, 3, 1)


def test_open_mpi() -> None:
    port = port_from("prte-7@1")
    assert placed(OMPI) == Placement(1, 2, 1, 2, 0, 1, "127.0.0.1", port, "ompi")


def test_open_mpi_started_inside_a_step_of_one_task() -> None:
    assert placed({**STEP, "SLURM_STEP_NUM_TASKS": "1", **OMPI}).source == "ompi"


def test_explicit_ranks_win_over_a_step_of_the_same_size() -> None:
    explicit = {"RANK": "3", "WORLD_SIZE": "14", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    found = placed({**STEP, **explicit})
    assert (found.rank, found.source, found.master_address) == (3, "explicit", "g1n03")


def test_torchrun_agents_are_the_tasks_of_a_step() -> None:
    agents = {"SLURM_STEP_NUM_TASKS": "2", "GROUP_WORLD_SIZE": "2"}
    assert placed({**STEP, **EXPLICIT, **MASTER, **agents}).world_size == 8


CONTRADICTIONS: list[tuple[dict[str, str], list[str]]] = [
    ({**EXPLICIT, **MASTER, "RANK": "8"}, ["8", "rank", "world size"]),
    ({**EXPLICIT, **MASTER, "LOCAL_RANK": "4"}, ["local rank", "is 4"]),
    ({**EXPLICIT, **MASTER, "LOCAL_RANK": "2"}, ["rank 5", "local rank 2", "local rank 1 ("]),
    ({**EXPLICIT, **MASTER, "WORLD_SIZE": "7"}, ["7 ranks", "nodes of 4"]),
    ({**EXPLICIT, **MASTER, "WORLD_SIZE": "eight"}, ["WORLD_SIZE='eight'"]),
    ({**EXPLICIT, **MASTER, "RANK": "-1"}, ["RANK='-1'"]),
    ({**EXPLICIT, **MASTER, "LOCAL_WORLD_SIZE": "0"}, ["local world size is 0"]),
    ({**EXPLICIT, **MASTER, "MASTER_PORT": "0"}, ["port 0"]),
    ({**EXPLICIT, **MASTER, "MASTER_PORT": "65536"}, ["port 65536"]),
    ({"RANK": "0", "WORLD_SIZE": "2"}, ["LOCAL_RANK, LOCAL_WORLD_SIZE"]),
    (EXPLICIT, ["8 ranks on 2 nodes", "no list of nodes"]),
    ({**EXPLICIT, "MASTER_ADDR": "head"}, ["8 ranks", "no job id"]),
    ({**STEP, **EXPLICIT}, ["world size 8", "SLURM_STEP_NUM_TASKS=14"]),
    ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "4(x4)"}, ["sums to 16", "NUM_TASKS=14"]),
    ({**STEP, "SLURM_STEP_NODELIST": "n[1-3]"}, ["3 hosts", "on 4"]),
    ({**STEP, "SLURM_STEP_NODELIST": "n[4-1]"}, ["4-1"]),
    ({**STEP, "SLURM_PROCID": "14"}, ["SLURM_PROCID is 14", "SLURM_STEP_NUM_TASKS is 14"]),
    ({**STEP, "SLURM_LOCALID": "4"}, ["SLURM_LOCALID is 4", "local tasks is 4"]),
    ({**STEP, "SLURM_LOCALID": "2"}, ["SLURM_LOCALID=2", "local rank 1"]),
    ({**STEP, "SLURM_LOCALID": "0"}, ["SLURM_LOCALID=0", "local rank 1"]),
    ({**EXPLICIT, **MASTER, "RANK": "9"}, ["is 9", "world size is 8"]),
    ({**EXPLICIT, **MASTER, "LOCAL_RANK": "0"}, ["has local rank 0", "it is local rank"]),
    ({**EXPLICIT, **MASTER, "LOCAL_RANK": "3"}, ["has local rank 3", "it is local rank"]),
    ({**STEP, "SLURM_NODEID": "1"}, ["on node 1", "on node 2"]),
    ({**STEP, "SLURM_HET_SIZE": "2"}, ["heterogeneous", "2 components"]),
    ({**STEP, "PMI_SIZE": "8"}, ["world size 14 (slurm)", "PMI_SIZE=8"]),
    ({**STEP, "PMI_SIZE": "14", "PMI_RANK": "3"}, ["rank 9 (slurm)", "PMI_RANK=3"]),
    ({**STEP, **OMPI}, ["world size 14", "OMPI_COMM_WORLD_SIZE=2"]),
    ({**PALS, "PALS_RANKID": "5"}, ["PMI_RANK=6", "PALS_RANKID=5"]),
    ({"PMI_SIZE": "8", "PMI_RANK": "6"}, ["8 ranks (pals)", "PALS_LOCAL_RANKID or"]),
    ({**PALS, "PBS_NODEFILE": "nowhere"}, ["PBS_NODEFILE=nowhere"]),
    ({**PALS, "PBS_NODEFILE": "/dev/null"}, ["/dev/null is empty"]),
    ({**OMPI, "PMIX_NAMESPACE": ""}, ["2 ranks (ompi)", "no job id"]),
]


@pytest.mark.parametrize(("environ", "words"), CONTRADICTIONS)
def test_contradictions_are_refused_with_their_numbers(
    environ: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        placed(environ)
    assert all(word in refused.value.found for word in words), refused.value.found
    assert refused.value.hint


@pytest.mark.parametrize(
    ("environ", "numbers"),
    [
        ({**STEP, "SLURM_PROCID": "14"}, "from 0 to 13:"),
        ({**EXPLICIT, **MASTER, "LOCAL_RANK": "4"}, "from 0 to 3:"),
        ({**EXPLICIT, **MASTER, "LOCAL_WORLD_SIZE": "0"}, "from 0 to 0:"),
    ],
)
def test_a_number_out_of_range_is_told_its_range(environ: dict[str, str], numbers: str) -> None:
    with pytest.raises(UserError) as refused:
        placed(environ)
    assert numbers in refused.value.hint


def test_a_world_of_one_says_nothing() -> None:
    assert placed({"PMI_RANK": "0", "PMI_SIZE": "1"}).source == "single"
    assert placed({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}).source == "single"
    assert placed({**STEP, "SLURM_HET_SIZE": "1"}).source == "slurm"
    two = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_PROCID": "1"}
    node = {"SLURM_STEP_NODELIST": "n7", "SLURM_NODEID": "0"}
    assert placed({**STEP, **two, **node}).world_size == 2


def test_a_stated_world_size_wins_over_the_nodes_of_the_job(tmp_path: Path) -> None:
    node_file = tmp_path / "nodes"
    node_file.write_text("x1\nx2\nx3\n")
    found = placed({**PALS, "PALS_RANKID": "6", "PBS_NODEFILE": str(node_file)})
    assert (found.world_size, found.node_count) == (8, 2)


def test_pals_without_a_node_file_or_a_local_size_has_no_world_size() -> None:
    assert placed({"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "1"}).source == "single"
    assert placed({"PALS_RANKID": "0", "PBS_NODEFILE": "/dev/null"}).source == "single"


@pytest.mark.parametrize("name", sorted(set(STEP) - {"SLURM_JOB_ID", "SLURM_STEP_ID"}))
def test_a_step_with_a_variable_missing(name: str) -> None:
    environ = {key: value for key, value in STEP.items() if key != name}
    if name == "SLURM_STEP_NUM_TASKS":
        assert placed(environ).source == "single"
    elif name != "SLURM_NODEID":
        with pytest.raises(UserError, match=name):
            placed(environ)


def test_two_ports_are_refused() -> None:
    with pytest.raises(UserError, match="--port 3442, but MASTER_PORT=29500"):
        placed({**EXPLICIT, **MASTER}, port=3442)


def test_rank_0_elsewhere_than_the_node_file_says(tmp_path: Path) -> None:
    node_file = tmp_path / "nodes"
    node_file.write_text("x1.hsn\nx2.hsn\n")
    environ = {**PALS, "PMI_RANK": "0", "PALS_LOCAL_RANKID": "0", "PMI_LOCAL_RANK": "0"}
    environ["PBS_NODEFILE"] = str(node_file)
    assert placement_from(environ, "x1", None, "").master_address == "x1.hsn"
    with pytest.raises(UserError, match=r"rank 0 runs on x2, host 2 .* begins with x1"):
        placement_from(environ, "x2.cluster", None, "")


def test_the_port_is_the_same_in_every_process() -> None:
    code = "from atoll.launch.master import port_from; print(port_from('4711', '0'))"
    elsewhere = {
        int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(2)
    }
    assert elsewhere == {port_from("4711", "0")}
    ports = {port_from("4711", str(step)) for step in range(50)}
    assert len(ports) > 40 and all(20000 <= port < 30000 for port in ports)


def test_ranks_forked_by_the_task_of_a_node() -> None:
    node = Placement(2, 3, 0, 1, 2, 3, "head", 20001, "slurm")
    assert node.local(1, 4, "fork") == Placement(9, 12, 1, 4, 2, 3, "head", 20001, "fork")


@pytest.mark.parametrize(
    ("local_rank", "local_world_size", "visible", "index"),
    [(3, 4, 1, 0), (0, 1, 1, 0), (3, 4, 4, 3), (1, 2, 8, 1)],
)
def test_device_index(local_rank: int, local_world_size: int, visible: int, index: int) -> None:
    assert device_index(local_rank, local_world_size, visible) == index


@pytest.mark.parametrize("visible", [0, 2, 3])
def test_more_ranks_than_devices(visible: int) -> None:
    with pytest.raises(UserError, match=f"4 ranks on this node, {visible} devices visible"):
        device_index(0, 4, visible)


def test_threads_are_shared_among_the_ranks_of_a_node() -> None:
    local = Placement(0, 4, 0, 4, 0, 1, "127.0.0.1", 1, "local")
    step = Placement(0, 4, 0, 4, 0, 1, "127.0.0.1", 1, "slurm")
    assert threads_per_rank(local, 32, 32) == 8
    assert threads_per_rank(local, 2, 2) == 1
    assert threads_per_rank(local, 32, 32, "32") == 8
    assert threads_per_rank(step, 8, 32, "8") == 8
    assert threads_per_rank(step, 32, 32) == 8


def test_ranks_that_mpiexec_bound_to_cores_of_their_own_share_none() -> None:
    """Polaris: --cpu-bind list:24-31:16-23:8-15:0-7 on 64 hardware threads."""
    place = Placement(0, 4, 0, 4, 0, 1, "127.0.0.1", 1, "pals")
    assert threads_per_rank(place, 8, 64, bound=True) == 8
    assert threads_per_rank(place, 64, 64, bound=True) == 16
    assert threads_per_rank(place, 2, 2, bound=True) == 1


def test_ranks_of_mpiexec_in_a_part_of_a_node_share_its_cores() -> None:
    """Without --cpu-bind both may use all 32 cores of the job, which are few of the node's."""
    place = Placement(0, 2, 0, 2, 0, 1, "127.0.0.1", 1, "pals")
    assert threads_per_rank(place, 32, 128) == 16
    assert threads_per_rank(place, 32, 128, bound=True) == 32


def proxied(**other: str) -> dict[str, str]:
    """Rank 5 of `mpiexec -n 8 --ppn 2` on four nodes of Slurm, as MPICH's Hydra leaves it."""
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "n[1-4]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0",
    }
    pmi = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    return step | pmi | other


def test_the_ranks_of_mpiexec_s_proxies_under_slurm():
    place = placement_from(proxied(), "n3", None, "")
    assert (place.rank, place.world_size, place.local_rank, place.node_rank) == (5, 8, 1, 2)
    assert (place.master_address, place.source) == ("n1", "pals")
    other = placement_from(proxied(PMI_RANK="0", MPI_LOCALRANKID="0"), "n1", None, "")
    assert other.master_port == place.master_port


def test_proxies_on_two_nodes():
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]"}
    counts = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1", "PMI_SIZE": "4"}
    place = placement_from(proxied(**step, **counts, PMI_RANK="3"), "n2", None, "")
    assert (place.rank, place.world_size, place.node_rank, place.node_count) == (3, 4, 1, 2)


def test_a_step_of_one_task_on_each_node_has_no_proxies():
    step = {name: value for name, value in proxied().items() if name.startswith("SLURM_")}
    place = placement_from(step, "n3", None, "")
    assert (place.rank, place.world_size, place.node_rank, place.source) == (2, 4, 2, "slurm")


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        (proxied(PMI_SIZE="6"), "world size 4 .*, but PMI_SIZE=6"),
        # two ranks of each task, but the tasks are not one on each node
        ({**STEP, **proxied(), **STEP, "PMI_SIZE": "28"}, "world size 14 .*, but PMI_SIZE=28"),
        # nobody says that there are two on each node
        (
            {name: value for name, value in proxied().items() if name != "MPI_LOCALNRANKS"},
            "world size 4 .*, but PMI_SIZE=8",
        ),
        (
            {name: value for name, value in proxied().items() if name != "SLURM_STEP_NODELIST"},
            "without SLURM_STEP_NODELIST",
        ),
    ],
)
def test_an_mpi_world_that_no_proxies_explain_is_refused(environ, reason):
    with pytest.raises(UserError, match=reason):
        placement_from(environ, "n3", None, "")
