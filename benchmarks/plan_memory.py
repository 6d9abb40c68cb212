"""The planner's memory against what runs used: peak of a process's resident memory on processors.

    python benchmarks/plan_memory.py [--only CASE] [--rounds 1] [--table] [--check]

Each case is a whole run of three steps in processes of its own, in turns; `planned` is `atoll
plan`'s closed form, `measured` the highest peak of its ranks behind the last step but one, before
anything is saved: it has all moments. glibc's heap keeps freed blocks of some megabytes; it is told
to return them, so that what is measured is what is needed. A run without that setting may hold a
third more. The rows go to results/plan_memory.jsonl, and with --table from there into
docs/planner.md.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from results import FOLDER, machine, versions

from atoll.config.compose import compose, known_shape
from atoll.plan.memory import Memory, memory_of

LIMITS = {"median": 0.03, "worst": 0.10}
PAGE = Path(__file__).resolve().parents[1] / "docs" / "planner.md"
BEGIN, END = "<!-- plan_memory: made by make bench-plan_memory -->", "<!-- plan_memory: end -->"
ONE = ["sharding=single", "ranks_per_node=1"]
WIDE = ["model.config.hidden_size=512", "model.config.num_hidden_layers=4"]
LLAMA = ["model=llama_tiny", *WIDE, "model.config.intermediate_size=1536"]
# weights count for more than activations
HEAVY = [
    *["model=llama_tiny", "model.config.hidden_size=1024", "model.config.num_hidden_layers=4"],
    *["model.config.intermediate_size=3072", "data.sequence_tokens=128"],
    "training.microbatch_samples=2",
]
GPT2 = ["model=gpt2_tiny", "model.config.n_embd=512", "model.config.n_layer=4"]
OPT = ["model=opt_tiny", *WIDE, "model.config.ffn_dim=2048", "model.config.word_embed_proj_dim=512"]
LONG = ["data.sequence_tokens=512", "training.microbatch_samples=4"]
FULL = "training.activation_checkpointing=full"
LORA = "model.lora.rank=16"
MIXTURE = [
    *[*WIDE, "model=llama_tiny", "model.config.model_type=mixtral"],
    *["model.config.intermediate_size=768", "+model.config.num_local_experts=8"],
    *["+model.config.num_experts_per_tok=2", "data.sequence_tokens=256"],
    "training.microbatch_samples=2",
]
PAIRS = [
    *["task=preference", "data=preference_files", "tokenizer.chat_template=chatml"],
    "tokenizer.add_tokens=['<|im_start|>','<|im_end|>']",
]
CASES: dict[str, list[str]] = {
    "one rank": [*LLAMA, *LONG, *ONE],
    "one rank, weights": [*HEAVY, *ONE],
    "recompute": [*LLAMA, *LONG, *ONE, FULL],
    "accumulation": [*HEAVY, *ONE, "training.microbatch_samples=1"],
    "opt": [*OPT, *LONG, *ONE],
    "gpt2": [*GPT2, *LONG, *ONE],
    "head of its own": [*HEAVY, *ONE, "model.config.tie_word_embeddings=false"],
    "vocabulary of 128k": [*LLAMA, *LONG, *ONE, FULL, "model.config.vocab_size=131072"],
    "vocabulary of 256k": [
        *[*LLAMA, *ONE, "model.config.hidden_size=256", "model.config.vocab_size=262144"],
        *["data.sequence_tokens=256", "training.microbatch_samples=1"],
        "training.loss_chunk_tokens=64",
    ],
    "head_dim of its own": [*LLAMA, *LONG, *ONE, "+model.config.head_dim=128"],
    "8-bit AdamW": [*HEAVY, *ONE, "optimizer=adamw_8bit"],
    "muon": [*HEAVY, *ONE, "optimizer=muon"],
    "full_shard, muon": [*HEAVY, "sharding=full_shard", "optimizer=muon"],
    "average of the weights": [*HEAVY, *ONE, "optimizer.ema_decay=0.99"],
    "proximal": [*HEAVY, *ONE, "optimizer.proximal=0.01"],
    "lora": [*LLAMA, *LONG, *ONE, LORA],
    "lora, recompute": [*LLAMA, *LONG, *ONE, LORA, FULL],
    "lora, two targets": [*LLAMA, *LONG, *ONE, LORA, "model.lora.targets=[q_proj,v_proj]"],
    "lora, dropout": [*LLAMA, *LONG, *ONE, LORA, "model.lora.dropout=0.1"],
    "lora, weights": [*HEAVY, *ONE, LORA],
    "lora, gpt2": [*GPT2, *LONG, *ONE, LORA],
    "nf4": [*HEAVY, *ONE, LORA, "model.quantisation=nf4"],
    "nf4, tokens": [*LLAMA, *LONG, *ONE, LORA, "model.quantisation=nf4"],
    "int8": [*HEAVY, *ONE, LORA, "model.quantisation=int8"],
    "mixture": [*MIXTURE, *ONE],
    "dpo": [*HEAVY, *ONE, *PAIRS, "data.sequence_tokens=512"],
    "ddp": [*LLAMA, *LONG, "sharding=ddp"],
    "full_shard": [*HEAVY, "sharding=full_shard"],
    "shard_grad_op": [*HEAVY, "sharding=shard_grad_op"],
    "full_shard, each microbatch": [
        *[*HEAVY, "sharding=full_shard", "sharding.sync_every_microbatch=true"],
        "training.microbatch_samples=1",
    ],
    "full_shard, accumulation": [*HEAVY, "sharding=full_shard", "training.microbatch_samples=1"],
    "full_shard, lora": [*HEAVY, "sharding=full_shard", LORA],
    "full_shard, nf4": [*HEAVY, "sharding=full_shard", LORA, "model.quantisation=nf4"],
    "ddp, lora": [*HEAVY, "sharding=ddp", LORA],
    "ddp, nf4": [*HEAVY, "sharding=ddp", LORA, "model.quantisation=nf4"],
    "mixture, experts divided": [*MIXTURE, "sharding=full_shard", "sharding.expert=2"],
    "tensor": [*LLAMA, *LONG, "sharding=full_shard", "sharding.tensor=2"],
    "context": [*LLAMA, *LONG, "sharding=full_shard", "sharding.context=2"],
    "pipeline": [*LLAMA, *LONG, "sharding=full_shard", "sharding.pipeline=2"],
}
COMMON = [
    *["facility=laptop", "precision=fp32", "training.steps=3", "override=[fit]"],
    *["training.log_every_steps=1"],
    *["evaluation.max_samples=1", "tokenizer.vocabulary_tokens=2048", "data.workers=1"],
]


def measured_gib(overrides: list[str], folder: Path) -> float:
    """The highest peak of the ranks behind the second step; the run is ended then."""
    command = [sys.executable, "-m", "atoll", "submit", *overrides]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    log = folder / "log.txt"
    with open(log, "w") as file:
        started = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return _second_step(started, folder)
    except RuntimeError:
        raise SystemExit(f"{' '.join(overrides)}\n{log.read_text()[-3000:]}") from None
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def _second_step(started: "subprocess.Popen[bytes]", folder: Path) -> float:
    while True:
        ended = started.poll() is not None
        for file in folder.glob("runs/*/metrics.jsonl"):
            records = [
                json.loads(line)
                for line in file.read_text().splitlines(keepends=True)
                if line.endswith("\n")
            ]
            steps = [r for r in records if r["event"] == "train"]
            if len(steps) >= 2:
                return float(steps[1]["memory_gib"])
        if ended:
            raise RuntimeError("the run ended before its second step")
        time.sleep(0.1)


@contextmanager
def text_to_learn() -> Iterator[Path]:
    """A folder with this package's sources as text, and its tokens, prepared once for all cases."""
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(__file__).resolve().parents[1] / "src" / "atoll"
        text = "\n\n".join(path.read_text() for path in sorted(sources.rglob("*.py")))
        (Path(folder) / "text.txt").write_text(text)
        (Path(folder) / "pairs.jsonl").write_text("".join(pairs(text)))
        yield Path(folder)


