"""The planner's memory against what runs used: peak of a process's resident memory on processors.

    python benchmarks/plan_memory.py [--check]

Each case is a whole run of a few steps in processes of its own; `planned` is `atoll plan`'s closed
form, `measured` the highest peak of its ranks at the last step, before anything is saved. glibc's
heap keeps freed blocks of some megabytes; it is told to return them, so that what is measured is
what is needed. A run without that setting may hold a third more.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from atoll.config.compose import compose, known_shape
from atoll.plan.memory import Memory, memory_of

LIMIT = 0.10
WIDE = ["model.config.hidden_size=768", "model.config.num_hidden_layers=8"]
LLAMA = ["model=llama_tiny", *WIDE, "model.config.intermediate_size=2048"]
GPT2 = ["model=gpt2_tiny", "model.config.n_embd=768", "model.config.n_layer=8"]
OPT = ["model=opt_tiny", *WIDE, "model.config.ffn_dim=3072", "model.config.word_embed_proj_dim=768"]
LONG = ["data.sequence_tokens=512", "training.microbatch_samples=4"]
CASES: dict[str, list[str]] = {
    "llama, one rank": [*LLAMA, *LONG, "sharding=single", "ranks_per_node=1"],
    "llama, recompute": [
        *[*LLAMA, *LONG, "sharding=single", "ranks_per_node=1"],
        "training.activation_checkpointing=full",
    ],
    "opt, one rank": [*OPT, *LONG, "sharding=single", "ranks_per_node=1"],
    "gpt2, one rank": [*GPT2, *LONG, "sharding=single", "ranks_per_node=1"],
    "llama, ddp": [*LLAMA, *LONG, "sharding=ddp"],
    "llama, full_shard": [*LLAMA, *LONG, "sharding=full_shard"],
}
COMMON = [
    *["facility=laptop", "precision=fp32", "training.steps=3", "training.global_batch_samples=8"],
    *["training.log_every_steps=1", "data=text_files", "data.document=paragraph"],
    *["evaluation.max_samples=1", "tokenizer.vocabulary_tokens=2048", "data.workers=1"],
]


def measured_gib(overrides: list[str], folder: Path) -> float:
    """The highest peak of the ranks, in the last line of training."""
    command = [sys.executable, "-m", "atoll", "submit", *overrides]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command, check=True, cwd=folder, env=environment, **quiet)
    [file] = folder.glob("runs/*/metrics.jsonl")
    records: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    return float([r for r in records if r["event"] == "train"][-2]["memory_gib"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help=f"fail beyond {LIMIT:.0%}%")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--terms", action="store_true", help="print every term too")
    arguments = parser.parse_args()
    print(f"{'':20}{'planned':>10}{'measured':>10}{'error':>8}   GiB of one rank")
    missed = False
    for name, words in CASES.items():
        if arguments.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            sources = Path(__file__).resolve().parents[1] / "src" / "atoll"
            text = "\n\n".join(path.read_text() for path in sorted(sources.rglob("*.py")))
            (Path(folder) / "text.txt").write_text(text * 2)
            overrides = [*COMMON, *words, f"data.files=[{folder}/text.txt]"]
            run = compose(overrides).run
            planned: Memory = memory_of(run, known_shape(run))
            used = measured_gib(overrides, Path(folder))
        error = planned.peak_gib / used - 1
        print(f"{name:20}{planned.peak_gib:10.3f}{used:10.3f}{error:8.1%}", flush=True)
        if arguments.terms:
            print({k: round(v / 2**30, 3) for k, v in vars(planned).items()})
        missed = missed or abs(error) > LIMIT
    return int(arguments.check and missed)


if __name__ == "__main__":
    sys.exit(main())
