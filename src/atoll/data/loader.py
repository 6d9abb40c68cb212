"""The dataloader: a rank's batches, made ahead by one thread."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from atoll.data.batch import TENSORS, Batch
from atoll.data.mixture import mixture_of
from atoll.data.order import rank_share
from atoll.data.samples import Samples
from atoll.data.windows import Drawn, Windows
from atoll.data.workers import in_order
from atoll.errors import UserError
from atoll.settings import Run

SHARES_AHEAD = 3


@dataclass(frozen=True)
class Share:
    """One rank's part of a global batch, and what the whole batch counts.

    epochs: of several sources, how often each was read through behind the batch.
    opens_window: ranks may have had to wait for it.
    """

    microbatches: list[Batch]
    global_targets: int
    global_useful: int
    epochs: dict[str, float] = field(default_factory=dict)
    opens_window: bool = False


def order_of(samples: Samples, run: Run) -> Callable[[int], Drawn]:
    """The global batch behind so many samples of the endless order, of one text or a mixture."""
    mixed, size = mixture_of(samples, run), run.training.global_batch_samples
    names = [source.name for source in run.data.sources]  # none of one text, whose epochs need none

    def draw(position: int) -> Drawn:
        epochs = dict(zip(names, mixed.epochs(position + size), strict=False))
        return Drawn(samples, mixed.ids(position, size), epochs)

    return draw


def refuse_early_end(samples: Samples | Windows, run: Run, steps: int) -> None:
    """Raise `UserError` where a source would be read more often than it may be.

    Named with the step that its last pass ends before.
    """
    before = run.training.consumed_samples
    if isinstance(samples, Windows):
        return
    mixed, size = mixture_of(samples, run), run.training.global_batch_samples
    for number, source in enumerate(run.data.sources):
        most = source.max_epochs or math.inf
        epochs = mixed.epochs(before + size * steps)[number]
        if epochs > most:
            ends = bisect_right(
                range(steps), most, key=lambda step: mixed.epochs(before + size * step)[number]
            )
            shorter = f"training.steps={ends - 1}, a" if ends > 1 else "a"
            raise UserError(
                f"source {source.name} ends early: it has {mixed.source_samples[number]:,} "
                f"samples, and {steps} steps take it {epochs:.2f} times (max_epochs={most:g})",
                f"{shorter} smaller weight, or a higher max_epochs",
            )


@contextmanager
def batches_ahead(
    samples: Samples | Windows, run: Run, position: int, steps: int, rank: int
) -> Iterator[Iterator[Share]]:
    """Give the shares of one data rank for `steps` global batches, made ahead by a thread.

    `position` is how many samples of the endless order have been consumed, by all ranks. An
    error of the thread is raised where its share is asked for.
    """
    pin = torch.cuda.is_available()
    size, microbatch = run.training.global_batch_samples, run.training.microbatch_samples
    draw = samples.draw if isinstance(samples, Windows) else order_of(samples, run)

    def share(step: int) -> Share:
        held, ids, epochs, opens_window = draw(position + step * size)
        own = rank_share(ids, rank, run.axes.data, microbatch)
        batches = [held.batch(part) for part in own]
        return Share(
            [_pinned(batch) for batch in batches] if pin else batches,
            int(held.targets(ids).sum()),
            int(held.useful(ids).sum()),
            epochs,
            opens_window,
        )

    device = torch.cuda.current_device() if pin else None
    with ThreadPoolExecutor(1, "batches-ahead", _take_device, (device,)) as pool:
        try:
            yield in_order(pool, share, range(steps), SHARES_AHEAD)
        finally:
            pool.shutdown(cancel_futures=True)


def _take_device(index: int | None) -> None:
    """A thread begins with the first device, and would take memory there to pin its batches."""
    if index is not None:
        torch.cuda.set_device(index)


def _pinned(batch: Batch) -> Batch:
    """The batch in page-locked memory, which a device copies from while it computes."""
    tensors = {name: getattr(batch, name) for name in TENSORS}
    return replace(batch, **{n: x.pin_memory() for n, x in tensors.items() if x is not None})
