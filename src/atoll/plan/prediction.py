"""What a run will take: a pure function of its settings, to be held against what it took.

At a facility's stated peaks times are lower bounds. Rates that were measured there come before
them, and what its finished runs taught is laid over both. What has no formula or no rate is None,
never a guess.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from atoll.plan.adapters import adapter_parameters
from atoll.plan.calibration import Calibration, memory_factor, step_factor, strategy_family
from atoll.plan.memory import MOMENT_BYTES, memory_of, why_unknown
from atoll.plan.processors import Measured
from atoll.plan.seconds import Rates, rates_of, step_seconds
from atoll.plan.shapes import Shape
from atoll.plan.traffic import bytes_sent, total
from atoll.plan.weights import BF16, FP32
from atoll.settings import Run


class Quantity(NamedTuple):
    """What a figure of a prediction is."""

    what: str
    unit: str
    bound: str = ""  # the side that it can only be wrong on, at stated peaks


QUANTITIES: Mapping[str, Quantity] = {
    "memory_gib": Quantity("memory of the fullest device", "GiB"),
    "checkpoint_gib": Quantity("a checkpoint", "GiB"),
    "sent_mib": Quantity("sent by a rank in a step", "MiB"),
    "step_seconds": Quantity("a step", "s", "at least"),
    "tokens_per_second": Quantity("tokens in a second", "tokens/s", "at most"),
    "hours": Quantity("all steps", "h", "at least"),
    "node_hours": Quantity("the nodes of its jobs", "node-hours", "at least"),
    "device_kwh": Quantity("energy of its devices", "kWh"),
}


@dataclass(frozen=True)
class Prediction:
    """A run from its first step to its last; None: unknown."""

    memory_gib: float | None
    checkpoint_gib: float | None
    sent_mib: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    hours: float | None
    node_hours: float | None
    device_kwh: float | None
    jobs: int | None  # of a chain, each up to its walltime
    why_no_time: str  # where the time of a step is unknown
    rates: Rates
    start_seconds: float | None = None  # of each job, as runs here took; None: not counted
    saving_seconds: float | None = None  # for which training waits to write, in all
    end_seconds: float | None = None  # behind the export: samples and the report
    runs: int = 0  # that taught the time of a step; 0: none did

    @property
    def is_bound(self) -> bool:
        """Whether its times are the least: of peaks and links that no run was compared with."""
        return self.runs == 0 and self.rates.on_processors is None

    def record(self, run: Run, version: str) -> dict[str, Any]:
        """Each figure with its unit, and what it rests on."""
        figures = {
            name: {"value": getattr(self, name), "unit": each.unit}
            | {"bound": each.bound if self.is_bound else ""}
            for name, each in QUANTITIES.items()
        }
        rates = {"from": self.rates.source} | asdict(self.rates)
        rests = {"rates": rates, "runs": self.runs, "facility": run.facility.name}
        return {"atoll": version, **rests, "jobs": self.jobs, "predicted": figures}


def predict(
    run: Run,
    shape: Shape,
    measured: Measured | None = None,
    calibration: Calibration | None = None,
    file_write_gb_s: float | None = None,
) -> Prediction:
    """What a run will take on the devices of its facility, without its evaluations and queues.

    measured, calibration: of the facility's certificate; without them, at its stated peaks.
    file_write_gb_s: of one node; without it saves are not counted.
    """
    unknown, rates, family = why_unknown(run, shape), rates_of(run, measured), strategy_family(run)
    step = step_seconds(run, shape, rates)
    seconds, steps = None if unknown else step.total, steps_taken(run)
    is_measured = rates.on_processors is not None
    factor = step_factor(calibration, family, seconds, is_measured) if seconds else None
    seconds = seconds * factor.value if seconds and factor else seconds
    missing = ", ".join(step.unknown) or "the device"
    no_rate = f"{run.facility.name} states no rate for: {missing}"
    hours = None if seconds is None or steps is None else seconds * steps / 3600
    start = (calibration or {}).get("start_seconds")
    saving = None if unknown else saving_seconds(run, shape, seconds, file_write_gb_s)
    jobs = _jobs(run, hours, start or 0.0, saving or 0.0)
    end = (calibration or {}).get("end_seconds")
    beside = (jobs or 1) * (start or 0.0) + (saving or 0.0) + (end or 0.0)
    held = None if hours is None else hours + beside / 3600
    sent = total(bytes_sent(run, shape))
    tokens = run.training.global_batch_samples * run.data.sequence_tokens
    return Prediction(
        memory_gib=None if unknown else _memory_gib(run, shape, calibration),
        checkpoint_gib=None if unknown else checkpoint_bytes(run, shape) / 2**30,
        sent_mib=None if sent is None else sent / 2**20,
        step_seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else None,
        hours=hours,
        node_hours=None if held is None else held * run.job_nodes,
        device_kwh=_device_kwh(run, hours),
        jobs=jobs,
        why_no_time="" if seconds is not None else unknown or step.why or no_rate,
        rates=rates,
        start_seconds=start,
        saving_seconds=saving,
        end_seconds=end,
        runs=0 if factor is None else factor.runs,
    )


def _memory_gib(run: Run, shape: Shape, calibration: Calibration | None) -> float:
    """Of its steps and scores; on processors of all it does, since a process keeps its highest."""
    memory = memory_of(run, shape)
    on_device = max(memory.peak, memory.runtime + memory.scoring) / 2**30
    needed = memory.whole_gib if run.facility.node.device == "cpu" else on_device
    factor = memory_factor(calibration, strategy_family(run), needed)
    return needed * (1.0 if factor is None else factor.value)


def steps_taken(run: Run) -> int | None:
    """The steps of a run; None where they follow from how much text there is."""
    steps = run.training.steps
    return None if steps is None else steps - run.checkpoint.initial_step


def checkpoint_bytes(run: Run, shape: Shape) -> float:
    """What learns in fp32, with its moments and its average; the rest is read from the source."""
    learning = shape.parameters if run.model.lora is None else adapter_parameters(run, shape)
    each = FP32 + MOMENT_BYTES[run.optimizer.name] + FP32 * bool(run.optimizer.ema_decay)
    size = learning * each
    if run.optimizer.name == "muon":  # one moment of a matrix, where AdamW has two
        size -= FP32 * shape.layers * shape.block_matrices
    return size


def saving_seconds(
    run: Run, shape: Shape, step_seconds: float | None, file_write_gb_s: float | None
) -> float | None:
    """For which training waits to write: the last checkpoint, and the export behind it.

    Of those before, what the steps up to the next do not hide. All nodes with ranks write at once.
    """
    if steps_taken(run) is None or step_seconds is None or file_write_gb_s is None:
        return None
    rate, every = file_write_gb_s * 1e9 * run.nodes, run.checkpoint.every_steps
    save = checkpoint_bytes(run, shape) / rate
    shown = 0.0
    if every != "auto":  # whose saves are whole before the next begins
        hidden = every * step_seconds if run.checkpoint.asynchronous else 0.0
        shown = (checkpoints_of(run, every) - 1) * max(0.0, save - hidden)
    return shown + save + exported_bytes(run, shape) / rate


def exported_bytes(run: Run, shape: Shape) -> float:
    """The model at the end, and the average of its weights; not a GGUF file beside them."""
    each = FP32 if run.export.dtype == "float32" else BF16
    is_whole = run.model.lora is None or run.export.merged
    numbers = shape.parameters if is_whole else adapter_parameters(run, shape)
    return float(each * numbers * (1 + bool(run.optimizer.ema_decay)))


def checkpoints_of(run: Run, every_steps: int) -> int:
    """The last one is written in any case."""
    return max(1, -(-(steps_taken(run) or 0) // every_steps)) if every_steps else 1


def _device_kwh(run: Run, hours: float | None) -> float | None:
    """All devices at the most that one draws."""
    watts = run.facility.node.device_watts
    return None if watts is None or hours is None else watts * run.world_size * hours / 1000


def _jobs(run: Run, hours: float | None, start_seconds: float, saving_seconds: float) -> int | None:
    """How many jobs the steps and saves need; each starts anew, and stops in time to save."""
    minutes = run.facility.walltime_minutes
    if hours is None or minutes is None:
        return None
    usable = minutes * 60 - run.restart.notice_seconds - start_seconds
    return max(1, math.ceil((hours * 3600 + saving_seconds) / usable)) if usable > 0 else None


def in_a_line(prediction: Prediction, run: Run) -> str:
    """What a run will take, in one line for a person."""
    words = [_time(prediction, run)]
    if prediction.device_kwh is not None:
        words.append(f"{prediction.device_kwh:,.3g} kWh of devices at their stated power")
    memory, saved = prediction.memory_gib, prediction.checkpoint_gib
    words.append(f"{'?' if memory is None else f'{memory:,.3g}'} GiB a device")
    words.append(f"{_saves(run)} of {'?' if saved is None else f'{saved:,.3g}'} GiB")
    if prediction.runs:
        words.append(f"from {_counted(prediction.runs, 'run')} here")
    elif prediction.step_seconds is not None and not prediction.is_bound:
        words.append("by rates measured here")
    return "; ".join(words)


def _time(prediction: Prediction, run: Run) -> str:
    each, rate = prediction.step_seconds, prediction.tokens_per_second
    if each is None or rate is None:
        return f"time ? ({prediction.why_no_time})"
    least, most = ("at least", "at most") if prediction.is_bound else ("about", "about")
    text = f"{least} {each:,.3g} s a step, {most} {rate:,.0f} tokens/s; "
    hours, node_hours = prediction.hours, prediction.node_hours
    if hours is None or node_hours is None:
        return f"{text}time ? (training.epochs: the steps follow from the text)"
    start = prediction.start_seconds
    begins = "" if start is None else f", {length(start / 3600)} of each job to start"
    saving, end = prediction.saving_seconds, prediction.end_seconds
    begins += "" if not end else f", {length(end / 3600)} behind its export"
    ends = "" if saving is None else f", {length(saving / 3600)} to save"
    # what a job takes to start is on top until runs have taught it
    total = "at least" if start is None else least
    return (
        f"{text}{total} {length(hours)} and {node_hours:,.3g} node-hours"
        f"{_chain(prediction, run)}{begins}{ends}"
    )


def _chain(prediction: Prediction, run: Run) -> str:
    jobs, minutes = prediction.jobs, run.facility.walltime_minutes
    if jobs is None or minutes is None:
        return ""
    return f", {_counted(jobs, 'job')} of up to {length(minutes / 60)}"


def _saves(run: Run) -> str:
    """How many checkpoints are written, the last one among them, where that is known."""
    every = run.checkpoint.every_steps
    if steps_taken(run) is None or every == "auto":
        return "checkpoints"
    return _counted(checkpoints_of(run, every), "checkpoint")


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def length(hours: float) -> str:
    """As a person says it."""
    for size, unit in ((1.0, "h"), (1 / 60, "min")):
        if hours >= size:
            return f"{hours / size:,.3g} {unit}"
    return f"{hours * 3600:,.3g} s"
