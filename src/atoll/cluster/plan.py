"""`atoll plan`: what each strategy needs on a facility's devices, and which one to take."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atoll.cluster.compare import compare
from atoll.cluster.learning import forget
from atoll.cluster.measuring import measure
from atoll.cluster.record import record_of, record_text
from atoll.cluster.scaling import GRAMMAR, simulate
from atoll.config import certificate
from atoll.config.compose import (
    AUTO,
    compose,
    config_tree,
    known_shape,
    origin_line,
    overrides_parser,
    shardings,
)
from atoll.config.stated_folders import stated_folder
from atoll.plan.checkpoint_interval import daly_seconds, seconds_between_failures
from atoll.plan.choose import USABLE, Option, options
from atoll.plan.memory import gibibytes, why_unknown
from atoll.plan.own_processors import as_computed_here
from atoll.plan.prediction import checkpoint_bytes
from atoll.plan.search import best_layout
from atoll.plan.seconds import BY_DOCTOR, MEASURED_HERE, STATED, explained, rates_of
from atoll.plan.shapes import Shape
from atoll.plan.traffic import total
from atoll.settings import Run
from atoll.tables import table

ABOUT = """\
Print, for each strategy, the memory of the fullest device by its parts, what fits, the bytes each
rank sends in a step, the strategy it would choose and why, and the line that submits it.
sharding=auto chooses the same. With --record: how far off the predictions of past runs were."""
COLUMNS = {
    "params": "parameters",
    "grads": "gradients",
    "optim": "optimizer",
    "gathered": "gathered",
    "buffers": "buffers",
    "activ": "activations",
    "recomp": "recomputed_activations",
    "logits": "logits",
    "loading": "loading",
    "export": "export",
    "host": "host",
    "ckpt": "checkpoint",
    "PEAK": "peak",
    "whole": "whole",
}
WHOSE = {
    STATED: "stated peaks",
    BY_DOCTOR: "stated peaks and measured links",
    MEASURED_HERE: "measured rates",
}
OF_RUNS = ""  # no folder was named
CHOSEN = "sharding="  # by the planner, whatever was typed
SCALED = (
    CHOSEN,
    "training.activation_checkpointing=",
)  # words of a strategy that is scaled as it is


def main(argv: list[str]) -> int:
    """Print the table and the choice; 1 if nothing fits."""
    parser = overrides_parser("plan", ABOUT)
    parser.add_argument("--json", action="store_true", help="as a JSON object")
    parser.add_argument("--explain", action="store_true", help="what bounds a step, in three lines")
    record = "errors of past predictions, of all runs in FOLDER; default: folders.runs"
    parser.add_argument("--record", nargs="?", const=OF_RUNS, metavar="FOLDER", help=record)
    parser.add_argument("--simulate", metavar="nodes=N,…", help=f"scaling over nodes, {GRAMMAR}")
    parser.add_argument("--measure", action="store_true", help="a minute: what this node can do")
    forgets = "drop what finished runs taught the facility's predictions"
    parser.add_argument("--forget", action="store_true", help=forgets)
    several = "in queue, time and node-hours of the same tokens at each, the soonest done first"
    parser.add_argument("--facilities", metavar="NAME,…", help=several)
    arguments = parser.read(argv)
    if arguments.record is not None:
        is_named = arguments.record != OF_RUNS
        rows = record_of(Path(arguments.record) if is_named else stated_folder("runs"))
        print(json.dumps(rows, indent=1) if arguments.json else record_text(rows))
        return 0
    overrides = [word for word in arguments.overrides if word != AUTO]
    if arguments.measure:
        return measure(overrides)
    if arguments.facilities is not None:
        return compare(overrides, arguments.facilities, arguments.json)
    run = as_computed_here(compose(overrides).run)
    if arguments.forget:
        print(forget(run))
        return 0
    if arguments.simulate:
        stated = any(word.startswith(SCALED) for word in overrides)
        return simulate(run, arguments.simulate, stated, arguments.json, overrides)
    shape = known_shape(run)
    tree, rates = shardings(config_tree()), certificate.rates(run)
    choices = list(options(run, shape, tree, rates))
    kept = [word for word in overrides if not word.startswith(CHOSEN)]
    if not arguments.json:
        print(head(run, shape))
        print(memory_table(choices))
    best = best_layout(run, shape, tree, rates, overrides)
    if arguments.json:
        print(json.dumps(as_json(run, choices, best, kept), indent=1))
        return 0
    if best.overrides not in [option.overrides for option in choices]:
        print(memory_table([best]))
    print(verdict(run, shape, best))
    print(time_line(run, shape, best))
    if arguments.explain:
        print("\n".join(explained(best.seconds)))
    print(checkpoints_line(run, shape))
    print(f"sbatch/train.sbatch {shlex.join([*kept, *best.overrides])}")
    return 0


def as_json(run: Run, choices: list[Option], best: Option, kept: list[str]) -> dict[str, Any]:
    """Each strategy in bytes, whether it fits, and the line that submits the chosen one."""
    return {
        "facility": run.facility.name,
        "model": run.model.name,
        "options": [in_figures(option) for option in choices],
        "chosen": best.overrides,
        "chosen_option": in_figures(best),
        "submit": ["sbatch/train.sbatch", *kept, *best.overrides],
    }


def in_figures(option: Option) -> dict[str, Any]:
    """A strategy's memory and messages in bytes, and the seconds of its step."""
    return {
        "overrides": option.overrides,
        "fits": option.fits,
        "memory_bytes": {part: getattr(option.memory, part) for part in COLUMNS.values()},
        "sent_bytes": option.sent,
        "step_seconds": asdict(option.seconds) | {"total": option.seconds.total},
    }


