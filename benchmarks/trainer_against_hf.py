"""Tokens per second of our trainer against the Hugging Face Trainer and litgpt, in turns.

    python benchmarks/trainer_against_hf.py [--rounds 3] [--steps 10] [--precision auto] [--check]

All train the same Llama from the same weights' shapes on two gloo ranks with DDP, the same
number of samples a step, gradient clipping and fused AdamW; every turn is a fresh pair of
processes. The first three steps of a turn are not counted.

`full`: the standard library's sources, chopped into full samples for all. The Trainer has its best
settings: SDPA, packed samples, no attention mask, no logging, no saving; litgpt (litgpt_side.py)
has its pretraining's loop.
`qwen3`, `gemma3`: the same on models of those shapes: norms of queries, and heads wider than
their part of the model; sliding windows of half a sample in five layers of six.
`documents`: the standard library's docstrings, one a document. The Trainer pads each batch to its
longest sample, as it does by default; we pack. Only tokens that are not padding count.
"""

import argparse
import ast
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import results
import yaml

SKIPPED_STEPS = 3
TRAINER, LITGPT = "Hugging Face Trainer", "litgpt"
# side -> the command of its turns
COMMANDS = {
    "ours": "trainer_against_hf:ours",
    TRAINER: "trainer_against_hf:hf_trainer",
    LITGPT: "litgpt_side:litgpt",
}
CASES = {
    ("full", TRAINER): "full samples, its best settings",
    ("full", LITGPT): "full samples, its pretraining",
    ("qwen3", TRAINER): "full samples, shaped as Qwen3",
    ("gemma3", TRAINER): "full samples, shaped as Gemma 3",
    ("documents", TRAINER): "documents, its padding",
}
# case -> who takes turns
SIDES = {case: ["ours", *(peer for of, peer in CASES if of == case)] for case, _ in CASES}
TARGETS = {(case, TRAINER): 1.0 for case in ("full", "qwen3", "gemma3")}
TARGETS |= {("documents", TRAINER): 1.5}
# case -> what its model has in place of the small Llama's
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "head_dim": 64},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 64,
        "sliding_window": 256,
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cases", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--precision", default="auto", choices=["auto", "bf16", "fp32"])
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in arguments.cases:
            sides = SIDES[case]
            runs = {side: ready(Path(folder), case, side, arguments) for side in sides}
            ways = {side: partial(turn, runs[side], side) for side in sides}
            rows += compared(case, results.in_turns(ways, arguments.rounds))
    return int(not results.record("trainer_against_hf", rows) and arguments.check)


