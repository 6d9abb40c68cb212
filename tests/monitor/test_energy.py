"""Joules: counters that wrap around, devices found by UUID, sums that say where they come from."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_run
import torch
from rank_pool import RankPool

from atoll import run_dir
from atoll.monitor import energy
from atoll.monitor.energy import Spent
from atoll.settings import Node, Run
from atoll.sharding.process_group import World

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NODE = Node(devices=2, device="cpu")
LIMIT = 1_000_000_000  # microjoules
NVML, RAPL = "measured: NVML", "measured: RAPL"


def domain(root: Path, name: str, title: str, microjoules: int) -> Path:
    path = root / name
    path.mkdir(parents=True)
    (path / "name").write_text(f"{title}\n")
    (path / "max_energy_range_uj").write_text(f"{LIMIT}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    return path


@pytest.fixture
def rapl(tmp_path: Path) -> Path:
    """Two packages, with what RAPL shows beside them: parts of a package, and the whole board."""
    root = tmp_path / "powercap"
    domain(root, "intel-rapl:0", "package-0", 100)
    domain(root, "intel-rapl:1", "package-1", LIMIT - 5_000_000)
    domain(root, "intel-rapl:0:0", "core", 7)
    domain(root, "intel-rapl:2", "psys", 7)
    domain(root, "intel-rapl-mmio:0", "package-0", 7)
    return root


def test_a_counter_that_wraps_around() -> None:
    assert energy.since(10, 25, 100) == 15
    assert energy.since(90, 5, 100) == 15
    assert energy.since(90, 90, 100) == 0


def test_packages_alone_are_counted_through_a_wrap_around(rapl: Path) -> None:
    assert [path.name for path in energy.packages(rapl)] == ["intel-rapl:0", "intel-rapl:1"]
    with energy.counted(NODE, CPU, first_of_node=True, rapl=rapl) as spent:
        (rapl / "intel-rapl:0" / "energy_uj").write_text("2000100")  # 2 J
        (rapl / "intel-rapl:1" / "energy_uj").write_text("1000000")  # 5 J + 1 J
        assert spent().package == (pytest.approx(8.0), RAPL)
        (rapl / "intel-rapl:1" / "energy_uj").write_text("1500000")
        assert spent().package == (pytest.approx(8.5), RAPL)
        assert spent().device is None
    assert "rapl" not in {thread.name for thread in threading.enumerate()}


def test_wraps_between_two_questions_are_seen(rapl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread reads often enough: here after each of three turns of a counter."""
    monkeypatch.setattr(energy, "SAMPLE_SECONDS", 0.001)
    read, seen = energy._microjoules, threading.Semaphore(0)

    def reading(path: Path) -> int:
        value = read(path)
        if path.name == "intel-rapl:1" and threading.current_thread().name == "rapl":
            seen.release()
        return value

    monkeypatch.setattr(energy, "_microjoules", reading)
    with energy.counted(NODE, CPU, first_of_node=True, rapl=rapl) as spent:
        for value in (0, LIMIT // 2, 0, LIMIT // 2, 0):
            (rapl / "intel-rapl:0" / "fresh").write_text(str(value))
            (rapl / "intel-rapl:0" / "fresh").rename(rapl / "intel-rapl:0" / "energy_uj")
            while seen.acquire(blocking=False):
                pass
            assert seen.acquire(timeout=10) and seen.acquire(timeout=10)
        joules, _ = spent().package or (0.0, "")
    assert joules == pytest.approx(3 * LIMIT / 1e6, rel=1e-6)


@pytest.mark.parametrize("what", ["another rank", "no counters", "not allowed"])
def test_no_figure_of_packages(rapl: Path, what: str) -> None:
    if what == "not allowed":  # root may read all files: a folder in the counter's place fails too
        (rapl / "intel-rapl:1" / "energy_uj").unlink()
        (rapl / "intel-rapl:1" / "energy_uj").mkdir()
    root = rapl / "nowhere" if what == "no counters" else rapl
    with energy.counted(NODE, CPU, what != "another rank", root) as spent:
        assert spent().package is None


def test_counters_that_fail_in_the_end_cost_their_figure_alone(rapl: Path) -> None:
    with energy.counted(NODE, CPU, first_of_node=True, rapl=rapl) as spent:
        (rapl / "intel-rapl:1" / "energy_uj").unlink()
        assert spent().package is None


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A made NVML of two devices; torch sees the second alone, as its number 0."""
    fake = SimpleNamespace(millijoules={"GPU-aa": 5_000, "GPU-bb": 70_000}, NVMLError=NVMLError)

    def handle(uuid: str) -> str:
        if uuid not in fake.millijoules:
            raise NVMLError(uuid)
        return uuid

    fake.nvmlInit = lambda: None
    fake.nvmlDeviceGetHandleByUUID = handle
    fake.nvmlDeviceGetTotalEnergyConsumption = lambda one: fake.millijoules[handle(one)]
    fake.uuid = "bb"
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=fake.uuid)
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    return fake


def test_a_device_is_asked_by_its_uuid(nvml: SimpleNamespace, tmp_path: Path) -> None:
    with energy.counted(NODE, CUDA, first_of_node=False, rapl=tmp_path) as spent:
        nvml.millijoules |= {"GPU-aa": 900_000, "GPU-bb": 73_500}
        told = spent()
    assert told.uuid == "GPU-bb"
    assert told.device == (pytest.approx(3.5), NVML)


@pytest.mark.parametrize("what", ["no such device", "no library", "fails in the end"])
def test_a_device_without_a_counter_is_estimated(
    nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    if what == "no library":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    if what == "no such device":
        nvml.uuid = "a part of a device"
    with energy.counted(NODE, CUDA, first_of_node=False, rapl=tmp_path) as spent:
        if what == "fails in the end":
            nvml.millijoules.clear()
        told = spent()
    assert told.device == (pytest.approx(400.0 * told.seconds), "estimated: 400 W x time")


def test_watts_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = Node(devices=1, device="cuda", device_watts=65)
    names = {
        "NVIDIA A100-SXM4-80GB": 400.0,
        "NVIDIA A100-PCIE-40GB": None,
        "NVIDIA H100 80GB HBM3": 700.0,
        "NVIDIA H100 PCIe": None,
        "NVIDIA GH200 120GB": None,
        "Tesla V100-SXM2-16GB": 300.0,
        "AMD Instinct MI250X": 280.0,
    }
    for name, watts in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert energy.device_watts(NODE, CUDA) == watts, name
        assert energy.device_watts(stated, CUDA) == 65.0
    assert energy.device_watts(NODE, CPU) is None


def test_totals_over_ranks() -> None:
    """Two nodes of two ranks; the ranks of the second share a device."""
    ranks = [
        Spent(10.0, "a", (100.0, NVML), (7.0, RAPL)),
        Spent(11.0, "b", (200.0, NVML), None),
        Spent(10.0, "c", (50.0, NVML), (8.0, RAPL)),
        Spent(10.0, "c", (50.0, NVML), None),
    ]
    whole = {"seconds": 11.0, "device_joules": 350.0, "device_source": NVML}
    assert energy.totals(ranks, 2) == whole | {"package_joules": 15.0, "package_source": RAPL}
    mixed = [*ranks[:3], Spent(10.0, None, (4000.0, "estimated: 400 W x time"), None)]
    assert energy.totals(mixed, 2)["device_source"] == "estimated: 400 W x time; measured: NVML"
    unknown = [*ranks[:2], Spent(10.0, None, None, None), Spent(10.0, None, None, None)]
    assert energy.totals(unknown, 2) == {}, "a sum that misses a node, or a device, is none"


def energies(run_folder: Path) -> list[dict[str, Any]]:
    return small_run.records(run_folder, "energy")


def settings(folder: Path, **changes: Any) -> Run:
    small_run.write_text(folder)
    node = {"devices": 8, "device": "cpu", "device_watts": 100.0}
    return small_run.settings(folder, 2, facility__node=node, **changes)


def test_each_start_of_a_run_records_its_own(ranks: RankPool, tmp_path: Path) -> None:
    """Stopped in time after four steps, then gone on."""
    run = settings(tmp_path)
    run_folder = small_run.ready(run)
    ranks.run(stopped_in_time, run, world=2)
    ranks.run(small_run.train_here, run, world=2)
    first, second = energies(run_folder)
    assert (first["first_step"], second["step"]) == (1, 6)
    assert 1 <= first["step"] < 6 and second["first_step"] == first["step"] + 1
    for record in (first, second):
        assert record["device_source"] == "estimated: 100 W x time"
        # the seconds are those of the rank that counted longer, the joules of both
        assert 100.0 * record["seconds"] < record["device_joules"] <= 200.0 * record["seconds"]


def stopped_in_time(world: World, run: Run) -> None:
    from atoll.train.train import train

    asked = iter([0, 0, 0, 200])
    code = train(run, run_dir.folder(run), world, lambda: next(asked, 200))
    assert code == 200


def test_packages_of_a_run_are_read_by_the_first_rank(
    ranks: RankPool, tmp_path: Path, rapl: Path
) -> None:
    run = small_run.settings(tmp_path, 2)
    small_run.write_text(tmp_path)
    run_folder = small_run.ready(run)
    ranks.run(train_beside, run, rapl, world=2)
    (record,) = energies(run_folder)
    assert record["package_joules"] == pytest.approx(3.0)
    assert record["package_source"] == RAPL
    assert record["device_joules"] is None and record["device_source"] is None


def train_beside(world: World, run: Run, rapl: Path) -> None:
    """Train where the processors use 3 J in the loop."""
    from atoll.train import loop as loop_module

    update, counted = loop_module.update, energy.counted

    def using(*args: Any) -> Any:
        if world.rank == 0:
            (rapl / "intel-rapl:0" / "energy_uj").write_text("3000100")
        return update(*args)

    def here(node: Node, device: torch.device, first_of_node: bool) -> Any:
        return counted(node, device, first_of_node, rapl)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_module, "update", using)
        patch.setattr(energy, "counted", here)
        small_run.train_here(world, run)
