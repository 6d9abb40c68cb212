"""README.md of an export: a model card, filled from what is known; what is not is named.

The fields are those of Hugging Face's card and of the technical part of the EU's template for
general-purpose models (model, data, training, computing, energy).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from atoll.errors import printable
from atoll.proof.accounting import ASKED, steps_counted
from atoll.proof.statement import NAME, instant
from atoll.settings import Run

Record = Mapping[str, Any]
Rows = Iterable[tuple[str, Any]]
UNKNOWN = "not known"
# what no program knows of a model
FOR_PEOPLE = (
    "License, and who answers for the model",
    "Version, release date, and where it is distributed",
    "Intended use, and uses that are out of place",
    "Hardware and software that it needs",
    "Rights to the data, personal data in it, and what was filtered",
    "Biases and risks, and tests for them",
)
LONGEST_CELL = 4000  # characters
# what has a meaning in a cell, and how it is shown; first what the others are shown with
MARKS = {"&": "&amp;", "\\": "\\\\", "<": "&lt;", "|": "\\|", "`": "'"}
MARKS |= {mark: f"\\{mark}" for mark in "[]*"}
# of a token (Chowdhery et al. 2022, appendix B)
COUNTED = (
    "6 N + 12 L d C for each token; beside A parameters of adapters 4 N + 6 A + 12 L d C. N: "
    "parameters without embeddings, L: layers, d: hidden size, C: tokens that one sees on average"
)
METRICS = ("loss", "perplexity", "accuracy", "f1", "auc")


def run_card(
    run: Run,
    config: Record,
    records: Sequence[Record],
    result: Record,
    made_of: Mapping[str, str],
    is_average: bool = False,
) -> str:
    """The card of a run's export.

    config: of config.json. records: of metrics.jsonl. result: of result.json.
    is_average: of the weights' average over steps, which has scores of its own.
    """
    last: dict[str, Record] = {record["event"]: record for record in records}
    start, train = last.get("start", {}), last.get("train", {})
    parts = {
        "Model": _model(run, config, start, is_average),
        "Training data": _data(run, start),
        "Training": _training(run, start, train, result),
        "Evaluation on held-out text": _evaluation(result.get("ema", {}) if is_average else result),
        "Hardware and energy": _hardware(run, records),
        "Made with": _made_with(made_of),
    }
    return card(run.name, parts, _front(run))


def card(name: str, parts: Mapping[str, Rows], front: Record) -> str:
    """Markdown: a table for each part that has rows, then the gaps."""
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", ""]
    lines += [f"# {_cell(name)}", ""]
    gaps = list(FOR_PEOPLE)
    for title, rows in parts.items():
        lines += [f"## {title}", "", "| | |", "|---|---|"]
        for label, value in rows:
            if value in (None, ""):
                gaps.append(f"{title}: {label}")
            lines.append(f"| {label} | {UNKNOWN if value in (None, '') else _cell(value)} |")
        lines.append("")
    lines += ["## Not known", "", "Nothing here says:", "", *(f"- {gap}" for gap in gaps), ""]
    lines += [f"`atoll verify` compares this folder with {NAME}, and with what made it.", ""]
    return "\n".join(lines)


def _front(run: Run) -> dict[str, Any]:
    front: dict[str, Any] = {"library_name": "transformers", "tags": ["atoll"]}
    if _is_adapter_alone(run):
        front["library_name"] = "peft"
    if base := hub_name(run.model.source):
        front["base_model"] = base
    if hubs := list(filter(None, (hub_name(data.hub) for data in run.data.each))):
        front["datasets"] = list(dict.fromkeys(hubs))
    return front


def hub_name(source: str | None) -> str | None:
    """A name of the hub; a path says nothing to others."""
    if not source or source.count("/") > 1 or source[0] in "/.~" or Path(source).exists():
        return None
    return source


def _is_adapter_alone(run: Run) -> bool:
    return run.model.lora is not None and not run.export.merged


def _model(run: Run, config: Record, start: Record, is_average: bool) -> Rows:
    source = run.model.source
    yield "Architecture", config.get("model_type")
    yield "Positions", _count(config.get("max_position_embeddings"))
    yield "Parameters", _count(start.get("parameters"))
    if not _is_adapter_alone(run):  # whose numbers are as they were trained
        yield "Numbers", run.export.dtype
    if is_average:
        yield "Weights", f"their average over steps (decay {run.optimizer.ema_decay})"
    yield (
        "Begun from",
        "random weights" if source is None else hub_name(source) or "a local folder",
    )
    if source is not None:
        yield "Revision of that", run.model.revision
    if run.model.lora is not None:
        how = "alone, for the model above" if _is_adapter_alone(run) else "merged into the weights"
        yield f"LoRA, {how}", f"rank {run.model.lora.rank}"
    yield "Input and output", "text; text or labels" if run.data.classes else "text; text"


def _data(run: Run, start: Record) -> Rows:
    yield "Name", run.data.name
    yield "Samples", _count(start.get("training_samples"))
    for source, data in zip_longest(run.data.sources, run.data.each):
        of = f"{source.name}: " if source else ""
        if source:
            weights = ", ".join(f"{w:g} from step {step}" for step, w in source.weights.items())
            yield f"{of}Weight", weights if len(source.weights) > 1 else f"{source.weights[0]:g}"
        origin = {"python_stdlib": "Python's own library"}.get(data.source, "files")
        if data.hub:
            origin = hub_name(data.hub) or f"the folder {Path(data.hub).name}"
        yield f"{of}Source", origin
        if data.hub:
            yield f"{of}Configuration", data.hub_config or "the default"
            yield f"{of}Revision", data.hub_revision
        yield f"{of}Format", data.format
        yield f"{of}Most documents", data.max_documents or "all"
    yield "Tokens of a sample", run.data.sequence_tokens


def _training(run: Run, start: Record, train: Record, result: Record) -> Rows:
    tokens, per_token = train.get("tokens"), start.get("flops_per_token")
    yield "Task", run.task.name
    yield "Steps", _count(result.get("steps"))
    yield "Samples of a step", run.training.global_batch_samples
    yield "Tokens", _count(tokens)
    yield "Operations, FLOPs", f"{tokens * per_token:.3g}" if tokens and per_token else None
    yield "How they are counted", COUNTED if per_token else None
    yield "Optimizer", run.optimizer.name
    yield "Highest learning rate", run.optimizer.learning_rate
    yield "Computed in", run.precision.compute
    yield "Seed", run.seed


def _evaluation(result: Record) -> Rows:
    known = [(name, f"{result[name]:.4g}") for name in METRICS if name in result]
    return known or [("Loss", None)]


def _hardware(run: Run, records: Sequence[Record]) -> Rows:
    node, times = run.facility.node, [r["time"] for r in records if "time" in r]
    joules, sources = 0.0, set[str]()
    for record in records:
        for part in ("device", "package"):
            if record["event"] == "energy" and record.get(f"{part}_joules") is not None:
                joules += record[f"{part}_joules"]
                sources.add(str(record.get(f"{part}_source")))
    yield "Facility", run.facility.name
    yield "Nodes, devices of each", f"{run.nodes}, {run.ranks_per_node} ({node.device})"
    yield "Began", instant(min(times)) if times else None
    yield "Hours, with pauses", f"{(max(times) - min(times)) / 3600:.3g}" if times else None
    steps, last = steps_counted(records), max((r.get("step") or 0 for r in records), default=0)
    own = last - run.checkpoint.initial_step
    if sources and steps < own:
        sources.add(f"of {steps:,} of {own:,} steps")
    energy = f"{joules / 3.6e6:.3g} ({'; '.join(sorted(sources))})" if sources else None
    yield "Energy, kWh", energy
    asked = f"asked for once they have ended: {NAME} says whether it was kept"
    kept = asked if run.facility.scheduler in ASKED else None
    yield "Accounting of its jobs", kept


def _made_with(made_of: Mapping[str, str]) -> Rows:
    """Without the path of a tokenizer, which stands before its digest."""
    for name, value in {"commit": "", **made_of}.items():
        yield name, value.split()[-1] if name == "tokenizer" else value


def _count(number: Any) -> str | None:
    return None if number is None else f"{number:,}"


def _cell(value: Any) -> str:
    """Plain text in one cell, not too long: nothing in it is Markdown or HTML."""
    text = printable(" ".join(str(value).split()), LONGEST_CELL)
    for mark, shown in MARKS.items():
        text = text.replace(mark, shown)
    return text
