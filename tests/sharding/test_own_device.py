"""A facility that states devices trains on them, or says on every rank why it cannot."""

from dataclasses import replace
from pathlib import Path

import pytest
import small_run
import torch

from atoll.errors import UserError
from atoll.launch import Placement
from atoll.sharding import own_device as module
from atoll.sharding.process_group import joined
from atoll.train import train

TWO = [Placement(rank, 2, rank, 2, 0, 1, "127.0.0.1", 1, "slurm") for rank in range(2)]


def run_with(folder: Path, device: str, **image):
    small_run.write_text(folder)
    node = small_run.NODE | {"device": device}
    run = small_run.settings(folder, 2, facility__node=node)
    return run.model_copy(update={"image": run.image.model_copy(update=image)})


@pytest.fixture
def no_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize("device", ["cuda", "rocm"])
@pytest.mark.parametrize("placement", TWO)
def test_devices_that_are_asked_for_and_absent_are_refused(
    device, placement, tmp_path, no_devices, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = run_with(tmp_path, device, file=Path("/images/x.sif"), run_flags=[])
    with pytest.raises(UserError) as caught, joined(run, placement):
        pass
    found, hint = caught.value.found, caught.value.hint
    assert found.startswith(f"no {device} device is visible to rank {placement.rank} on ")
    assert "driver is not loaded" in found or "driver is loaded" in found
    assert "CUDA_VISIBLE_DEVICES=''" in found
    assert "runs with no flags" in found
    assert f"image.run_flags=[{module.VENDORS[device].run_flag}]" in hint
    assert "facility.node.device=cpu" in hint


def test_ranks_of_one_launcher_say_it_once(tmp_path, no_devices):
    run = run_with(tmp_path, "cuda")
    first, second = (replace(placement, source="fork") for placement in TWO)
    with pytest.raises(UserError, match="no cuda device is visible to rank 0"):
        module.own_device(run, first)
    with pytest.raises(SystemExit) as caught:
        module.own_device(run, second)
    assert caught.value.code == 2


def test_a_run_ends_before_anything_is_trained(tmp_path, no_devices):
    run = run_with(tmp_path, "cuda").model_copy(update={"ranks_per_node": 1})
    folder = small_run.ready(run)
    with pytest.raises(UserError, match="no cuda device is visible"):
        train.main(folder, Placement(0, 1, 0, 1, 0, 1, "127.0.0.1", 0, "local"))
    assert not (folder / "metrics.jsonl").exists()
    assert not (folder / "faults.jsonl").exists()  # a mistake, whose two lines are printed


def test_devices_of_another_vendor_are_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(UserError, match="not built for it"):
        module.own_device(run_with(tmp_path, "rocm"), TWO[0])


def test_cpu_means_cpu_where_there_are_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert module.own_device(run_with(tmp_path, "cpu"), TWO[1]) == torch.device("cpu")


def test_what_no_backend_runs_on_is_said(tmp_path):
    with pytest.raises(UserError, match=r"facility\.node\.device=xpu"):
        module.own_device(run_with(tmp_path, "xpu"), TWO[0])