def head(run: Run, shape: Shape) -> str:
    node, tokens = run.facility.node, run.data.sequence_tokens
    spare = f" (and {run.spare_nodes} spare)" if run.spare_nodes else ""
    memory = "unknown" if node.device_memory_gib is None else f"{node.device_memory_gib:g} GiB"
    return (
        f"{run.model.name}: {shape.parameters / 1e6:,.1f} M parameters, {shape.layers} layers; "
        f"{run.training.microbatch_samples} x {tokens} tokens a pass, "
        f"{run.training.global_batch_samples} samples a step\n"
        f"{run.facility.name}: {run.nodes} nodes{spare} x {run.ranks_per_node} {node.device} "
        f"devices, memory of each {memory}; all in GiB, of the fullest device\n"
        f"{origin_line(run)}"
    )


def memory_table(choices: list[Option]) -> str:
    """One line for each strategy, in GiB."""
    fits = {True: "yes", False: "no", None: "?"}
    rows = [
        [
            " ".join(option.overrides),
            *(gibibytes(getattr(option.memory, part)) for part in COLUMNS.values()),
            sent_text(total(option.sent)),
            fits[option.fits],
        ]
        for option in choices
    ]
    return table(["", *COLUMNS, "sends", "fits"], rows)


def checkpoints_line(run: Run, shape: Shape) -> str:
    """How often to save, where it is known what writing takes."""
    rate = run.restart.failures_per_node_day
    between = seconds_between_failures(run.nodes, rate)
    about = f"checkpoints: a failure each {between / 3600:,.1f} h ({rate:g} a node and day); "
    by_itself = "checkpoint.every_steps=auto finds the interval"
    write_gb_s = certificate.file_write_gb_s(run)
    if write_gb_s is None or why_unknown(run, shape):
        return f"{about}{by_itself} once a save is measured"
    seconds = checkpoint_bytes(run, shape) / (write_gb_s * 1e9 * run.nodes)
    minutes = daly_seconds(seconds, between) / 60
    return (
        f"{about}a save of {seconds:,.1f} s, written by one process a node, "
        f"is best each {minutes:,.1f} min; {by_itself} from the run's own saves"
    )


def time_line(run: Run, shape: Shape, best: Option) -> str:
    """The least that a step takes, and what bounds it; or what is not known."""
    if why := why_unknown(run, shape):
        return f"time: unknown, {why}"
    step = best.seconds.total
    if step is None:
        missing = ", ".join(best.seconds.unknown) or "the device"
        return f"time: unknown, {run.facility.name} states no rate for: {missing}"
    tokens = run.training.global_batch_samples * run.data.sequence_tokens
    rates = rates_of(run, certificate.rates(run))
    least, most = ("at least", "at most") if rates.on_processors is None else ("about", "about")
    return (
        f"time: {least} {step:,.3g} s a step, {most} {tokens / step:,.0f} tokens/s, "
        f"{run.nodes * step / tokens * 1e9 / 3600:,.1f} node-hours a billion tokens; "
        f"bound by {best.seconds.bound}, at the {WHOSE[rates.source]}"
    )


def sent_text(size: float | None) -> str:
    return "unknown" if size is None else gibibytes(size)


def verdict(run: Run, shape: Shape, best: Option) -> str:
    """What is chosen, and why."""
    if best.fits is None:
        unset = "the memory of a device is not known; set facility.node.device_memory_gib"
        return f"chosen: {' '.join(best.overrides)}, because {why_unknown(run, shape) or unset}"
    sent = " + ".join(f"{name} {sent_text(size)}" for name, size in best.sent.items()) or "nothing"
    if best.seconds.total is not None:
        return (
            f"chosen: {' '.join(best.overrides)}: of those that leave {1 - USABLE:.0%} of the "
            f"memory free, it takes least time (sends {sent} GiB)"
        )
    return (
        f"chosen: {' '.join(best.overrides)}: of those that leave {1 - USABLE:.0%} of the memory "
        "free, with the least offload and activation checkpointing, it sends least in a step "
        f"({sent} GiB)"
    )
