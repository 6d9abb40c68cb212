"""The guard over learning: a loss or a gradient that is no number, or a spike of either.

All ranks decide together, on the device and before the weights change: the update of such a step
is left out, which skips its batch. What was decided is read when the device has got there, on a
GPU a step later, so that nobody waits for it.
"""

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from atoll.health.faults import Blame, Fault, add_fault
from atoll.health.judge import job_of
from atoll.monitor.observers import Observers
from atoll.sharding.process_group import World, merged_of_all, run_on_all_ranks
from atoll.train.assemble import TrainState
from atoll.train.checkpoint import Progress
from atoll.train.optimizer import Decision

FIGURES = ("loss", "log_gradient_norm")
# of a spread that comes out as nothing: so much of the median counts as noise all the same
LEAST_SPREAD = 0.01
NORMAL = 1.4826  # standard deviations in a median absolute deviation of normal noise
Action = Literal["skip", "roll_back", "stop"]
ABOUT_ACTION: dict[Action, str] = {
    "skip": "its batch is skipped",
    "roll_back": "the run goes back to a checkpoint and jumps over the data since",
    "stop": "the run stops, its checkpoints are as they were",
}


@dataclass(frozen=True)
class Trouble:
    """A step whose update was left out, or whose state is no good."""

    step: int
    kind: Literal["non_finite", "spike"]
    what: str  # for a person
    samples: tuple[int, int]  # the data's positions before and behind its batch
    loss: float = math.nan  # mean of the global batch
    gradient_norm: float = math.nan
    rank: int | None = None  # whose loss is no number, where it is that of one rank alone
    skipped: int = 0  # of the last window_steps, with this one


@dataclass(frozen=True)
class Unread:
    """What the device decides of a step; `copied` is None where it is on the host at once."""

    step: int
    outcome: Tensor
    copied: Any


