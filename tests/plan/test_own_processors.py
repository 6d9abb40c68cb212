"""precision=auto on this machine, as its ranks will find it."""

from pathlib import Path

import pytest
import torch

from atoll.plan.own_processors import as_computed_here, has_bf16
from atoll.train import precision


def test_the_kernel_says_what_torch_says() -> None:
    assert has_bf16() == precision.has_bf16(torch.device("cpu"))


@pytest.mark.parametrize(
    ("flags", "compute"), [("fpu avx512_bf16 sse", "bf16"), ("fpu avx512f sse", "fp32")]
)
def test_auto_is_what_these_processors_compute_in(composed, tmp_path, flags, compute) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    words = ("facility=laptop", "model=llama_tiny", "data=python_stdlib")
    run = composed(*words).run
    assert as_computed_here(run, info).precision.compute == compute
    assert as_computed_here(run, tmp_path / "none").precision.compute == "fp32"
    typed = composed(*words, "precision=fp32").run
    assert as_computed_here(typed, info) == typed


def test_other_machines_and_devices_stay_as_they_are(composed, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("flags : avx512_bf16\n")
    for facility in ("testbed", "leonardo"):
        run = composed(f"facility={facility}", "model=llama_tiny", "data=python_stdlib").run
        assert as_computed_here(run, info) == run
