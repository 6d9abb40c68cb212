"""The lines of metrics.jsonl: the start, training steps, evaluations and checkpoints."""

import math
import resource
import time

import torch

from atoll import run_dir
from atoll.monitor.comm_profile import CommunicationProfile
from atoll.monitor.mfu import MFU_FORMULA, flops_per_token, mean_context_tokens, peak_tflops
from atoll.monitor.observers import Observer, Record, StepRecord, WatchedRun, Write
from atoll.monitor.provenance import made_of
from atoll.plan.adapters import adapter_parameters
from atoll.plan.traffic import rounded, total
from atoll.sharding.process_group import World, gathered, say, summed


class Metrics(Observer):
    """Every step is in one line, which ends at a step to log or to save; none waits for the device.

    A line's seconds are those of the clock since the line before, without evaluations.
    """

    def __init__(
        self, watched: WatchedRun, write: Write, communication: CommunicationProfile | None
    ) -> None:
        node, world = watched.run.facility.node, watched.world
        self.watched, self.write, self.communication = watched, write, communication
        self.peak, self.peak_source = peak_tflops(node, world.device, watched.compute_dtype)
        context = mean_context_tokens(watched.packing, watched.shape)
        learning = adapter_parameters(watched.run, watched.shape)
        adapters = learning if watched.run.model.lora is not None else None
        self.flops = flops_per_token(watched.shape, context, adapters)
        self.updates: list[StepRecord] = []
        self.started: float | None = None
        if self.peak is None:
            say(world, f"no MFU: {self.peak_source}")
        if world.rank != 0:
            return
        if not self._is_told():
            write(self.start_record())
        is_first = watched.resumed_step == watched.run.checkpoint.initial_step
        if is_first and (predicted := run_dir.predicted(watched.run_folder)):
            write({"event": "prediction", "step": watched.resumed_step} | predicted)

    def _is_told(self) -> bool:
        """Whether an earlier start was to end at the same step, on as many ranks."""
        starts = [x for x in run_dir.metrics(self.watched.run_folder) if x["event"] == "start"]
        now = (self.watched.total_steps, self.watched.world.size)
        return bool(starts) and (starts[-1].get("steps"), starts[-1]["ranks"]) == now

    def start_record(self) -> Record:
        """What the later numbers are measured against."""
        watched = self.watched
        return {
            "event": "start",
            "step": watched.resumed_step,
            "ranks": watched.world.size,
            "parameters": watched.shape.parameters,
            "steps": watched.total_steps,
            "training_samples": watched.packing.samples,
            "padding_fraction": watched.packing.padding_fraction,
            "flops_per_token": self.flops,
            "peak_tflops_per_device": self.peak,
            "peak_source": self.peak_source,
            "mfu_formula": MFU_FORMULA,
            "made_of": made_of(watched.run),
        }

    def before_step(self, step: int) -> None:
        if self.started is None:
            self.started = time.monotonic()

    def after_step(self, update: StepRecord) -> None:
        self.updates.append(update)
        if update.is_saved or update.step % self.watched.run.training.log_every_steps == 0:
            self.write(self.train_record())
            self.updates, self.started = [], time.monotonic()

    def on_end(self) -> None:
        """Steps behind the last line, where the run stops before it is due."""
        if self.updates:
            self.write(self.train_record())
            self.updates = []

    def on_checkpoint(self, step: int, save_seconds: float, blocked_seconds: float) -> None:
        times = {"save_seconds": save_seconds, "blocked_seconds": blocked_seconds}
        self.write({"event": "checkpoint", "step": step} | times)

    def on_record(self, record: Record) -> None:
        self.write(record)

    def on_evaluation(self, step: int, figures: dict[str, float], seconds: float) -> None:
        self.write({"event": "evaluation", "step": step, **figures})
        if self.started is not None:
            self.started += seconds

    def train_record(self) -> Record:
        """The steps since the last line; every rank calls this."""
        world, updates, last = self.watched.world, self.updates, self.updates[-1]
        assert self.started is not None
        loss = mean_loss(world, updates)
        seconds = time.monotonic() - self.started
        rate = sum(update.tokens for update in updates) / seconds
        per_device = rate / world.size
        utilisation = {}
        if self.peak is not None:
            utilisation["mfu"] = per_device * self.flops / (self.peak * 1e12)
        return {
            "event": "train",
            "step": last.step,
            "tokens": last.total_tokens,
            "loss": loss,
            **{f"epochs/{name}": epochs for name, epochs in last.epochs.items()},
            "perplexity": math.exp(min(loss, 700.0)),
            "learning_rate": last.learning_rate,
            "gradient_norm": float(last.gradient_norm),
            "tokens_per_second": rate,
            "tokens_per_second_per_device": per_device,
            **utilisation,
            "memory_gib": max(gathered(world, memory_gib(world.device))),  # stages differ
            "step_seconds": seconds / len(updates),
            "communication_bytes": total(rounded(self.watched.communication_bytes)),
            "communication_seconds": self.communication and self.communication.seconds,
            "data_wait_seconds": sum(update.data_wait_seconds for update in updates),
            "checkpoint_seconds": sum(update.checkpoint_seconds for update in updates),
        }


def mean_loss(world: World, updates: list[StepRecord]) -> float:
    """Over the targets of all ranks; of steps whose update was left out only if there is no other.

    Every rank calls this, and leaves out the same ones.
    """
    skipped = [update.skipped for update in updates if update.skipped is not None]
    if skipped:
        flags = torch.stack(skipped).tolist()
        kept = [update for update, flag in zip(updates, flags, strict=True) if not flag]
        updates = kept or updates
    loss_sum = sum((update.loss_sum for update in updates[1:]), updates[0].loss_sum)
    return float(summed(world, loss_sum.double())) / sum(u.targets for u in updates)


def memory_gib(device: torch.device) -> float:
    """The most memory this rank has used so far: on the device, or resident where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
