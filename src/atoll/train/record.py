"""The lines of metrics.jsonl, told to the run's loggers too: start, steps, evaluations, energy."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from atoll import run_dir
from atoll.monitor import energy, loggers, metrics
from atoll.monitor.comm_profile import Observed
from atoll.monitor.provenance import made_of
from atoll.sharding.engines import FORWARDS
from atoll.sharding.process_group import gathered, run_on_all_ranks, say, summed
from atoll.train.assemble import TrainState
from atoll.train.checkpoint import Pending
from atoll.train.evaluate import Evaluated, evaluate

Result = TypeVar("Result")


class Meter:
    """Sums between two lines of metrics.jsonl; nothing in it makes the device wait."""

    def __init__(self, train_state: TrainState, tokens: int) -> None:
        self.train_state = train_state
        self.flops = flops_per_token(train_state)
        self.total_tokens = tokens
        self.communication_seconds: float | None = 0.0 if train_state.world.size == 1 else None
        self.restart()

    def restart(self) -> None:
        self.started = time.monotonic()
        self.loss_sum: Tensor | None = None
        self.targets = self.tokens = self.steps = 0
        self.data_seconds = self.checkpoint_seconds = 0.0

    def waited(self, call: Callable[[], Result]) -> Result:
        started = time.monotonic()
        result = call()
        self.data_seconds += time.monotonic() - started
        return result

    def count(self, loss_sum: Tensor, targets: int, tokens: int) -> None:
        self.loss_sum = loss_sum if self.loss_sum is None else self.loss_sum + loss_sum
        self.targets += targets
        self.tokens += tokens
        self.total_tokens += tokens
        self.steps += 1

    def record(self, step: int, rate: float, norm: Tensor) -> dict[str, Any]:
        """One line of metrics.jsonl for the steps since the last; every rank calls this."""
        train_state, world = self.train_state, self.train_state.world
        assert self.loss_sum is not None
        loss = float(summed(world, self.loss_sum.double())) / self.targets
        seconds = time.monotonic() - self.started
        per_device = self.tokens / seconds / world.size
        record = {
            "event": "train",
            "step": step,
            "tokens": self.total_tokens,
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "learning_rate": rate,
            "gradient_norm": float(norm),
            "tokens_per_second": self.tokens / seconds,
            "tokens_per_second_per_device": per_device,
            "mfu": per_device * self.flops / (train_state.peak_tflops[0] * 1e12),
            "memory_gib": metrics.memory_gib(world.device),
            "step_seconds": seconds / self.steps,
            "communication_bytes": round(sum(train_state.communication_bytes.values())),
            "communication_seconds": self.communication_seconds,
            "data_wait_seconds": self.data_seconds,
            "checkpoint_seconds": self.checkpoint_seconds,
        }
        write_down(train_state, record)
        self.restart()
        return record


@contextmanager
def telling(train_state: TrainState, step: int) -> Iterator[TrainState]:
    """The train_state that goes on after `step`, with its loggers open on the first rank."""
    world = train_state.world
    start = loggers.Start(train_state.run, train_state.run_folder, step)
    with ExitStack() as stack:
        first = world.rank == 0 and train_state.run.loggers
        tell = run_on_all_ranks(
            world, lambda: stack.enter_context(loggers.opened(start)) if first else loggers.ignore
        )
        yield replace(train_state, tell=tell)


def write_down(train_state: TrainState, record: dict[str, Any]) -> None:
    """A record goes into metrics.jsonl, then to the run's loggers; other ranks do nothing."""
    if train_state.world.rank == 0:
        metrics.append(train_state.run_folder, record)
        train_state.tell(record)


def flops_per_token(train_state: TrainState) -> float:
    lengths = train_state.training.plan.piece_length.astype(float)
    mean_context = float((lengths**2).sum() / lengths.sum())
    return metrics.flops_per_token(train_state.shape, mean_context)


def record_start(train_state: TrainState) -> None:
    """The first line of metrics.jsonl: what the later numbers are measured against."""
    world = train_state.world
    peak, source = train_state.peak_tflops
    if world.rank == 0:
        run_dir.metrics_file(train_state.run_folder).unlink(missing_ok=True)
        record = {
            "event": "start",
            "step": 0,
            "ranks": world.size,
            "parameters": train_state.shape.parameters,
            "steps": train_state.total_steps,
            "training_samples": len(train_state.training),
            "padding_fraction": train_state.training.plan.padding_fraction,
            "flops_per_token": flops_per_token(train_state),
            "peak_tflops_per_device": peak,
            "peak_source": source,
            "mfu_formula": metrics.MFU_FORMULA,
            "made_of": made_of(train_state.run),
        }
        write_down(train_state, record)


def record_communication(train_state: TrainState, step: int, seen: Observed) -> None:
    """What one step sent: expected by kind, and observed on the first rank and its node."""
    if train_state.world.rank == 0:
        record = {
            "event": "communication",
            "step": step,
            "expected_bytes": {k: round(v) for k, v in train_state.communication_bytes.items()},
            "wire_bytes": round(seen.wire_bytes),
            "seconds": seen.seconds,
            "collectives": seen.collectives()[:20],
        }
        write_down(train_state, record)


def record_checkpoint(train_state: TrainState, saved: Pending) -> None:
    """How long a save took, and for how much of that training stood still."""
    times = {"save_seconds": saved.done.result(), "blocked_seconds": saved.blocked_seconds}
    write_down(train_state, {"event": "checkpoint", "step": saved.step} | times)


@contextmanager
def counting_energy(train_state: TrainState) -> Iterator[Callable[[int, int], None]]:
    """A function that records, on all ranks, what they used since the `with` began.

    It takes the first and the last step; nothing is recorded where nothing is known.
    """
    run, world = train_state.run, train_state.world
    first_of_node = world.rank % run.ranks_per_node == 0
    with energy.counted(run.facility.node, world.device, first_of_node) as spent:

        def record(first_step: int, step: int) -> None:
            used = energy.totals(gathered(world, spent()), run.ranks_per_node)
            if used:
                place = {"event": "energy", "step": step, "first_step": first_step}
                write_down(train_state, place | used)

        yield record


def record_evaluation(train_state: TrainState, step: int) -> Evaluated:
    """Loss and figures on the held-out part, shown and recorded."""
    run, world = train_state.run, train_state.world
    result = evaluate(
        run,
        train_state.model,
        partial(FORWARDS[run.sharding.step_engine], train_state.wrapped),
        train_state.validation,
        world,
        train_state.plan,
    )
    figures = ", ".join(f"{name} {value:.4g}" for name, value in result.figures.items())
    say(world, f"step {step}: held-out {figures} (loss {result.loss:.4f})")
    write_down(train_state, {"event": "evaluation", "step": step, **result.record()})
    return result


def record_result(train_state: TrainState, final: Evaluated) -> None:
    if train_state.world.rank == 0:
        result = {"steps": train_state.total_steps, **final.record()}
        run_dir.write_whole(
            run_dir.result_file(train_state.run_folder), json.dumps(result, indent=1)
        )
