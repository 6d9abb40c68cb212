"""What a run tells while it goes on: metrics.jsonl, a progress bar or plain lines, and MFU."""

import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from atoll import run_dir
from atoll.errors import UserError
from atoll.plan.shapes import Shape
from atoll.settings import Node

MFU_FORMULA = (
    "tokens/s/device * (6*N + 12*L*d*C) / peak, N parameters without embeddings, L layers, "
    "d hidden size, C mean context (half of it is masked, counted in full)"
)

# dense bf16 TFLOP/s from the vendors' data sheets; MI250X per GCD. V100: fp16, it has no bf16.
PEAK_TFLOPS = {
    "A100": 312.0,
    "H100": 989.0,
    "H200": 989.0,
    "GH200": 989.0,
    "MI250X": 191.5,
    "V100": 125.0,
}


def peak_tflops(node: Node, device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """The peak of one device, and where the number comes from.

    Raises `UserError` for an unknown accelerator: a guessed peak makes every MFU wrong.
    """
    if node.peak_tflops is not None:
        return node.peak_tflops, "facility.node.peak_tflops"
    if device.type == "cpu":
        return _measured_tflops(dtype), f"matrix product measured on this rank, {dtype}"
    name = torch.cuda.get_device_name(device)
    for known, value in sorted(PEAK_TFLOPS.items(), key=lambda item: -len(item[0])):
        if known in name:
            return value, f"data sheet of {known}"
    raise UserError(
        f"the peak of device {name!r} is not known", "set facility.node.peak_tflops (dense bf16)"
    )


def flops_per_token(shape: Shape, mean_context_tokens: float) -> float:
    """Forward and backward (Chowdhery et al. 2022, appendix B): 6 N + 12 L d C."""
    attention = 12 * shape.layers * shape.hidden * mean_context_tokens
    return 6.0 * shape.multiplied_parameters + attention


def memory_gib(device: torch.device) -> float:
    """The most memory this rank has used so far: on the device, or resident where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def append(run_folder: Path, record: dict[str, Any]) -> None:
    """Add one line to metrics.jsonl; a line is written in one piece."""
    with open(run_dir.metrics_file(run_folder), "a") as file:
        file.write(json.dumps(_finite(record | {"time": round(time.time(), 3)})) + "\n")


def truncate_after(run_folder: Path, step: int) -> None:
    """Forget what was recorded after the checkpoint that a run resumes from."""
    path = run_dir.metrics_file(run_folder)
    if not path.is_file():
        return
    lines = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
    run_dir.write_whole(path, "".join(line + "\n" for line in lines))


class Display(Protocol):
    """Where progress is shown."""

    def __call__(self, record: dict[str, Any]) -> None: ...


@contextmanager
def display(total_steps: int, first_step: int, shown: bool) -> Iterator[Display]:
    """A progress bar with loss, tokens/s and time left on a terminal; plain lines elsewhere."""
    if not shown:
        yield lambda record: None
    elif sys.stdout.isatty():
        with _bar(total_steps, first_step) as update:
            yield update
    else:
        started = time.monotonic()

        def line(record: dict[str, Any]) -> None:
            done = record["step"] - first_step
            left = (time.monotonic() - started) / max(1, done) * (total_steps - record["step"])
            print(
                f"step {record['step']:>6}/{total_steps}  loss {record['loss']:.4f}  "
                f"{record['tokens_per_second']:,.0f} tokens/s  {_clock(left)} left",
                flush=True,
            )

        yield line


@contextmanager
def _bar(total_steps: int, first_step: int) -> Iterator[Display]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("", total=total_steps, completed=first_step, loss=0.0, rate=0.0)
        yield lambda r: progress.update(
            task, completed=r["step"], loss=r["loss"], rate=r["tokens_per_second"]
        )


def _measured_tflops(dtype: torch.dtype, size: int = 1024) -> float:
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    best = math.inf
    for _ in range(5):
        started = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best / 1e12


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN: such a number becomes null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line).get("step", 0))
    except ValueError:
        return sys.maxsize  # a line cut short by a kill


def _clock(seconds: float) -> str:
    minutes, seconds_left = divmod(int(seconds), 60)
    return f"{minutes}:{seconds_left:02d}"
