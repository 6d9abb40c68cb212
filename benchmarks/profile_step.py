"""Where a training step's time goes: the ten costliest operations, and a trace to look into.

    python benchmarks/profile_step.py [--checkpointing none|selective|full] [--trace FILE]

One process on processors, the model and batch of trainer_against_hf.py, three steps after one that
warms up, taken by our engine and optimizer. The trace opens in chrome://tracing or ui.perfetto.dev.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = [
    "facility=laptop",
    f"facility.node.device={DEVICE}",
    "ranks_per_node=1",
    "sharding=single",
    "data=python_stdlib",
]
SHAPE += ["data.sequence_tokens=512", "training.microbatch_samples=8"]
SHAPE += ["training.global_batch_samples=8", "training.steps=4", "evaluation.max_samples=1"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpointing", default="none", choices=["none", "selective", "full"])
    parser.add_argument("--precision", default="auto", choices=["auto", "bf16", "fp32"])
    parser.add_argument("--trace", type=Path, default=Path("runs/step.json"))
    arguments = parser.parse_args()
    words = [
        f"training.activation_checkpointing={arguments.checkpointing}",
        f"precision={arguments.precision}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        seen = profiled(Path(folder), words)
    print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=10))
    arguments.trace.parent.mkdir(parents=True, exist_ok=True)
    seen.export_chrome_trace(str(arguments.trace))
    print(f"trace: {arguments.trace}")
    return 0


def profiled(folder: Path, words: list[str]) -> profile:
    from atoll.config.compose import compose
    from atoll.data.loader import batches_ahead
    from atoll.data.tokenize import prepare
    from atoll.sharding.engines import ENGINES
    from atoll.sharding.process_group import World
    from atoll.train.assemble import assemble
    from atoll.train.state_dict import update

    places = [f"folders.runs={folder}/runs", f"folders.prepared={folder}/prepared", "name=profile"]
    run = compose([*SHAPE, *words, *places]).run
    prepare(run, lambda line: None)
    train_state = assemble(run, folder, World(0, 1, torch.device("cpu")))

    def step() -> None:
        share = next(batches)
        ENGINES["plain"](
            train_state.wrapped,
            list(share.microbatches),
            1.0 / share.global_targets,
            train_state.plan,
        )
        update(train_state, 1e-4, lambda norm: lambda: None)  # no step is left out

    with batches_ahead(train_state.training, run, 0, 4, 0) as batches:
        step()  # warms up
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            for _ in range(3):
                step()
    return seen


if __name__ == "__main__":
    sys.exit(main())
