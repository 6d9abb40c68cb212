"""Ask the planner before a run is queued: what its devices cannot hold is refused here."""

from atoll.config.compose import config_tree, shardings
from atoll.errors import UserError
from atoll.plan.choose import USABLE, fits, host_gib
from atoll.plan.memory import Memory, memory_of, why_unknown
from atoll.plan.nearest import nearest
from atoll.plan.own_processors import as_computed_here
from atoll.plan.shapes import Shape, known_config, shape_of
from atoll.settings import Run


def check_fit(run: Run) -> None:
    """Refuse a run that does not fit, with the nearest that does.

    Raises `UserError`. Where it is not known whether it fits, `unknown_fit` tells.
    """
    shape = shape_known_here(run)
    if shape is None or not _is_asked(run) or _unknown(run, shape):
        return
    memory = memory_of(as_computed_here(run), shape)
    if fits(run, memory) is False:
        raise _too_large(run, shape, memory)


def unknown_fit(run: Run) -> str:
    """One line for a job of which the planner cannot tell whether it fits, else nothing."""
    on_processors = run.facility.scheduler == "none" or run.facility.node.device == "cpu"
    if on_processors or not _is_asked(run):
        return ""
    why = _unknown(run, shape_known_here(run))
    return f"whether it fits is not known: {why}\n" if why else ""


def _is_asked(run: Run) -> bool:
    return "fit" not in run.override


def shape_known_here(run: Run) -> Shape | None:
    """The shape of a run's model; None where this machine has no configuration of it."""
    config = known_config(run.model)
    return shape_of(config) if config and "model_type" in config else None


def _unknown(run: Run, shape: Shape | None) -> str:
    """Why the planner cannot tell, or nothing."""
    node = run.facility.node
    memory = "memory_gib" if node.device == "cpu" else "device_memory_gib"
    if shape is None:
        return f"this machine does not know the shape of {run.model.source or run.model.name}"
    if why := why_unknown(run, shape):
        return why
    if getattr(node, memory) is None:
        return f"facility.node.{memory} is not set"
    if run.sharding.offload and node.memory_gib is None:
        return "facility.node.memory_gib is not set"
    return ""


def _too_large(run: Run, shape: Shape, memory: Memory) -> UserError:
    knows = "override=fit submits it as it is"
    if fits(run, without := memory_of(as_computed_here(_without_tasks(run)), shape)):
        return UserError(
            _found(run, memory),
            f"evaluation.tasks=[] fits, with {without.whole_gib:.1f} GiB: to score tasks each rank "
            f"has the whole model beside its own part; {knows}",
        )
    near = nearest(run, shape, shardings(config_tree()))
    hint = f"no smaller microbatch, other sharding or more nodes would fit; {knows}"
    if near is not None:
        hint = f"this fits, with {near.needed_gib:.1f} GiB: {' '.join(near.words)}; {knows}"
    return UserError(_found(run, memory), hint)


def _without_tasks(run: Run) -> Run:
    evaluation = run.evaluation.model_copy(update={"tasks": []})
    return run.model_copy(update={"evaluation": evaluation})


def _found(run: Run, memory: Memory) -> str:
    node = run.facility.node
    needed_gib, stated, whose = memory.whole_gib, node.device_memory_gib or 0.0, "a device"
    if node.device == "cpu":
        stated = (node.memory_gib or 0.0) / run.ranks_per_node
    elif needed_gib <= USABLE * stated:
        needed_gib, stated, whose = host_gib(run, memory), node.memory_gib or 0.0, "a node's memory"
    return (
        f"{run.model.name} needs {needed_gib:.1f} of the {stated:g} GiB of {whose}, of which "
        f"{USABLE:.0%} can be filled"
    )