def compared(case: str, turns: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Rows of one case and each peer: rates, with the MFU of ours beside them, and memory."""
    peers = [peer for peer in turns if peer != "ours"]
    return [
        row
        for peer in peers
        for row in rows_of(CASES[case, peer], peer, turns, TARGETS.get((case, peer)))
    ]


def rows_of(
    name: str, peer: str, turns: dict[str, list[dict[str, float]]], target: float | None
) -> list[dict[str, Any]]:
    """Rates and peaks of ours and of one peer."""
    ours, theirs = turns["ours"], turns[peer]
    rates = [[turn["rate"] for turn in side] for side in (ours, theirs)]
    peaks = [[turn["memory_gib"] for turn in side] for side in (ours, theirs)]
    mfu = ours[-1]["mfu"]
    return [
        results.row(name, "tokens/s", rates[0], peer, rates[1], "higher", target, mfu=mfu),
        results.row(f"{name}, a rank's peak", "GiB", peaks[0], peer, peaks[1], "lower"),
    ]


def ready(folder: Path, case: str, side: str, arguments: argparse.Namespace) -> Path:
    """A run folder with its tokens prepared."""
    data = ["data=python_stdlib", "data.packing=concat"]
    data += [f"model.config.{name}={value}" for name, value in SHAPES.get(case, {}).items()]
    if case == "documents":
        data = [
            "data=text_files",
            f"data.files={docstrings(folder)}",
            "data.validation.fraction=0.02",
        ]
        data += ["data.batching=padding"] if side == TRAINER else []
    return prepared_run(folder, case, side, arguments, data)


def prepared_run(
    folder: Path, case: str, side: str, arguments: argparse.Namespace, data: list[str]
) -> Path:
    """The run folder of one side of a case, on the data and the model that these words choose."""
    import torch

    from atoll import run_dir
    from atoll.config.compose import compose
    from atoll.data.tokenize import prepare
    from atoll.settings import dumped

    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = compose(
        [
            "facility=laptop",
            f"facility.node.device={device}",
            "launcher=static",
            "sharding=ddp",
            f"precision={arguments.precision}",
            f"name={case}-{COMMANDS[side].split(':')[1]}",
            f"folders.runs={folder}/runs",
            f"folders.prepared={folder}/prepared",
            f"training.steps={arguments.steps + SKIPPED_STEPS}",
            "training.global_batch_samples=16",
            "training.microbatch_samples=8",
            "training.log_every_steps=1",
            "checkpoint.every_steps=0",
            "evaluation.max_samples=2",
            "data.sequence_tokens=512",
            *data,
        ]
    ).run
    run_folder = run_dir.folder(run)
    run_dir.write_whole(run_dir.settings_file(run_folder), yaml.safe_dump(dumped(run)))
    prepare(run, lambda line: None)
    return run_folder


def docstrings(folder: Path) -> Path:
    """The docstrings of the standard library's modules, classes and functions, as JSON lines."""
    path = folder / "docstrings.jsonl"
    if path.exists():
        return path
    lines = []
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(source.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                lines += [json.dumps({"text": text}) for text in [ast.get_docstring(node)] if text]
    path.write_text("\n".join(lines))
    return path


def turn(run_folder: Path, side: str) -> dict[str, float]:
    """Useful tokens per second and a rank's peak memory of one whole training by one side."""
    for leftover in ("checkpoints", "export"):
        subprocess.run(["rm", "-rf", str(run_folder / leftover)], check=True)
    here = Path(__file__).resolve()
    path = os.pathsep.join([str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "atoll", "launch", "--local-ranks", "2"]
    command += [str(run_folder), COMMANDS[side]]
    finished = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)}\n{finished.stdout}\n{finished.stderr}")
    measured_figures: dict[str, float] = json.loads((run_folder / "measured.json").read_text())
    return measured_figures


def ours(run_folder: Path, placement: Any) -> int:
    """A command: our trainer as it is; the rate comes from its metrics."""
    from atoll import run_dir
    from atoll.train.train import main as train

    code = train(run_folder, placement)
    if placement.rank == 0:
        lines = run_dir.metrics_file(run_folder).read_text().splitlines()
        steps = [r for r in map(json.loads, lines) if r["event"] == "train"]
        seconds = sum(r["step_seconds"] for r in steps[SKIPPED_STEPS:])
        tokens = steps[-1]["tokens"] - steps[SKIPPED_STEPS - 1]["tokens"]
        last = steps[-2]  # the last one saves and exports besides
        figures = {key: last[key] for key in ("mfu", "memory_gib")} | {"rate": tokens / seconds}
        (run_folder / "measured.json").write_text(json.dumps(figures))
    return code


def hf_trainer(run_folder: Path, placement: Any) -> int:
    """A command: the Hugging Face Trainer on the same samples."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    from atoll.data.samples import open_samples
    from atoll.run_dir import prepared
    from atoll.settings import load_run
    from atoll.train.precision import compute_dtype

    run = load_run(run_folder / "run.yaml")
    dtype, _ = compute_dtype(run.precision, torch.device("cpu"))
    samples = open_samples(run.data, prepared(run), "train")
    wanted = run.training.steps * run.training.global_batch_samples  # type: ignore[operator]
    rows, useful = peer_rows(run, samples, wanted)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**run.model.config), attn_implementation="sdpa"
    )
    settings = TrainingArguments(
        output_dir=str(run_folder / "peer"),
        max_steps=run.training.steps,
        per_device_train_batch_size=run.training.microbatch_samples,
        learning_rate=run.optimizer.learning_rate,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=dtype == torch.bfloat16,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        average_tokens_across_devices=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    steps_clock = clock()
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=rows,
        data_collator=None if run.data.batching == "packing" else padded,
        callbacks=[steps_clock],
    )
    trainer.train()
    if placement.rank == 0:
        per_step = useful / wanted * run.training.global_batch_samples
        steps = len(steps_clock.ends) - SKIPPED_STEPS
        seconds = steps_clock.ends[-1] - steps_clock.ends[SKIPPED_STEPS - 1]
        memory_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        figures = {"rate": per_step * steps / seconds, "memory_gib": memory_gib}
        (run_folder / "measured.json").write_text(json.dumps(figures))
    return 0


def peer_rows(run: Any, samples: Any, wanted: int) -> tuple[list[dict[str, Any]], int]:
    """Samples as the peer wants them, and how many of their tokens are not padding."""
    import numpy as np

    from atoll.data.order import sample_ids

    ids = sample_ids(run.seed, len(samples), 0, wanted)
    rows = []
    for sample in ids:
        batch = samples.batch(np.array([sample]))
        tokens = batch.tokens_BT[0, : batch.useful_tokens]
        rows.append({"input_ids": tokens, "labels": tokens})
    return rows, sum(len(row["input_ids"]) for row in rows)


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """As DataCollatorForLanguageModeling does it: to the longest of the batch, with a mask."""
    import torch

    tokens = torch.nn.utils.rnn.pad_sequence([r["input_ids"] for r in rows], batch_first=True)
    lengths = torch.tensor([len(r["input_ids"]) for r in rows])
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }


def clock() -> Any:
    """A callback of the peer that notes when each step ended."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    return Clock()


if __name__ == "__main__":
    sys.exit(main())
