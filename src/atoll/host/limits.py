"""What a facility does not allow, found before anything is queued."""

from atoll.errors import UserError
from atoll.settings import Run


def check_nodes(run: Run) -> None:
    """Refuse a number of nodes or ranks that the facility does not have."""
    facility, limits = run.facility, run.facility.limits
    most = 1 if facility.scheduler == "none" else limits.max_nodes
    if run.nodes < limits.min_nodes:
        raise UserError(
            f"{facility.name} takes jobs of at least {limits.min_nodes} nodes, not {run.nodes}",
            f"nodes={limits.min_nodes}, or another partition with its own facility.limits",
        )
    if most is not None and run.nodes > most:
        raise UserError(
            f"{facility.name} takes jobs of at most {most} nodes, not {run.nodes}",
            f"nodes={most}, or another partition with its own facility.limits",
        )
    if facility.node.device != "cpu" and run.ranks_per_node > facility.node.devices:
        raise UserError(
            f"ranks_per_node ({run.ranks_per_node}) is more than the devices of a node "
            f"({facility.node.devices})",
            f"ranks_per_node={facility.node.devices}, or mend facility.node.devices",
        )


def check_allocation(run: Run, allocated_nodes: str | None) -> None:
    """Refuse to run here on other nodes than this job has; `allocated_nodes` is Slurm's count."""
    if run.facility.scheduler == "none":
        return
    if allocated_nodes is None:
        raise UserError(
            "--here, but this is no Slurm job: SLURM_JOB_NUM_NODES is not set",
            "leave --here out to queue a job, or call salloc first",
        )
    if run.nodes != int(allocated_nodes):
        raise UserError(
            f"this job has {allocated_nodes} nodes, the run asks for {run.nodes}",
            f"leave nodes out, or ask Slurm for as many: -N {run.nodes}",
        )


def check_queue(run: Run) -> None:
    """Refuse a job that the facility's queue would not take."""
    facility, most = run.facility, run.facility.limits.max_walltime_minutes
    if most is not None and (facility.walltime_minutes or 0) > most:
        raise UserError(
            f"{facility.name} allows {most} minutes, not {facility.walltime_minutes}",
            f"facility.walltime_minutes={most}: a run that is submitted again goes on",
        )
    if facility.limits.needs_account and not facility.account:
        raise UserError(
            f"{facility.name} needs an account",
            "facility.account=NAME, once and for all in hydra_conf/local/default.yaml",
        )
