"""`atoll models`: the architectures that can be trained, and which strategies each can take."""

import json
from collections.abc import Callable
from typing import Any

from transformers.utils import logging

from atoll.commands import CommandParser
from atoll.errors import UserError
from atoll.models.build import skeleton
from atoll.models.parts import PARTS, blocks_of, parts_of
from atoll.models.self_check import TRIED, self_check
from atoll.models.tiny_copy import tiny_copy
from atoll.sharding.expert import check_experts
from atoll.sharding.pipeline import check_between
from atoll.sharding.tensor import plan_of

ABOUT = """List families (`model_type` in config.json) and the strategies that each can take.

Asked of the code with a small copy of each. Every family goes with one process, replicas (ddp,
all_reduce, gather_scatter), shards (full_shard, hybrid_shard, DeepSpeed's) and context ranks. A
decoder that is not listed is tried when it is first loaded: name it here to try it now."""
Row = dict[str, Any]


def main(argv: list[str]) -> int:
    """Print one table (of Markdown), or one JSON list."""
    parser = CommandParser("models", ABOUT)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="of all: those listed")
    parser.add_argument("--json", action="store_true", help="as a JSON list, with reasons")
    arguments = parser.read(argv)
    logging.set_verbosity_error()  # which warns of small copies' odd sizes
    rows = [row_of(family) for family in arguments.families or sorted((*PARTS, *TRIED))]
    print(json.dumps(rows, indent=1) if arguments.json else table(rows))
    return 0


def row_of(family: str) -> Row:
    """What a family is and can take; refusals are sentences.

    Raises `UserError` for one that cannot be trained at all.
    """
    config = config_of(family)
    verdict = self_check(config)
    hf = skeleton(config)
    block = blocks_of(hf, parts_of(hf))[0]
    return {
        "family": family,
        "experts": getattr(config, "num_experts_per_tok", None) is not None,
        "tensor": _refusal(lambda: plan_of(block, config)),
        "expert": _refusal(lambda: check_experts(hf, blocks_of(hf, parts_of(hf)))),
        "pipeline": _refusal(lambda: check_between(config)),
        "classifier": None if classifies(family) else "transformers has no classifier of it",
        "tried": verdict or "by tests, against transformers",
    }


def config_of(family: str) -> Any:
    """A small configuration of a family, with its own defaults."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(family)
    except ValueError:
        raise UserError(
            f"transformers knows no models of type {family!r}",
            "give the model_type of a config.json; `atoll models` lists some",
        ) from None
    if family == "bert":
        config.is_decoder = True
    for name, value in config.to_dict().items():
        if name.endswith("_multiplier") and value == 1.0:
            setattr(config, name, 0.5)  # as published models have it
    return config if family in PARTS else tiny_copy(config)


def classifies(family: str) -> bool:
    """Whether transformers has the family with a head for labels."""
    from transformers.models.auto import modeling_auto

    return family in modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES


def table(rows: list[Row]) -> str:
    """In Markdown, as docs/models.md has it."""
    columns = ("tensor", "expert", "pipeline", "classifier")
    lines = [f"| family | kind | {' | '.join(columns)} |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = ["no" if row[column] else "yes" for column in columns]
        kind = "mixture" if row["experts"] else "dense"
        lines.append(f"| {row['family']} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _refusal(tried: Callable[[], object]) -> str | None:
    try:
        tried()
    except UserError as error:
        return error.found
    return None
