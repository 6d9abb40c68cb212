"""Which rank this process is: read from what its scheduler or launcher left in the environment."""

from collections.abc import Mapping
from dataclasses import replace

from atoll.errors import UserError
from atoll.launch.environ import agreed_number, node_file_hosts, step_task_count, whole_number
from atoll.launch.hostlist import expand_hosts, expand_task_counts
from atoll.launch.master import master_address, master_port
from atoll.launch.placement import Placement

_EXPLICIT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SLURM_STEP = (
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
)
# source -> for each number, the variables that may state it (those that are set must agree).
_MPI_SOURCES: dict[str, dict[str, tuple[str, ...]]] = {
    "pals": {
        "rank": ("PMI_RANK", "PALS_RANKID"),
        "world_size": ("PMI_SIZE",),
        "local_rank": ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK", "MPI_LOCALRANKID"),
        "local_world_size": ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    },
    "ompi": {
        "rank": ("OMPI_COMM_WORLD_RANK",),
        "world_size": ("OMPI_COMM_WORLD_SIZE",),
        "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "local_world_size": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    },
}
_ONE_LAUNCHER = "start the ranks with one launcher only, or unset the other's variables"


def placement_from(
    environ: Mapping[str, str], hostname: str, port_override: int | None, address_suffix: str
) -> Placement:
    """Read this process's placement from the environment.

    The first source that speaks wins: RANK and its kin, the proxies of an mpiexec, a Slurm step,
    PALS/PMI, Open MPI, else a single process. A Slurm step or an MPI world of one task says
    nothing. `address_suffix` is added to the first host's name, `port_override` replaces the port
    made of the job's identity.
    Raises UserError where a source is incomplete or two of them contradict each other.
    """
    _refuse_heterogeneous(environ)
    placement = (
        _explicit(environ)
        or (_mpi(environ, "pals") if _is_of_a_proxy(environ) else None)
        or _slurm_step(environ)
        or _mpi(environ, "pals")
        or _mpi(environ, "ompi")
        or Placement(0, 1, 0, 1, 0, 1, "", 0, "single")
    )
    _refuse_disagreement(placement, environ)
    return replace(
        placement,
        master_address=master_address(placement, environ, hostname, address_suffix),
        master_port=master_port(placement, environ, port_override),
    )


def _explicit(environ: Mapping[str, str]) -> Placement | None:
    stated = [name for name in _EXPLICIT if name in environ]
    if not stated:
        return None
    missing = [name for name in _EXPLICIT if name not in environ]
    if missing:
        raise UserError(
            f"{', '.join(stated)} set in the environment, but not {', '.join(missing)}",
            f"set all of {', '.join(_EXPLICIT)}, or none of them",
        )
    return _even_placement("explicit", *(whole_number(environ, name) for name in _EXPLICIT))


def _slurm_step(environ: Mapping[str, str]) -> Placement | None:
    world_size = step_task_count(environ)
    if world_size <= 1:
        return None
    missing = [name for name in _SLURM_STEP if name not in environ]
    if missing:
        raise UserError(
            f"a Slurm step of {world_size} tasks without {', '.join(missing)}",
            "let the container keep the SLURM_* variables of the step",
        )
    counts = _step_task_counts(environ, world_size)
    rank = whole_number(environ, "SLURM_PROCID")
    if rank >= world_size:
        raise _out_of_range("SLURM_PROCID", rank, "SLURM_STEP_NUM_TASKS", world_size)
    node_rank, first_rank = 0, 0
    while first_rank + counts[node_rank] <= rank:
        first_rank += counts[node_rank]
        node_rank += 1
    local_rank = rank - first_rank
    _refuse_other_distribution(environ, rank, local_rank, counts[node_rank], node_rank)
    numbers = (rank, world_size, local_rank, counts[node_rank], node_rank, len(counts))
    return Placement(*numbers, "", 0, "slurm")


def _step_task_counts(environ: Mapping[str, str], world_size: int) -> list[int]:
    again = "start the step again with srun; do not set SLURM_* variables by hand"
    node_list, task_counts = environ["SLURM_STEP_NODELIST"], environ["SLURM_STEP_TASKS_PER_NODE"]
    hosts, counts = expand_hosts(node_list), expand_task_counts(task_counts)
    if len(hosts) != len(counts):
        raise UserError(
            f"SLURM_STEP_NODELIST={node_list} names {len(hosts)} hosts, "
            f"SLURM_STEP_TASKS_PER_NODE={task_counts} counts tasks on {len(counts)}",
            again,
        )
    if sum(counts) != world_size:
        raise UserError(
            f"SLURM_STEP_TASKS_PER_NODE={task_counts} sums to {sum(counts)}, "
            f"SLURM_STEP_NUM_TASKS={world_size}",
            again,
        )
    return counts


def _refuse_other_distribution(
    environ: Mapping[str, str], rank: int, local_rank: int, local_world_size: int, node_rank: int
) -> None:
    """Refuse ranks that are not numbered node by node: sharding within a node counts on it."""
    stated_local_rank = whole_number(environ, "SLURM_LOCALID")
    if stated_local_rank >= local_world_size:
        raise _out_of_range("SLURM_LOCALID", stated_local_rank, "local tasks", local_world_size)
    # Where SLURM_NODEID is missing, the local rank alone still tells.
    stated_node_rank = agreed_number(environ, ("SLURM_NODEID",))
    if stated_local_rank != local_rank or stated_node_rank not in (None, node_rank):
        raise UserError(
            f"SLURM_PROCID={rank} has SLURM_LOCALID={stated_local_rank} on node "
            f"{stated_node_rank}; numbered node by node it is local rank {local_rank} "
            f"on node {node_rank}",
            "start the step with srun --distribution=block",
        )


def _mpi(environ: Mapping[str, str], source: str) -> Placement | None:
    names = _MPI_SOURCES[source]
    found = {number: agreed_number(environ, variables) for number, variables in names.items()}
    if found["world_size"] is None and "PALS_RANKID" in environ and source == "pals":
        found["world_size"] = _pals_world_size(environ, found["local_world_size"])
    if found["world_size"] in (None, 1):
        return None
    missing = [" or ".join(names[number]) for number in found if found[number] is None]
    if missing:
        raise UserError(
            f"{found['world_size']} ranks ({source}) without {', '.join(missing)}",
            f"let the container keep the launcher's variables, or set {', '.join(_EXPLICIT)}",
        )
    return _even_placement(source, *(number or 0 for number in found.values()))


def _is_of_a_proxy(environ: Mapping[str, str]) -> bool:
    """Whether an `mpiexec` started one proxy on each node by srun, and each proxy its ranks."""
    tasks = step_task_count(environ)
    if tasks <= 1 or "PMI_SIZE" not in environ or "SLURM_STEP_NODELIST" not in environ:
        return False
    local_size = agreed_number(environ, _MPI_SOURCES["pals"]["local_world_size"]) or 1
    one_per_node = tasks == len(expand_hosts(environ["SLURM_STEP_NODELIST"]))
    return one_per_node and whole_number(environ, "PMI_SIZE") == tasks * local_size > tasks


def _pals_world_size(environ: Mapping[str, str], local_world_size: int | None) -> int | None:
    """PALS under PMIx states no world size: every node of the job runs as many ranks as this."""
    if local_world_size is None or "PBS_NODEFILE" not in environ:
        return None
    return local_world_size * len(node_file_hosts(environ["PBS_NODEFILE"]))


def _even_placement(
    source: str, rank: int, world_size: int, local_rank: int, local_world_size: int
) -> Placement:
    """Place a rank where only counts are known: as many ranks on each node, node by node."""
    if rank >= world_size:
        raise _out_of_range(f"rank ({source})", rank, "world size", world_size)
    if local_rank >= local_world_size:
        raise _out_of_range(
            f"local rank ({source})", local_rank, "local world size", local_world_size
        )
    if world_size % local_world_size:
        raise UserError(
            f"{world_size} ranks do not divide into nodes of {local_world_size} ({source})",
            "start the same number of ranks on every node",
        )
    if rank % local_world_size != local_rank:
        raise UserError(
            f"rank {rank} has local rank {local_rank}; numbered in nodes of {local_world_size} "
            f"it is local rank {rank % local_world_size} ({source})",
            "number the ranks node by node (block distribution)",
        )
    node_rank, node_count = rank // local_world_size, world_size // local_world_size
    numbers = (rank, world_size, local_rank, local_world_size, node_rank, node_count)
    return Placement(*numbers, "", 0, source)


def _refuse_heterogeneous(environ: Mapping[str, str]) -> None:
    components = agreed_number(environ, ("SLURM_HET_SIZE",)) or 0
    if components > 1:
        raise UserError(
            f"a heterogeneous Slurm job of {components} components",
            "submit one homogeneous job: Slurm numbers the ranks of each component apart",
        )


def _refuse_disagreement(placement: Placement, environ: Mapping[str, str]) -> None:
    """Refuse a second launcher of several tasks that counts, or numbers, the ranks otherwise."""
    stated = {
        "SLURM_STEP_NUM_TASKS": (step_task_count(environ), "SLURM_PROCID"),
        "PMI_SIZE": (agreed_number(environ, ("PMI_SIZE",)) or 0, "PMI_RANK"),
        "OMPI_COMM_WORLD_SIZE": (
            agreed_number(environ, ("OMPI_COMM_WORLD_SIZE",)) or 0,
            "OMPI_COMM_WORLD_RANK",
        ),
    }
    explicit = placement.source == "explicit"
    # torchrun: each task of the step is an agent, which started ranks of its own.
    agents = agreed_number(environ, ("GROUP_WORLD_SIZE",)) if explicit else None
    # mpiexec under Slurm: each task of the step is a proxy, which started ranks of its own.
    agents = step_task_count(environ) if _is_of_a_proxy(environ) else agents
    for size_name, (size, rank_name) in stated.items():
        if size <= 1 or size == agents:
            continue
        if size != placement.world_size:
            raise UserError(
                f"world size {placement.world_size} ({placement.source}), but {size_name}={size}",
                _ONE_LAUNCHER,
            )
        rank = agreed_number(environ, (rank_name,))
        if not explicit and rank not in (None, placement.rank):
            raise UserError(
                f"rank {placement.rank} ({placement.source}), but {rank_name}={rank}",
                _ONE_LAUNCHER,
            )


def _out_of_range(name: str, number: int, size_name: str, size: int) -> UserError:
    return UserError(
        f"{name} is {number}, {size_name} is {size}",
        f"numbers go from 0 to {max(size - 1, 0)}: let one launcher number the ranks",
    )
