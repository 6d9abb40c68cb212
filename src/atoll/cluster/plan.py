"""`atoll plan`: what each strategy needs on a facility's devices, and which one to take."""

import shlex

from atoll.config.compose import (
    AUTO,
    compose_all,
    config_tree,
    known_shape,
    shardings,
    split_options,
)
from atoll.plan.choose import USABLE, Option, choose, options
from atoll.plan.memory import gibibytes
from atoll.plan.shapes import Shape
from atoll.settings import Run

USAGE = """usage: atoll plan facility=NAME model=NAME [KEY=VALUE …]

Prints, for each strategy, the memory of the fullest device by its parts, what fits, the bytes each
rank sends in a step, the strategy it would choose and why, and the line that submits it.
sharding=auto chooses the same."""
COLUMNS = (
    ("params", "parameters"),
    ("grads", "gradients"),
    ("optim", "optimizer"),
    ("gathered", "gathered"),
    ("buffers", "buffers"),
    ("activ", "activations"),
    ("recomp", "recomputed_activations"),
    ("logits", "logits"),
    ("loading", "loading"),
    ("export", "export"),
    ("host", "host"),
    ("PEAK", "peak"),
)


def main(argv: list[str]) -> int:
    """Print the table and the choice; 1 if nothing fits."""
    flags, overrides = split_options(argv, {"--help", "-h"})
    if flags:
        print(USAGE)
        return 0
    lines = [line for line in overrides if line != AUTO]
    [composition] = compose_all(lines, multirun=False)
    run = composition.run
    shape = known_shape(run)
    found = list(options(run, shape, shardings(config_tree())))
    print(head(run, shape))
    print(table(found))
    best = choose(found)
    print(verdict(run, best))
    kept = [
        line
        for line in lines
        if not line.startswith(("sharding=", "training.activation_checkpointing="))
    ]
    print(f"sbatch/train.sbatch {shlex.join([*kept, *best.overrides])}")
    return 0


def head(run: Run, shape: Shape) -> str:
    node, tokens = run.facility.node, run.data.sequence_tokens
    memory = "unknown" if node.device_memory_gib is None else f"{node.device_memory_gib:g} GiB"
    return (
        f"{run.model.name}: {shape.parameters / 1e6:,.1f} M parameters, {shape.layers} layers; "
        f"{run.training.microbatch_samples} x {tokens} tokens a pass, "
        f"{run.training.global_batch_samples} samples a step\n"
        f"{run.facility.name}: {run.nodes} nodes x {run.ranks_per_node} {node.device} devices, "
        f"memory of each {memory}; all in GiB, of the fullest device"
    )


def table(found: list[Option]) -> str:
    """One line for each strategy."""
    width = max(len(" ".join(option.overrides)) for option in found) if found else 8
    titles = "".join(f"{title:>9}" for title, _ in COLUMNS)
    lines = [f"{'':{width}}{titles}{'sends':>9}  fits"]
    for option in found:
        cells = "".join(f"{gibibytes(getattr(option.memory, f)):>9}" for _, f in COLUMNS)
        answer = {True: "yes", False: "no", None: "?"}[option.fits]
        sent = gibibytes(sum(option.sent.values()))
        lines.append(f"{' '.join(option.overrides):{width}}{cells}{sent:>9}  {answer}")
    return "\n".join(lines)


def verdict(run: Run, best: Option) -> str:
    """What is chosen, and why."""
    if best.fits is None:
        return (
            f"chosen: {' '.join(best.overrides)}, because the memory of a device is not known; "
            "set facility.node.device_memory_gib"
        )
    sent = " + ".join(f"{name} {gibibytes(size)}" for name, size in best.sent.items()) or "nothing"
    return (
        f"chosen: {' '.join(best.overrides)}: of those that leave {1 - USABLE:.0%} of the memory "
        f"free, offload and recompute least, it sends least in a step ({sent} GiB)"
    )
