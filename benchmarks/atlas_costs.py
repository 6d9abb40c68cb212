"""What an encoding costs beside fp32 and a server's step beside `replace`, of the atlas' points."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from atoll.federation.codec import CODECS
from atoll.federation.step import STEPS

PLAIN_STEP, PLAIN_CODEC = "replace", "fp32"


def costs(points: Sequence[Any]) -> list[dict[str, str]]:
    """A line for each encoding and each step, over all combinations where the plain one is too."""
    points_of_loss = {_key(point): 100 * point.gap for point in points}

    def beside(update: str | None, codec: str | None) -> list[float]:
        return [
            loss - points_of_loss[plain]
            for (own_update, own_codec, *rest), loss in points_of_loss.items()
            if (update or PLAIN_STEP) == own_update and codec in (None, own_codec)
            for plain in [(PLAIN_STEP, own_codec if update else PLAIN_CODEC, *rest)]
            if plain in points_of_loss
        ]

    codecs = [(codec, PLAIN_CODEC, beside(None, codec)) for codec in CODECS if codec != PLAIN_CODEC]
    steps = [(step, PLAIN_STEP, beside(step, None)) for step in STEPS if step != PLAIN_STEP]
    return list(_lines([*codecs, *steps]))


def widest_gap(rows: Sequence[dict[str, Any]], device: str) -> float:
    """How far the loss of one campaign is from itself, made on a GPU and on processors, a share."""
    on_gpu = {str(row["cell"]): row["test"] for row in rows if device in row}
    both = [(row["test"], on_gpu.get(str(row["cell"]))) for row in rows if device not in row]
    return max((abs(gpu / own - 1) for own, gpu in both if gpu is not None), default=0.0)


def _key(point: Any) -> tuple[Any, ...]:
    return point.update, point.codec, point.facilities, point.split, point.inner_steps


def _lines(rows: Sequence[tuple[str, str, list[float]]]) -> Iterator[dict[str, str]]:
    for what, plain, more in rows:
        if more:
            yield {
                "": what,
                "beside": plain,
                "least": f"{min(more):+.1f}",
                "median": f"{statistics.median(more):+.1f}",
                "most": f"{max(more):+.1f}",
                "combinations": str(len(more)),
            }
