"""Where rank 0 listens: the first host of the ranks, and a port made of the job's identity."""

import hashlib
from collections.abc import Mapping

from atoll.errors import UserError
from atoll.launch.environ import node_file_hosts, step_task_count, whole_number
from atoll.launch.hostlist import expand_hosts
from atoll.launch.placement import Placement

LOOPBACK = "127.0.0.1"
# Below the ephemeral range of Linux (32768 up), so that no outgoing connection holds the port.
FIRST_PORT, PORT_COUNT = 20000, 10000

# source -> what tells one start of ranks from the next, the same on all of its ranks.
_JOB_IDS = {
    "explicit": ("SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID"),
    "slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    "pals": ("PBS_JOBID", "PALS_APID", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    "ompi": (
        "PBS_JOBID",
        "SLURM_JOB_ID",
        "PMIX_NAMESPACE",
        "OMPI_MCA_ess_base_jobid",
        "OMPI_MCA_orte_ess_jobid",
    ),
}


def master_address(
    placement: Placement, environ: Mapping[str, str], hostname: str, suffix: str
) -> str:
    """Name the host of rank 0, with `suffix` where it comes from a list of nodes.

    Raises UserError where several nodes are in play and the environment lists none.
    """
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    if placement.node_count == 1:
        return LOOPBACK
    if step_task_count(environ) > 1 and "SLURM_STEP_NODELIST" in environ:
        return on_fabric(expand_hosts(environ["SLURM_STEP_NODELIST"])[0], suffix)
    if "PBS_NODEFILE" in environ:
        hosts = node_file_hosts(environ["PBS_NODEFILE"])
        _refuse_head_elsewhere(placement.rank, hostname, hosts)
        return on_fabric(hosts[0], suffix)
    if "SLURM_JOB_NODELIST" in environ:
        return on_fabric(expand_hosts(environ["SLURM_JOB_NODELIST"])[0], suffix)
    raise UserError(
        f"{placement.world_size} ranks on {placement.node_count} nodes ({placement.source}), and "
        f"no list of nodes in the environment of {hostname}",
        "set MASTER_ADDR to the host of rank 0",
    )


def on_fabric(host: str, suffix: str) -> str:
    """A node's name on the fast network; some schedulers list short names, others full ones.

    A suffix that begins with a dot is a domain: it takes the place of the one that a full name
    has. Any other (JSC's `i`) belongs to the node's own name.
    """
    node, dot, domain = host.partition(".")
    if not suffix.startswith("."):
        return f"{node}{suffix}{dot}{domain}"
    is_full = domain.split(".")[-1] == suffix.split(".")[-1]
    return node + suffix if is_full else host + suffix


def master_port(placement: Placement, environ: Mapping[str, str], port_override: int | None) -> int:
    """Choose the port of rank 0's store; 0 for a lone process, which takes a free one.

    Raises UserError where two ports are asked for, or no job id is there to make one of.
    """
    stated = whole_number(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else None
    if stated is not None and port_override not in (None, stated):
        raise UserError(
            f"--port {port_override}, but MASTER_PORT={stated} in the environment",
            "keep one of them",
        )
    port = port_override if stated is None else stated
    if port is not None:
        if not 0 < port < 65536:
            raise UserError(f"port {port}", "choose a port from 1024 to 65535")
        return port
    if placement.world_size == 1:
        return 0
    identity = [environ[name] for name in _JOB_IDS[placement.source] if environ.get(name)]
    if not identity:
        raise UserError(
            f"{placement.world_size} ranks ({placement.source}), and no job id to make a port of",
            "pass --port, or set MASTER_PORT, the same on every rank",
        )
    return port_from(*identity)


def port_from(*identity: str) -> int:
    """Make a port of a job's identity, the same in every process (`hash()` is not)."""
    digest = hashlib.sha256("/".join(identity).encode()).digest()
    return FIRST_PORT + int.from_bytes(digest[:8], "big") % PORT_COUNT


def _refuse_head_elsewhere(rank: int, hostname: str, hosts: list[str]) -> None:
    short_names = [host.split(".")[0] for host in hosts]
    short_name = hostname.split(".")[0]
    if rank == 0 and short_name in short_names[1:]:
        raise UserError(
            f"rank 0 runs on {short_name}, host {short_names.index(short_name) + 1} of the node "
            f"file, but the file begins with {short_names[0]}",
            "start the ranks in the order of the node file, or set MASTER_ADDR",
        )