def pairs(text: str) -> Iterator[str]:
    """Two answers to one prompt, a line; as long as a sample of 512 tokens takes, or nearly."""
    for begin in range(0, 400 * 1000, 1000):
        chosen, rejected = text[begin : begin + 500], text[begin + 500 : begin + 1000]
        yield json.dumps({"prompt": "Go on.", "chosen": chosen, "rejected": rejected}) + "\n"


def words_of(name: str) -> list[str]:
    """What the run of a case is composed from, but for its text."""
    words = CASES[name]
    # two microbatches a step wherever one sample is a microbatch
    batch = next(w for w in reversed(words) if w.startswith("training.microbatch_samples="))
    samples, ranks = int(batch.partition("=")[2]), 1 if "ranks_per_node=1" in words else 2
    axes = [w for w in words if w.startswith(("sharding.tensor", "sharding.context"))]
    passes = 2 if samples == 1 or "sharding.pipeline=2" in words else 1
    alone = bool(axes) or "sharding.pipeline=2" in words
    size = samples * (1 if alone else ranks) * passes
    text = [] if "task=preference" in words else ["data=text_files", "data.document=paragraph"]
    return [*COMMON, *text, *words, f"training.global_batch_samples={size}"]


def planned_of(name: str) -> Memory:
    run = compose([*words_of(name), "data.files=[text.txt]"]).run
    return memory_of(run, known_shape(run))


