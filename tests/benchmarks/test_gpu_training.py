"""The plan of the GPU benchmark: no side is dropped, repeats are, and ours is timed as it says."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SIDES = ("ours", "hf_plain", "torchtitan")
CARD = {"name": "a card", "peak_tflops": 1.0, "gemm_tflops": 0.5}


@pytest.fixture
def gpu_training(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpu_training

    return gpu_training


def taken(
    module: Any, monkeypatch: pytest.MonkeyPatch, minutes: float, card: dict[str, Any] = CARD
) -> tuple[list[str], Any]:
    """Sides in the order of their turns, each of which seems to take a minute, and the rows."""
    order: list[str] = []
    now = [0.0]

    def trained(place: Any, case: Any, side: str, limit_seconds: float) -> dict[str, Any]:
        order.append(side)
        now[0] += 60.0
        if side == "torchtitan":
            return {"failed": "does not import: No module named 'torchtitan'"}
        return {"tokens_per_second": 150.0 if side == "ours" else 100.0, "memory_gib": 1.0}

    monkeypatch.setattr(module, "trained", trained)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    place = module.Place(Path("/nowhere"), True, True)
    bench = module.Bench(module.DRY_CASES, place, 60.0 * minutes)
    return order, module.measured(bench, SIDES, card)


def test_turns_go_there_and_back(gpu_training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order, rows = taken(gpu_training, monkeypatch, 9.0)
    assert order == ["ours", "hf_plain", "torchtitan", "hf_plain", "ours"]
    compared = [row for row in rows if row["unit"] == "tokens/s"]
    assert [(row["peer"], row["ours"], row["peers"]) for row in compared] == [
        ("hf_plain", 150.0, 100.0)
    ]


def test_only_repeats_are_dropped(
    gpu_training: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order, _ = taken(gpu_training, monkeypatch, 3.0)
    assert order == ["ours", "hf_plain", "torchtitan"]
    said = capsys.readouterr().out
    assert "no time for a second turn of: tiny hf_plain, tiny ours" in said
    assert "torchtitan: does not import" in said


def test_a_card_of_unknown_peak_has_rates_and_no_mfu(
    gpu_training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = CARD | {"peak_tflops": None, "peak_source": "the peak of a card is not known"}
    assert "the peak of a card is not known, its" in gpu_training.described(unknown)
    _, rows = taken(gpu_training, monkeypatch, 9.0, unknown)
    assert [row["unit"] for row in rows] == ["tokens/s"]
    assert not {"mfu", "peer_mfu"} & set(rows[0])


def test_the_warm_up_is_left_out(gpu_training: Any) -> None:
    case = gpu_training.DRY_CASES["tiny"]
    records = [
        {"step": step, "tokens": 128 * step, "time": at, "memory_gib": 2.0}
        for step, at in [(1, 50.0), (2, 51.0), (3, 52.0)]
    ]
    found = sys.modules["gpu_processes"].rate_of(case, records)
    assert found == {"tokens_per_second": 128.0, "memory_gib": 2.0}


def test_our_trainer_reads_what_every_side_is_given(gpu_training: Any, tmp_path: Path) -> None:
    """In the format of today: what has more fields since, or other ones, is refused here."""
    cases, case = sys.modules["gpu_cases"], gpu_training.DRY_CASES["tiny"]
    cases.written(case, tmp_path, on_gpu=False, compiled=False)
    from gpu_turn import Turn, samples_of

    from atoll.settings import load_run

    run = load_run(tmp_path / "run.yaml")
    turn = Turn(
        run, tmp_path, case.warmup_steps, case.timed_steps, torch.device("cpu"), torch.float32
    )
    rows = samples_of(turn)
    assert [len(row) for row in rows] == [case.tokens] * case.microbatch * case.steps


@pytest.mark.matrix
def test_a_dry_run_trains_with_ours() -> None:
    argv = [sys.executable, FOLDER / "gpu_training.py", "--dry-run", "--sides", "ours", "--check"]
    shown = subprocess.run(argv, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "tiny, MFU: ours" in shown.stdout
