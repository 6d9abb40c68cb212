"""What watches a training loop: the hooks that it calls, and what it hands them.

An observer changes nothing of what is learned, and each can be switched off (`monitor.NAME=false`).
All ranks have the same ones (the progress bar apart), so that a hook may use collectives.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.data.pack import PackingPlan
from atoll.health.heartbeat import Heartbeat
from atoll.plan.shapes import Shape
from atoll.plan.traffic import Sent
from atoll.settings import Run
from atoll.sharding.process_group import World

Record = dict[str, Any]  # a line of metrics.jsonl: its event, its step, and figures
Write = Callable[[Record], None]  # to metrics.jsonl and the loggers; of other ranks: to nowhere


@dataclass(frozen=True)
class WatchedRun:
    """What observers know of a run before its first step."""

    run: Run
    run_folder: Path
    world: World
    shape: Shape  # of the model
    compute_dtype: torch.dtype
    packing: PackingPlan  # of the training documents
    total_steps: int
    resumed_step: int  # of the checkpoint it goes on from; 0: it begins
    heartbeat: Heartbeat  # of this rank
    communication_bytes: Sent  # expected, by kind, sent by one rank in a step
    wrapped: nn.Module  # the model as the loop calls it
    preflight: Record | None = None  # what was measured before


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, behind its update."""

    step: int
    loss_sum: Tensor  # of this rank's targets; on the device, which nobody has waited for
    targets: int  # of the global batch, as are the tokens
    tokens: int  # that are not padding
    total_tokens: int  # since the run began
    learning_rate: float
    gradient_norm: Tensor  # before clipping
    data_wait_seconds: float
    checkpoint_seconds: float  # for which training stood still since the step before
    skipped: Tensor | None = None  # 1.0 if its update was left out, else 0.0; on the device
    is_saved: bool = False  # a checkpoint follows: the run may go on from here
    epochs: Mapping[str, float] = field(default_factory=dict)  # of each of several sources, so far


class Observer:
    """Hooks of the training loop; each does nothing until an observer says otherwise."""

    def before_step(self, step: int) -> None:
        """Before the step's batch is taken."""

    def after_step(self, update: StepRecord) -> None:
        """Behind the update of the weights, before a checkpoint or an evaluation."""

    def on_checkpoint(self, step: int, save_seconds: float, blocked_seconds: float) -> None:
        """A checkpoint is whole; for so many of the seconds training stood still."""

    def on_evaluation(self, step: int, figures: dict[str, float], seconds: float) -> None:
        """The held-out part was evaluated, which took so long; figures: the first rank's alone."""

    def on_record(self, record: Record) -> None:
        """The loop tells of something rare, as a skipped batch; every rank has the same record."""

    def on_end(self) -> None:
        """The loop took its last step, or was stopped in time; not after an error."""


Observers = tuple[Observer, ...]
