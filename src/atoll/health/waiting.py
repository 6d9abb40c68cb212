"""The time a rank waits for others, told from its own work wherever it waits.

On a processor every collective blocks this rank's thread: in `Work.wait` (FSDP, pipelines,
exchanges by hand, DeepSpeed), in `wait_tensor` (tensor parallel, norms of DTensors), or at the end
of a backward pass of DDP. On a device the thread runs ahead, and its stream waits instead: events
before and behind each wait tell for how long, without a synchronisation. A wait that none of this
sees counts as own work of all ranks alike, which hides a straggler and never makes one.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp
from torch.nn.parallel import DistributedDataParallel

from atoll.health.heartbeat import Heartbeat, Phase
from atoll.health.stragglers import OwnWork

OWN: tuple[Phase, ...] = ("compute", "input", "optimizer")

Waits = Callable[[bool], None]  # true: the wait begins
Kind = Literal["own", "wait", "out"]  # what begins with an event; out: what is behind a step


class HostClock:
    """Own work as the heartbeat has it: what is not waited in its phases."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat, self.main = heartbeat, threading.get_ident()
        self.interrupted = heartbeat.phase
        self.before, self.steps = heartbeat.seconds, 0

    def waits(self, begins: bool) -> None:
        """Only of the loop's thread, and of its own work: a checkpoint's waits are its own."""
        if threading.get_ident() != self.main:
            return
        if begins and self.heartbeat.phase in OWN:
            self.interrupted = self.heartbeat.phase
            self.heartbeat.at("communication")
        elif not begins and self.heartbeat.phase == "communication":
            self.heartbeat.at(self.interrupted)

    def step(self, begins: bool) -> None:
        self.steps += not begins

    def take(self) -> OwnWork | None:
        """The mean of the steps since the last call; None: of none."""
        now, before, steps = self.heartbeat.seconds, self.before, self.steps
        self.before, self.steps = now, 0
        compute, waited, updates = (now[phase] - before[phase] for phase in OWN)
        return OwnWork((compute + updates) / steps, waited / steps) if steps else None


class DeviceClock:
    """Own work by events in the stream that computes; input as the heartbeat has it."""

    def __init__(self, heartbeat: Heartbeat, cuda: Any = torch.cuda) -> None:
        self.host, self.cuda, self.stream = HostClock(heartbeat), cuda, cuda.current_stream()
        self.marks: list[tuple[Kind, Any]] = []
        self.free: list[Any] = []

    def waits(self, begins: bool) -> None:
        self.host.waits(begins)
        # collectives of FSDP wait in streams of their own, which stop nothing
        if self.cuda.current_stream() == self.stream:
            self._mark("wait" if begins else "own")

    def step(self, begins: bool) -> None:
        self.host.step(begins)
        self._mark("own" if begins else "out")

    def take(self) -> OwnWork | None:
        """The mean of the steps that the device finished since the last call; None: of none."""
        host = self.host.take()
        ends = [n for n, (kind, end) in enumerate(self.marks) if kind == "out" and end.query()]
        if not ends or host is None:
            return None
        marks, self.marks = self.marks[: ends[-1] + 1], self.marks[ends[-1] + 1 :]
        own = sum(a.elapsed_time(b) for (kind, a), (_, b) in pairwise(marks) if kind == "own") / 1e3
        self.free += [event for _, event in marks]
        # a device without work while its host waits for a batch is in `own` already
        return OwnWork(max(0.0, own / len(ends) - host.input), host.input)

    def _mark(self, kind: Kind) -> None:
        event = self.free.pop() if self.free else self.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((kind, event))


Clock = HostClock | DeviceClock


@contextmanager
def own_work_clock(heartbeat: Heartbeat, model: nn.Module, device: torch.device) -> Iterator[Clock]:
    """Tell waiting from work for the length of a `with`."""
    on_gpu = device.type == "cuda"
    clock: Clock = DeviceClock(heartbeat) if on_gpu else HostClock(heartbeat)
    with ExitStack() as stack:
        stack.enter_context(_marked(dist.Work, "wait", clock.waits))
        stack.enter_context(_marked(functional, "wait_tensor", clock.waits))
        if on_gpu:  # there FSDP lets its stream wait for events of its own
            for name in ("wait_for_unshard", "finalize_backward"):
                stack.enter_context(_marked(fsdp.FSDPParamGroup, name, clock.waits))
        if isinstance(model, DistributedDataParallel):
            stack.enter_context(_ddp_marked(model, clock.waits))
        yield clock


@contextmanager
def _marked(owner: Any, name: str, waits: Waits) -> Iterator[None]:
    """Mark each call of a function of torch as a wait."""
    original = getattr(owner, name, None)
    if original is None:
        yield  # another torch: its waits are not seen
        return

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        waits(True)
        try:
            return original(*args, **kwargs)
        finally:
            waits(False)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _ddp_marked(model: DistributedDataParallel, waits: Waits) -> Iterator[None]:
    """DDP waits at the end of a backward pass, in its own callback: one before it marks that.

    The next forward pass, or the loop's next phase, ends the wait.
    """

    def begins(*_: Any) -> None:
        waits(True)

    def callback_of(gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(begins)

    def forward_begins(module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            waits(False)

    def forward_ends(module: nn.Module, args: Any, loss: Tensor) -> None:
        if loss.requires_grad:
            loss.register_hook(callback_of)  # type: ignore[no-untyped-call]

    handles = [
        model.register_forward_pre_hook(forward_begins),
        model.register_forward_hook(forward_ends),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