def row(name: str, folder: Path) -> dict[str, Any]:
    """One turn of a case."""
    planned, words = planned_of(name), words_of(name)
    file = "pairs.jsonl" if "task=preference" in words else "text.txt"
    overrides = [*words, f"data.files=[{folder}/{file}]", f"folders.prepared={folder}/prepared"]
    with tempfile.TemporaryDirectory() as cwd:
        used = measured_gib(overrides, Path(cwd))
    terms = {k: round(v / 2**30, 4) for k, v in vars(planned).items()}
    return {"case": name, "planned_gib": planned.peak_gib, "measured_gib": used, "terms": terms}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail beyond the limits")
    parser.add_argument("--only", default="", help="cases whose name holds this, or that|that")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each case")
    parser.add_argument("--terms", action="store_true", help="print every term too")
    parser.add_argument("--table", action="store_true", help="only write the page's table")
    arguments = parser.parse_args()
    if not arguments.table:
        measure(arguments.only, arguments.rounds, arguments.terms)
    errors = write_table()
    return int(arguments.check and not within(errors))


def measure(only: str, rounds: int, terms: bool) -> None:
    """All cases in turns, each kept as it is measured."""
    print(f"{'':30}{'planned':>10}{'measured':>10}{'error':>8}   GiB of one rank")
    about = {"benchmark": "plan_memory", "machine": machine(), "versions": versions()}
    with text_to_learn() as folder:
        for turn in range(rounds):
            for name in list(CASES)[:: 1 if turn % 2 == 0 else -1]:
                if not any(part in name for part in only.split("|")):
                    continue
                measured = row(name, folder)
                print(shown(measured), flush=True)
                if terms:
                    print(measured["terms"])
                date = {"date": time.strftime("%Y-%m-%d", time.gmtime())}
                with open(FOLDER / "plan_memory.jsonl", "a") as file:
                    file.write(json.dumps(about | date | measured) + "\n")


def shown(row: dict[str, Any]) -> str:
    error = row["planned_gib"] / row["measured_gib"] - 1
    return f"{row['case']:30}{row['planned_gib']:10.3f}{row['measured_gib']:10.3f}{error:8.1%}"


def newest() -> dict[str, dict[str, Any]]:
    """Case -> its newest row, its measure the median of all turns."""
    kept: dict[str, list[dict[str, Any]]] = {}
    for line in (FOLDER / "plan_memory.jsonl").read_text().splitlines():
        each = json.loads(line)
        kept.setdefault(each["case"], []).append(each)
    rows = {}
    for name in CASES:
        if name in kept:
            last = kept[name][-1]
            median = statistics.median(r["measured_gib"] for r in kept[name])
            # the formula as it is now: what a run took stays true
            rows[name] = last | {"measured_gib": median, "planned_gib": planned_of(name).peak_gib}
    return rows


def write_table() -> list[float]:
    """Put the newest rows into the page; their errors."""
    rows = list(newest().values())
    errors = [row["planned_gib"] / row["measured_gib"] - 1 for row in rows]
    sizes = sorted(abs(error) for error in errors)
    lines = ["| case | planned | measured | error |", "|---|---|---|---|"]
    for each, error in zip(rows, errors, strict=True):
        planned, used = each["planned_gib"], each["measured_gib"]
        lines.append(f"| {each['case']} | {planned:.3f} | {used:.3f} | {error:+.1%} |")
    about = (
        f"{len(rows)} cases, GiB of the fullest rank, {rows[-1]['date']}, "
        f"torch {rows[-1]['versions']['torch']}: median error {statistics.median(sizes):.1%}, "
        f"worst {sizes[-1]:.1%}."
    )
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text("\n".join([before + BEGIN, about, "", *lines, END + after]))
    return sizes


def within(errors: list[float]) -> bool:
    return statistics.median(errors) <= LIMITS["median"] and errors[-1] <= LIMITS["worst"]


if __name__ == "__main__":
    sys.exit(main())