class Guard:
    """Judges each step of a loop by those before it."""

    def __init__(self, train_state: TrainState, start: Progress) -> None:
        self.train_state, self.start = train_state, start
        self.settings = train_state.run.guard
        # a column a step, the last is the newest; infinite: none yet, NaN: skipped
        self.history = self.before = restored(start, self.settings.window_steps)
        self.judged_step = 0
        self.unread: deque[Unread] = deque()
        self.skipped = torch.zeros(())

    def judge(self, step: int, loss_sum: Tensor, targets: int, norm: Tensor) -> Decision:
        """Begin to exchange what a step is judged by; the decision waits for that.

        Every rank calls both, with its part of the loss; asked again of a step, it judges anew.
        """
        world = self.train_state.world
        shares = own_shares(world, loss_sum, norm)
        exchange = dist.all_reduce(shares, async_op=True) if world.size > 1 else None

        def decision() -> Tensor:
            if exchange is not None:
                exchange.wait()
            return self._decide(step, targets, shares)

        return decision

    def _decide(self, step: int, targets: int, shares: Tensor) -> Tensor:
        """1.0 where the step's update is to be left out, else 0.0, on the device of `shares`."""
        if step == self.judged_step:
            self.history = self.before
            self.unread.pop()
        self.judged_step = step
        history = self.history.to(shares.device)
        figures = torch.stack([shares[0] / targets, shares[1].clamp_min(1e-30).log()])
        no_number = (shares[2] > 0) | ~shares[:2].isfinite().all()
        skipped = no_number
        if self.settings.spike_sigma is not None:
            skipped = no_number | is_spike(figures, history, self.settings.spike_sigma)
        column = torch.where(skipped, math.nan, figures)
        self.before, self.history = history, torch.cat([history[:, 1:], column[:, None]], dim=1)
        count = self.history[0].isnan().sum()
        flags = torch.stack([skipped.double(), no_number.double(), count.double()])
        self._read_later(step, torch.cat([flags, figures[:1], shares[1:]]))
        self.skipped = skipped.float()
        return self.skipped

    def _read_later(self, step: int, outcome: Tensor) -> None:
        if outcome.device.type == "cpu":
            self.unread.append(Unread(step, outcome, None))
            return
        on_host = torch.empty(outcome.shape, dtype=outcome.dtype, pin_memory=True)
        on_host.copy_(outcome, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self.unread.append(Unread(step, on_host, copied))

    def settle(self, observers: Observers, wait: bool) -> Trouble | None:
        """Note which batches were skipped; returns the one with which there were too many.

        wait: also for the last step, which the device may still be at.
        """
        while self.unread and (wait or self.unread[0].copied is None or len(self.unread) > 1):
            judged = self.unread.popleft()
            if judged.copied is not None:
                judged.copied.synchronize()
            skipped, *numbers = judged.outcome.tolist()
            if not skipped:
                continue
            trouble = self._trouble(judged.step, numbers)
            if trouble.skipped > self.settings.skip_batches:
                return trouble
            note(self.train_state, observers, trouble, "skip", "data", judged.step)
        return None

    def _trouble(self, step: int, numbers: list[float]) -> Trouble:
        no_number, count, loss, norm, _, bad_ranks, rank = numbers
        spike = f"a spike: loss {loss:.4g}, gradient norm {norm:.4g}"
        what = f"the loss is {loss}, the gradient's norm {norm}" if no_number else spike
        return Trouble(
            step=step,
            kind="non_finite" if no_number else "spike",
            what=what,
            samples=self.samples_of(step),
            loss=loss,
            gradient_norm=norm,
            rank=int(rank) if bad_ranks == 1 else None,
            skipped=int(count),
        )

    def samples_of(self, step: int) -> tuple[int, int]:
        """The data's positions before and behind a step's batch."""
        size = self.train_state.run.training.global_batch_samples
        return tuple(self.start.samples_behind(s, size) for s in (step - 1, step))  # type: ignore[return-value]

    def of_state(self, state: dict[str, Tensor], step: int) -> Trouble | None:
        """What is wrong with a state that would be saved: it holds what is no number."""
        own = next((name for name, tensor in state.items() if not is_finite(tensor)), None)
        world = self.train_state.world
        ranks = merged_of_all(world, int(own is not None), sum)
        if ranks == 0:
            return None
        where = f": {own}" if own else ""
        what = f"the state of {ranks} of {world.size} ranks holds what is no number{where}"
        return Trouble(step, "non_finite", what, self.samples_of(step))

    def saved(self) -> dict[str, list[float | None]]:
        """The history as a checkpoint keeps it: the oldest step first."""
        rows = zip(FIGURES, self.history.tolist(), strict=True)
        return {
            name: [None if math.isnan(value) else value for value in row if value != math.inf]
            for name, row in rows
        }


def restored(start: Progress, window: int) -> Tensor:
    """The history that a checkpoint kept, two rows of `window` steps."""
    rows = [
        [math.nan if value is None else value for value in start.history.get(name, [])][-window:]
        for name in FIGURES
    ]
    filled = [[math.inf] * (window - len(row)) + row for row in rows]
    return torch.tensor(filled, dtype=torch.float64)


def own_shares(world: World, loss_sum: Tensor, norm: Tensor) -> Tensor:
    """This rank's part of: loss, norm, how many norms and losses are no numbers, whose loss it is.

    The norm is that of the first rank: ranks whose norms differ in a digit must decide the same.
    """
    loss, own_norm = loss_sum.detach().to(norm.device, torch.float64), norm.double()
    no_loss, no_norm = (~loss.isfinite()).double(), (~own_norm.isfinite()).double()
    first_norm = own_norm if world.rank == 0 else torch.zeros_like(own_norm)
    return torch.stack([loss, first_norm, no_norm, no_loss, no_loss * world.rank])


def is_spike(figures: Tensor, history: Tensor, sigma: float) -> Tensor:
    """Whether a figure is so far above the median of those before, once half of them are there.

    The spread is the median absolute deviation, which a spike that was let through hardly moves.
    """
    count = history[0].isfinite().sum()
    middle = ((count - 1).clamp_min(0) // 2).expand(2, 1)

    def median(rows: Tensor) -> Tensor:
        return torch.where(rows.isfinite(), rows, math.inf).sort(dim=1).values.gather(1, middle)

    center = median(history)
    spread = NORMAL * median((history - center).abs())
    least = LEAST_SPREAD * center.abs().clamp_min(1.0)
    limit = center + sigma * torch.maximum(spread, least)
    return (count >= history.shape[1] // 2) & (figures > limit[:, 0]).any()


def is_finite(tensor: Tensor) -> bool:
    """Of this rank's part of it."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not own.is_floating_point() or own.numel() == 0:
        return True
    return all(bool(end.isfinite()) for end in own.aminmax())


def note(
    train_state: TrainState,
    observers: Observers,
    trouble: Trouble,
    action: Action,
    blame: Blame,
    step: int,
) -> None:
    """Write down what was done about it: metrics.jsonl, and the run's faults.

    step: that the run goes on from.
    """
    before, behind = trouble.samples
    record = {
        "event": "guard",
        "step": step,
        "at_step": trouble.step,
        "action": action,
        "kind": trouble.kind,
        "loss": trouble.loss,
        "gradient_norm": trouble.gradient_norm,
        "samples": [before, behind],
        "skipped": trouble.skipped,
    }
    for observer in observers:
        observer.on_record(record)
    evidence = f"{trouble.what}; {ABOUT_ACTION[action]} (samples {before} to {behind - 1})"
    world, folder = train_state.world, train_state.run_folder
    fault = Fault(
        trouble.kind,
        blame,
        evidence,
        rank=trouble.rank,
        step=trouble.step,
        phase="optimizer",
    )

    def write() -> None:
        add_fault(folder, replace(fault, job=job_of(folder)))

    run_on_all_ranks(world, lambda: write() if world.rank == 0 else None)
