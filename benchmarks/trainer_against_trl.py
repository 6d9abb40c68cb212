"""Tokens per second of our trainer against TRL's SFT trainer on the same conversations, in turns.

    python benchmarks/trainer_against_trl.py [--rounds 3] [--steps 10] [--precision auto] [--check]

Both train the same Llama from random weights on two gloo ranks with DDP, on the standard library's
docstrings as answers, with the loss on the answers alone, 16 samples of 512 tokens a step, gradient
clipping and fused AdamW. TRL packs too (best fit, `packing_strategy="bfd"`); nothing is logged or
saved. The first three steps of a turn are not counted, and only tokens that are not padding count.
"""

import argparse
import ast
import json
import resource
import sys
import sysconfig
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import results
import trainer_against_hf
from trainer_against_hf import COMMANDS, SKIPPED_STEPS, clock, turn

PEERS = Path(__file__).resolve().parents[1] / ".build" / "peers"
TRL = "TRL's SFTTrainer"
TARGET = 1.2
MOST_CHARACTERS = 900  # of a docstring: its conversation fits a sample, on both sides whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--precision", default="auto", choices=["auto", "bf16", "fp32"])
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    arguments = parser.parse_args()
    COMMANDS[TRL] = "trainer_against_trl:sft_trainer"
    with tempfile.TemporaryDirectory() as folder:
        runs = {side: ready(Path(folder), side, arguments) for side in ("ours", TRL)}
        ways = {side: partial(turn, run, side) for side, run in runs.items()}
        turns: dict[str, list[dict[str, float]]] = results.in_turns(ways, arguments.rounds)  # type: ignore[arg-type,assignment]
    rows = trainer_against_hf.rows_of("conversations, its packing", TRL, turns, TARGET)
    return int(not results.record("trainer_against_trl", rows) and arguments.check)


def ready(folder: Path, side: str, arguments: argparse.Namespace) -> Path:
    """A run folder with its tokens prepared."""
    words = [
        "data=chat_files",
        f"data.files={conversations(folder)}",
        "tokenizer.chat_template=chatml",
        "tokenizer.add_tokens=['<|im_start|>','<|im_end|>']",
        "tokenizer.vocabulary_tokens=8190",
        "data.validation.fraction=0.02",
    ]
    return trainer_against_hf.prepared_run(folder, "conversations", side, arguments, words)


def conversations(folder: Path) -> Path:
    """The standard library's docstrings as answers to what asks for them."""
    path = folder / "conversations.jsonl"
    if path.exists():
        return path
    lines = []
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(source.read_bytes())):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                continue
            answer = ast.get_docstring(node)
            if answer and len(answer) < MOST_CHARACTERS:
                asked = {"role": "user", "content": f"What is {node.name} in {source.stem}?"}
                turns = [asked, {"role": "assistant", "content": answer}]
                lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines))
    return path


def sft_trainer(run_folder: Path, placement: Any) -> int:
    """A command: TRL's SFT trainer on the same file, with the same tokenizer and template."""
    sys.path.insert(0, str(PEERS))
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    from atoll.run_dir import prepared
    from atoll.settings import load_run
    from atoll.train.precision import compute_dtype

    run = load_run(run_folder / "run.yaml")
    dtype, _ = compute_dtype(run.precision, torch.device("cpu"))
    lines = Path(run.data.files[0]).read_text().splitlines()
    settings = SFTConfig(
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
        gradient_checkpointing=False,
        assistant_only_loss=True,
        packing=True,
        packing_strategy="bfd",
        max_length=run.data.sequence_tokens,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    steps_clock = clock()
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**run.model.config), attn_implementation="sdpa"
        ),
        args=settings,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(prepared(run) / "tokenizer"),
        callbacks=[steps_clock],
    )
    trainer.train()
    if placement.rank == 0:
        rows = trainer.train_dataset["input_ids"]
        tokens = sum(map(len, rows)) / len(rows) * run.training.global_batch_samples
        steps = len(steps_clock.ends) - SKIPPED_STEPS
        seconds = steps_clock.ends[-1] - steps_clock.ends[SKIPPED_STEPS - 1]
        memory_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        figures = {"rate": tokens * steps / seconds, "memory_gib": memory_gib}
        (run_folder / "measured.json").write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
