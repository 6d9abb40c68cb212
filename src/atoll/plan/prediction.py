"""What a run will take: a pure function of its settings, to be held against what it took.

Times come from a facility's stated peaks, so they are lower bounds; what has no formula or no
stated rate is None, never a guess.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from atoll.plan.adapters import adapter_parameters
from atoll.plan.memory import FP32, MOMENT_BYTES, memory_of, why_unknown
from atoll.plan.seconds import stated_rates, step_seconds
from atoll.plan.shapes import Shape
from atoll.plan.traffic import bytes_sent, total
from atoll.settings import Run


class Quantity(NamedTuple):
    """What a figure of a prediction is."""

    what: str
    unit: str
    bound: str = ""  # the side that it can only be wrong on


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

    def record(self, run: Run, version: str) -> dict[str, Any]:
        """Each figure with its unit, and the rates that it rests on."""
        figures = {
            name: {"value": getattr(self, name), "unit": each.unit, "bound": each.bound}
            for name, each in QUANTITIES.items()
        }
        rates = {"from": "stated by the facility"} | asdict(stated_rates(run))
        return {"atoll": version, "rates": rates, "jobs": self.jobs, "predicted": figures}


def predict(run: Run, shape: Shape) -> Prediction:
    """What a run will take on the devices of its facility, without its start, saves and queues."""
    unknown = why_unknown(run, shape)
    step = step_seconds(run, shape, stated_rates(run))
    seconds, steps = None if unknown else step.total, steps_taken(run)
    missing = ", ".join(step.unknown) or "the device"
    no_rate = f"{run.facility.name} states no rate for: {missing}"
    hours = None if seconds is None or steps is None else seconds * steps / 3600
    sent = total(bytes_sent(run, shape))
    tokens = run.training.global_batch_samples * run.data.sequence_tokens
    return Prediction(
        memory_gib=None if unknown else memory_of(run, shape).peak_gib,
        checkpoint_gib=None if unknown else checkpoint_bytes(run, shape) / 2**30,
        sent_mib=None if sent is None else sent / 2**20,
        step_seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else None,
        hours=hours,
        node_hours=None if hours is None else hours * run.job_nodes,
        device_kwh=_device_kwh(run, hours),
        jobs=_jobs(run, hours),
        why_no_time="" if seconds is not None else unknown or no_rate,
    )


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


def _device_kwh(run: Run, hours: float | None) -> float | None:
    """All devices at the most that one draws."""
    watts = run.facility.node.device_watts
    return None if watts is None or hours is None else watts * run.world_size * hours / 1000


def _jobs(run: Run, hours: float | None) -> int | None:
    """How many jobs the steps need; each stops in time to save."""
    minutes = run.facility.walltime_minutes
    if hours is None or minutes is None:
        return None
    usable = minutes * 60 - run.restart.notice_seconds
    return max(1, math.ceil(hours * 3600 / usable)) if usable > 0 else None


def in_a_line(prediction: Prediction, run: Run) -> str:
    """What a run will take, in one line for a person."""
    words = [_time(prediction, run)]
    if prediction.device_kwh is not None:
        words.append(f"{prediction.device_kwh:,.3g} kWh of devices at their stated power")
    for name, where in (("memory_gib", "a device"), ("checkpoint_gib", "a checkpoint")):
        value = getattr(prediction, name)
        words.append(f"{'?' if value is None else f'{value:,.3g}'} GiB {where}")
    return "; ".join(words)


def _time(prediction: Prediction, run: Run) -> str:
    each, rate = prediction.step_seconds, prediction.tokens_per_second
    if each is None or rate is None:
        return f"time ? ({prediction.why_no_time})"
    text = f"at least {each:,.3g} s a step, at most {rate:,.0f} tokens/s; "
    hours, node_hours = prediction.hours, prediction.node_hours
    if hours is None or node_hours is None:
        return f"{text}time ? (training.epochs: the steps follow from the text)"
    return (
        f"{text}at least {_length(hours)} and {node_hours:,.3g} node-hours{_chain(prediction, run)}"
    )


def _chain(prediction: Prediction, run: Run) -> str:
    jobs, minutes = prediction.jobs, run.facility.walltime_minutes
    if jobs is None or minutes is None:
        return ""
    return f", {jobs} job{'s' if jobs > 1 else ''} of up to {_length(minutes / 60)}"


def _length(hours: float) -> str:
    """As a person says it."""
    for size, unit in ((1.0, "h"), (1 / 60, "min")):
        if hours >= size:
            return f"{hours / size:,.3g} {unit}"
    return f"{hours * 3600:,.3g} s"
