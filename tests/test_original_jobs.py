"""Each known job has the hyper-parameters of its original, and the docs say so, line by line."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from composing import ROOT, here, tree

from atoll.config.compose import compose
from atoll.settings import Run

__all__ = ["here", "tree"]
PAGE = Path(__file__).parents[1] / "docs" / "workloads.md"


class Row(NamedTuple):
    """A setting, its value in the original, and why ours is another, if it is."""

    setting: str
    original: Any
    why: str = ""


ADAMW = (
    Row("optimizer.name", "adamw"),
    Row("optimizer.betas", [0.9, 0.999]),
    Row("optimizer.epsilon", 1e-8),
)
LINEAR = (
    Row("optimizer.clip_norm", 1.0),
    Row("optimizer.warmup_steps", 0),
    Row("optimizer.decay", "linear"),
    Row("optimizer.final_fraction", 0.0),
)
LLAMA = (
    Row("model.source", "meta-llama/Llama-2-7b-hf"),
    Row("data.max_documents", 10_000_000),
    Row("data.validation.max_documents", 12_000),
    Row("data.sequence_tokens", 2048),
    Row("data.batching", "padding", "padding wastes 29 % of the slots"),
    Row("training.epochs", 1),
    Row("training.device_batch_samples", 4),
    Row("microbatches", 1),
    Row("training.activation_checkpointing", "full"),
    Row("precision.compute", "bf16"),
    *ADAMW,
    Row("optimizer.learning_rate", 1e-4),
    Row("optimizer.weight_decay", 0.0),
    Row("optimizer.clip_norm", None),
    Row("optimizer.warmup_steps", 0),
    Row("optimizer.decay", "constant"),
    Row("export.dtype", "float16", "16 bits too, with the range that training had"),
)
# experiment -> the rest of the line that composes it, and its rows
JOBS: dict[str, tuple[list[str], tuple[Row, ...]]] = {
    "llama2_7b_it": (
        ["facility=leonardo", "nodes=128"],
        (
            Row("data.hub", "gsarti/clean_mc4_it"),
            Row("data.template", "scrivi un seguente documento: {text}"),
            Row("sharding.name", "hybrid_shard_zero2"),
            Row("training.global_batch_samples", 2048),
            *LLAMA,
        ),
    ),
    "llama2_7b_cs": (
        ["facility=karolina", "nodes=1"],
        (
            Row("data.hub", "mc4", "what `mc4` points to now"),
            Row("data.template", "Napište dokument: {text}"),
            Row("sharding.name", "hybrid_shard"),
            Row("training.global_batch_samples", 32),
            *LLAMA,
        ),
    ),
    "opt_125m_yelp": (
        ["facility=meluxina", "nodes=2"],
        (
            Row("model.source", "facebook/opt-125m"),
            Row("data.hub", "yelp_review_full", "its name on the hub now"),
            Row("data.hub_shuffle_seed", 42),
            Row("data.max_documents", 1024),
            Row("data.validation.max_documents", 1024),
            Row("data.sequence_tokens", 512),
            Row("data.batching", "padding"),
            Row("seed", 42),
            Row("deterministic", True),
            Row("sharding.deepspeed.zero_optimization.stage", 3),
            Row("sharding.deepspeed.zero_optimization.offload_optimizer.device", "cpu"),
            Row("sharding.deepspeed.zero_optimization.offload_optimizer.pin_memory", True),
            Row("sharding.deepspeed.zero_optimization.offload_param.device", "cpu"),
            Row("sharding.deepspeed.zero_optimization.offload_param.pin_memory", True),
            Row("training.epochs", 3),
            Row("training.global_batch_samples", 16),
            Row("training.microbatch_samples", 2, "the same dropout on any number of devices"),
            Row("precision.compute", "fp32"),
            *ADAMW,
            Row("optimizer.learning_rate", 1e-4),
            Row("optimizer.weight_decay", 0.01),
            *LINEAR,
            Row("evaluation.every_epochs", 1),
            Row("generation.prompt", "I really love computers because"),
        ),
    ),
    "gpt_shakespeare_char": (
        ["facility=polaris", "nodes=10", "data.files=input.txt"],
        (
            Row("model.config.n_layer", 12),
            Row("model.config.n_head", 12),
            Row("model.config.n_embd", 768),
            Row("model.config.vocab_size", 65),
            Row("model.config.resid_pdrop", 0.0),
            Row("data.sequence_tokens", 1024),
            Row("data.validation.tail", 0.1),
            Row("sharding.name", "ddp"),
            Row("training.steps", 1000),
            Row("training.device_batch_samples", 64),
            Row("training.microbatch_samples", 64, "the same gradient in less memory"),
            Row("training.log_every_steps", 10),
            Row("training.compile", False),
            Row("precision.compute", "bf16"),
            Row("optimizer.name", "adamw"),
            Row("optimizer.learning_rate", 6e-4),
            Row("optimizer.betas", [0.9, 0.95]),
            Row("optimizer.epsilon", 1e-8),
            Row("optimizer.weight_decay", 0.1),
            Row("optimizer.clip_norm", 1.0),
            Row("optimizer.warmup_steps", 100),
            Row("optimizer.decay", "cosine", "theirs is over 600,000 steps, of which 1,000 are"),
            Row("evaluation.every_steps", 100),
        ),
    ),
    "bert_rte": (
        ["facility=laptop", "ranks_per_node=4"],
        (
            Row("model.source", "bert-base-cased", "its name on the hub now"),
            Row("data.hub_config", "rte"),
            Row("data.sequence_tokens", 128),
            Row("data.classes.metrics", ["accuracy"]),
            Row("seed", 42),
            Row("training.epochs", 3),
            Row("training.global_batch_samples", 64),
            Row("training.log_every_steps", 1),
            Row("precision.compute", "fp32"),
            *ADAMW,
            Row("optimizer.learning_rate", 2e-5),
            Row("optimizer.weight_decay", 0.0),
            *LINEAR,
            Row("evaluation.every_epochs", 1),
        ),
    ),
}


def value(run: Run, setting: str) -> Any:
    """What the run has under a dotted name, plain."""
    found: Any = run
    for part in setting.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    return list(found) if isinstance(found, tuple) else found


@pytest.mark.parametrize("name", JOBS)
def test_hyper_parameters_are_those_of_the_original(name: str, tree: Path) -> None:
    words, rows = JOBS[name]
    run = compose([f"experiment={name}", *words], tree)
    for row in rows:
        ours = value(run.run, row.setting)
        assert (ours == row.original) == (not row.why), f"{row.setting}={ours}, not {row.original}"


@pytest.mark.login_node
@pytest.mark.parametrize("name", JOBS)
def test_the_docs_list_them_beside_ours(name: str, tree: Path) -> None:
    words, rows = JOBS[name]
    run = compose([f"experiment={name}", *words], tree).run
    lines = [f"<!-- original: {name} {' '.join(words)} -->", "| setting | original | here |"]
    lines.append("|---|---|---|")
    for row in rows:
        ours = "the same" if not row.why else f"`{value(run, row.setting)}`: {row.why}"
        lines.append(f"| `{row.setting}` | `{row.original}` | {ours} |")
    text = "\n".join(lines)
    assert text in PAGE.read_text(), f"docs/workloads.md should have\n{text}"


def test_every_known_job_is_compared() -> None:
    jobs = {file.stem for file in (ROOT / "hydra_conf" / "experiment").glob("*.yaml")}
    of_our_own = {"chat_sft", "demo", "llama_qlora", "rehearsal"}
    assert {name for name in jobs if not name.endswith("_smoke")} - of_our_own == set(JOBS)
