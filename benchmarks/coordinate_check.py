"""How much the first steps change a model of several widths, with muP and without.

    python benchmarks/coordinate_check.py [--widths 64 128 256 512] [--steps 4] [--seeds 3]
        [--learning-rate 1e-3] [--optimizers adamw muon] [--check]

The coordinate check of Tensor Programs V (Yang et al. 2022, its figure 5): a Llama of two blocks
learns one batch; measured is the mean size of what changed in its last hidden states and in its
logits. Where the learning rate holds at any width, so does the change. Every width reads the same
tokens; a row is the change at the widest over that at the narrowest.
"""

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import results

from atoll.report import html
from atoll.report.drawing import Curves, Series

FIGURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "coordinate_check.svg"
HEAD, VOCABULARY, SAMPLES, TOKENS = 16, 256, 4, 64
BLOCKS = 2
# of the change's growth, what muP may leave: at the narrow end it still falls with the width
TARGET = 0.5
WITHOUT = "without muP"
Changes = dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon"])
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    arguments = parser.parse_args()
    rows = [row for name in arguments.optimizers for row in rows_of(name, arguments)]
    met = results.record("coordinate_check", rows)
    draw()
    return int(not met and arguments.check)


def rows_of(optimizer: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each of what is measured."""
    widths, seeds = arguments.widths, range(arguments.seeds)
    step = {"steps": arguments.steps, "rate": arguments.learning_rate}
    with_mup, without = (
        {
            width: [changes(width, optimizer, seed, base_width=base, **step) for seed in seeds]
            for width in widths
        }
        for base in (widths[0], None)
    )
    rows = []
    for what in ("logits", "hidden states"):
        ours, peers = ([[c[what] for c in by[w]] for w in widths] for by in (with_mup, without))
        growth = [[b / a for a, b in zip(each[0], each[-1], strict=True)] for each in (ours, peers)]
        case = f"{optimizer}, change of {what}, width {widths[0]} to {widths[-1]}"
        medians = {
            key: [statistics.median(turns) for turns in each]
            for key, each in (("changes", ours), ("peer_changes", peers))
        }
        rows.append(
            results.row(
                case,
                "times",
                growth[0],
                WITHOUT,
                growth[1],
                "lower",
                TARGET,
                widths=widths,
                optimizer=optimizer,
                what=what,
                **medians,
                **step,
            )
        )
    return rows


def changes(
    width: int, optimizer: str, seed: int, steps: int, rate: float, base_width: int | None
) -> Changes:
    """The mean size of what the steps change, of logits and of hidden states before the last norm.

    base_width: of muP; None: without it.
    """
    import torch

    from atoll.train.optimizer import take_step

    model, chosen = made(width, optimizer, seed, rate, base_width)
    draw_tokens = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=draw_tokens)
    before = sizes(model.hf, tokens)
    for _ in range(steps):
        logits = model.hf(tokens[:, :-1]).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        take_step(chosen, rate, None)
    after = sizes(model.hf, tokens)
    return {what: float((after[what] - before[what]).abs().mean()) for what in before}


def made(width: int, optimizer: str, seed: int, rate: float, base_width: int | None) -> Any:
    """A Llama with heads of one width, and its optimizer, as a run makes them."""
    import torch

    from atoll.config.compose import compose
    from atoll.models.build import build_config, build_model, weights_for
    from atoll.models.mup import widths_of
    from atoll.models.weights import fill, fill_buffers, materialize
    from atoll.train.optimizer import make_optimizer

    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": width // HEAD,
        "num_key_value_heads": width // HEAD,
        "num_hidden_layers": BLOCKS,
        "tie_word_embeddings": "false",
    }
    words = [f"model.config.{name}={value}" for name, value in values.items()]
    words += [] if base_width is None else [f"model.mup.base_width={base_width}"]
    words += [f"optimizer={optimizer}", f"optimizer.learning_rate={rate}", f"seed={seed}"]
    run = compose(["facility=laptop", "model=llama_tiny", *words]).run
    config = build_config(run.model, VOCABULARY, TOKENS, {})
    model = build_model(config, run.training)
    materialize(model, torch.device("cpu"))
    with weights_for(run.model, config, run.seed) as read:
        fill(model.hf, read)
    fill_buffers(model.hf)
    widths = widths_of(run.model.mup, model.hf, model.parts)
    return model, make_optimizer(run.optimizer, model, widths)


def sizes(hf: Any, tokens: Any) -> dict[str, Any]:
    """Logits, and the hidden states that the last block gives."""
    import torch

    seen: list[Any] = []
    hook = hf.model.layers[-1].register_forward_hook(lambda _, inputs, out: seen.append(out))
    with torch.no_grad():
        logits = hf(tokens).logits
    hook.remove()
    hidden = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    return {"logits": logits, "hidden states": hidden}


def draw() -> None:
    """The newest rows as docs/images/coordinate_check.svg, where there are any."""
    newest = {row["case"]: row for row in results.kept() if row["benchmark"] == "coordinate_check"}
    if newest:
        FIGURE.write_text(figure(list(newest.values())))


def figure(rows: Iterable[dict[str, Any]]) -> str:
    """SVG: the change of the hidden states over the width, with its legend."""
    curves = list(series([row for row in rows if row["what"] == "hidden states"]))
    drawn = Curves(
        "What the first steps change in the last hidden states",
        "hidden size",
        "mean change",
        curves,
        log_x=True,
        log_y=True,
    )
    return html.standalone(drawn)


def series(rows: Sequence[dict[str, Any]]) -> Iterable[Series]:
    """With muP and without it, of each optimizer."""
    for at, row in enumerate(rows):
        for shift, (key, name) in enumerate((("changes", "muP"), ("peer_changes", WITHOUT))):
            points = list(zip(row["widths"], row[key], strict=True))
            style = "dashed" if shift else "line"
            yield Series(f"{row['optimizer']}, {name}", 2 * at + shift, points, style)


if __name__ == "__main__":
    sys.exit(main())
