"""What a facility does not allow, found before anything is queued."""

import re
from collections.abc import Mapping
from pathlib import Path

from atoll.cluster.launchers import tasks
from atoll.errors import UserError
from atoll.settings import Queue, Run


def check_supported(run: Run) -> None:
    """Refuse a facility that is known, and known not to run Atoll."""
    if run.facility.unsupported:
        raise UserError(
            f"{run.facility.name} cannot be used: {run.facility.unsupported}",
            "choose another facility=NAME, or submit with facility.unsupported=null to try it",
        )


def check_nodes(run: Run) -> None:
    """Refuse a number of nodes or ranks that the facility, or the queue asked for, has not."""
    facility = run.facility
    if facility.scheduler == "none" and run.launcher.name != "ssh":
        _check_between(run, facility.name, 1, 1)
    name, limits = job_limits(run)
    _check_between(run, name, limits.min_nodes, limits.max_nodes)
    if facility.node.device != "cpu" and run.ranks_per_node > facility.node.devices:
        raise UserError(
            f"ranks_per_node ({run.ranks_per_node}) is more than the devices of a node "
            f"({facility.node.devices})",
            f"ranks_per_node={facility.node.devices}, or fix facility.node.devices",
        )


def check_queue(run: Run) -> None:
    """Refuse a job that the facility's queue would not take."""
    check_time(run)
    check_account(run)


def check_account(run: Run) -> None:
    """Refuse a job of nobody's account, where the facility asks for one."""
    if run.facility.limits.needs_account and not run.facility.account:
        raise UserError(
            f"{run.facility.name} needs an account",
            "facility.account=NAME, once and for all in hydra_conf/local/default.yaml",
        )


def check_time(run: Run) -> None:
    """Refuse a job that is longer than its queue allows, or too short to save its state."""
    minutes = run.facility.walltime_minutes or 0
    name, limits = job_limits(run)
    most = limits.max_walltime_minutes
    if most is not None and minutes > most:
        raise _too_long(name, most, minutes)
    by_size = limits.walltime_minutes_up_to_nodes
    most = next((by_size[size] for size in sorted(by_size) if run.job_nodes <= size), None)
    if most is not None and minutes > most:
        raise _too_long(f"{name}, for {run.job_nodes} nodes,", most, minutes)
    if run.restart.notice_seconds >= 60 * minutes > 0:
        raise UserError(
            f"restart.notice_seconds ({run.restart.notice_seconds}) leaves nothing of a job of "
            f"{minutes} minutes",
            f"a longer facility.walltime_minutes, or restart.notice_seconds={15 * minutes}",
        )


def allocated_nodes(environment: Mapping[str, str]) -> int | None:
    """How many nodes the job around this process has; None outside a job."""
    if "SLURM_JOB_NUM_NODES" in environment:
        return int(environment["SLURM_JOB_NUM_NODES"])
    if "PBS_NODEFILE" in environment:
        return len(set(Path(environment["PBS_NODEFILE"]).read_text().split()))
    return None


def check_allocation(run: Run, environment: Mapping[str, str]) -> None:
    """Refuse to run here on other nodes, or fewer cores, than this job has."""
    if run.facility.scheduler == "none":
        return
    components = int(environment.get("SLURM_HET_SIZE", 1))
    if components > 1:
        raise UserError(
            f"this job is heterogeneous: {components} components",
            "ask for one homogeneous job: Slurm numbers the ranks of each component apart",
        )
    allocated = allocated_nodes(environment)
    if allocated is None:
        raise UserError(
            "--here, but this is no job: neither SLURM_JOB_NUM_NODES nor PBS_NODEFILE is set",
            "leave --here out to queue a job, or call salloc or qsub -I first",
        )
    if run.job_nodes != allocated:
        raise UserError(
            f"this job has {allocated} nodes, the run asks for {_counted(run)}",
            f"leave nodes out, or ask the scheduler for as many: -N {run.job_nodes}",
        )
    _check_cores(run, environment.get("SLURM_JOB_CPUS_PER_NODE", ""))


def _check_cores(run: Run, cores_per_node: str) -> None:
    """Refuse a step that srun would refuse: more cores than a node of the job has."""
    wanted = tasks(run)
    counts = [int(count) for count in re.findall(r"(?:^|,)(\d+)", cores_per_node)]
    if wanted.cores is None or not counts or wanted.cores * wanted.per_node <= min(counts):
        return
    raise UserError(
        f"this job has {min(counts)} cores on a node, the run's {wanted.per_node} tasks of "
        f"{wanted.cores} cores need {wanted.cores * wanted.per_node}",
        f"sbatch --ntasks-per-node={wanted.per_node} --cpus-per-task={wanted.cores} …",
    )


def job_limits(run: Run) -> tuple[str, Queue]:
    """The limits that hold for the job, and whose: its queue's where they are known."""
    facility = run.facility
    for name in (str(facility.submit.get(flag)) for flag in ("qos", "partition", "q")):
        if name in facility.limits.queues:
            return f"{name} of {facility.name}", facility.limits.queues[name]
    return facility.name, facility.limits


def _check_between(run: Run, name: str, least: int, most: int | None) -> None:
    other = "or another queue: facility.submit and facility.limits.queues name them"
    if run.job_nodes < least:
        raise UserError(
            f"{name} takes jobs of at least {least} nodes, not {_counted(run)}",
            f"nodes={least}, {other}",
        )
    if most is not None and run.job_nodes > most:
        raise UserError(
            f"{name} takes jobs of at most {most} nodes, not {_counted(run)}",
            f"nodes={max(1, most - run.spare_nodes)}, {other}",
        )


def _counted(run: Run) -> str:
    """The nodes of its job, in words."""
    spare = f" ({run.nodes} and {run.spare_nodes} spare)" if run.spare_nodes else ""
    return f"{run.job_nodes}{spare}"


def _too_long(name: str, most: int, minutes: int) -> UserError:
    return UserError(
        f"{name} allows {most} minutes, not {minutes}",
        f"facility.walltime_minutes={most}: a run that reaches it goes on in another job",
    )
