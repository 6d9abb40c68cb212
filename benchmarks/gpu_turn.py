"""What every peer of gpu_training.py trains on, and how its steps are timed.

Legend: B samples of a microbatch, T tokens of a sample.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.settings import Run


@dataclass(frozen=True)
class Turn:
    """What a side trains, and which of its steps count."""

    run: Run
    folder: Path
    warmup_steps: int
    timed_steps: int
    device: torch.device
    dtype: torch.dtype

    @property
    def compiled(self) -> bool:
        return self.run.training.compile

    @property
    def config(self) -> dict[str, Any]:
        return self.run.model.config

    @property
    def step_tokens(self) -> int:
        return self.run.training.microbatch_samples * self.run.data.sequence_tokens

    def autocast(self) -> Any:
        narrow = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype) if narrow else nullcontext()


class Clock:
    """Counts steps, and waits for the device only where the timed ones begin and end."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.steps = 0
        self.marks: list[float] = []

    def tick(self) -> bool:
        """A step has ended; whether it was the last."""
        self.steps += 1
        last = self.turn.warmup_steps + self.turn.timed_steps
        if self.steps in (self.turn.warmup_steps, last):
            if self.turn.device.type == "cuda":
                torch.cuda.synchronize()
            self.marks.append(time.perf_counter())
        return self.steps == last

    def rate(self) -> float:
        """Tokens per second of the timed steps."""
        return self.turn.timed_steps * self.turn.step_tokens / (self.marks[1] - self.marks[0])


def samples_of(turn: Turn) -> list[Tensor]:
    """The training samples that ours reads, each a row of tokens."""
    import numpy as np

    from atoll.data.samples import open_samples
    from atoll.run_dir import prepared

    samples = open_samples(turn.run.data, prepared(turn.run), "train")
    return [samples.batch(np.array([n])).tokens_BT[0] for n in range(len(samples))]


def looped(turn: Turn, step: Callable[[Tensor, Tensor], None]) -> float:
    """A loop that does nothing but step, over batches that lie ready in pinned memory."""
    clock = Clock(turn)
    batches = list(batches_of(turn))
    gc.disable()
    for tokens_BT, labels_BT in batches:
        step(tokens_BT, labels_BT)
        if clock.tick():
            break
    return clock.rate()


def batches_of(turn: Turn) -> Iterator[tuple[Tensor, Tensor]]:
    rows = torch.stack(samples_of(turn))
    for tokens_BT in rows.split(turn.run.training.microbatch_samples):
        labels_BT = torch.cat([tokens_BT[:, 1:], torch.full_like(tokens_BT[:, :1], -100)], dim=1)
        pinned = turn.device.type == "cuda"
        yield (tokens_BT.pin_memory(), labels_BT.pin_memory()) if pinned else (tokens_BT, labels_BT)


def moved(turn: Turn, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(turn.device, non_blocking=True) for tensor in tensors]
