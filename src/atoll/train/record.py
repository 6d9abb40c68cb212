"""The lines of metrics.jsonl, told to the run's sinks too: start, steps, evaluations, energy."""

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
from atoll.sharding.engines import FORWARDS
from atoll.train import energy, metrics, sinks
from atoll.train.assemble import Trainee
from atoll.train.checkpoint import Pending
from atoll.train.evaluate import Evaluated, evaluate
from atoll.train.made_of import made_of
from atoll.train.traffic import Observed
from atoll.train.world import gathered, say, summed, together

Result = TypeVar("Result")


class Meter:
    """Sums between two lines of metrics.jsonl; nothing in it makes the device wait."""

    def __init__(self, trainee: Trainee, tokens: int) -> None:
        self.trainee = trainee
        self.flops = flops_per_token(trainee)
        self.total_tokens = tokens
        self.communication_seconds: float | None = 0.0 if trainee.world.size == 1 else None
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
        trainee, world = self.trainee, self.trainee.world
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
            "mfu": per_device * self.flops / (trainee.peak_tflops[0] * 1e12),
            "memory_gib": metrics.memory_gib(world.device),
            "step_seconds": seconds / self.steps,
            "communication_bytes": round(sum(trainee.communication_bytes.values())),
            "communication_seconds": self.communication_seconds,
            "data_wait_seconds": self.data_seconds,
            "checkpoint_seconds": self.checkpoint_seconds,
        }
        write_down(trainee, record)
        self.restart()
        return record


@contextmanager
def telling(trainee: Trainee, step: int) -> Iterator[Trainee]:
    """The trainee that goes on after `step`, with its sinks open on the first rank."""
    world = trainee.world
    start = sinks.Start(trainee.run, trainee.run_folder, step)
    with ExitStack() as stack:
        first = world.rank == 0 and trainee.run.sinks
        tell = together(
            world, lambda: stack.enter_context(sinks.opened(start)) if first else sinks.ignore
        )
        yield replace(trainee, tell=tell)


def write_down(trainee: Trainee, record: dict[str, Any]) -> None:
    """A record goes into metrics.jsonl, then to the run's sinks; other ranks do nothing."""
    if trainee.world.rank == 0:
        metrics.append(trainee.run_folder, record)
        trainee.tell(record)


def flops_per_token(trainee: Trainee) -> float:
    lengths = trainee.training.plan.piece_length.astype(float)
    mean_context = float((lengths**2).sum() / lengths.sum())
    return metrics.flops_per_token(trainee.shape, mean_context)


def record_start(trainee: Trainee) -> None:
    """The first line of metrics.jsonl: what the later numbers are measured against."""
    world = trainee.world
    peak, source = trainee.peak_tflops
    if world.rank == 0:
        run_dir.metrics_file(trainee.run_folder).unlink(missing_ok=True)
        record = {
            "event": "start",
            "step": 0,
            "ranks": world.size,
            "parameters": trainee.shape.parameters,
            "steps": trainee.total_steps,
            "training_samples": len(trainee.training),
            "padding_fraction": trainee.training.plan.padding_fraction,
            "flops_per_token": flops_per_token(trainee),
            "peak_tflops_per_device": peak,
            "peak_source": source,
            "mfu_formula": metrics.MFU_FORMULA,
            "made_of": made_of(trainee.run),
        }
        write_down(trainee, record)


def record_communication(trainee: Trainee, step: int, seen: Observed) -> None:
    """What one step sent: expected by kind, and observed on the first rank and its node."""
    if trainee.world.rank == 0:
        record = {
            "event": "communication",
            "step": step,
            "expected_bytes": {k: round(v) for k, v in trainee.communication_bytes.items()},
            "wire_bytes": round(seen.wire_bytes),
            "seconds": seen.seconds,
            "collectives": seen.collectives()[:20],
        }
        write_down(trainee, record)


def record_checkpoint(trainee: Trainee, saved: Pending) -> None:
    """How long a save took, and for how much of that training stood still."""
    times = {"save_seconds": saved.done.result(), "blocked_seconds": saved.blocked_seconds}
    write_down(trainee, {"event": "checkpoint", "step": saved.step} | times)


@contextmanager
def counting_energy(trainee: Trainee) -> Iterator[Callable[[int, int], None]]:
    """A function that records, on all ranks, what they used since the `with` began.

    It takes the first and the last step; nothing is recorded where nothing is known.
    """
    run, world = trainee.run, trainee.world
    first_of_node = world.rank % run.ranks_per_node == 0
    with energy.counted(run.facility.node, world.device, first_of_node) as spent:

        def record(first_step: int, step: int) -> None:
            used = energy.totals(gathered(world, spent()), run.ranks_per_node)
            if used:
                place = {"event": "energy", "step": step, "first_step": first_step}
                write_down(trainee, place | used)

        yield record


def record_evaluation(trainee: Trainee, step: int) -> Evaluated:
    """Loss and figures on the held-out part, shown and recorded."""
    run, world = trainee.run, trainee.world
    result = evaluate(
        run,
        trainee.model,
        partial(FORWARDS[run.sharding.step_engine], trainee.wrapped),
        trainee.validation,
        world,
        trainee.plan,
    )
    figures = ", ".join(f"{name} {value:.4g}" for name, value in result.figures.items())
    say(world, f"step {step}: held-out {figures} (loss {result.loss:.4f})")
    write_down(trainee, {"event": "evaluation", "step": step, **result.record()})
    return result


def record_result(trainee: Trainee, final: Evaluated) -> None:
    if trainee.world.rank == 0:
        result = {"steps": trainee.total_steps, **final.record()}
        run_dir.write_whole(run_dir.result_file(trainee.run_folder), json.dumps(result, indent=1))
