"""A short campaign under chaos, in virtual time, by the coordinator's own code."""

from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.login_node


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import campaign_chaos

    return campaign_chaos


@pytest.mark.full
def test_a_campaign_under_chaos_keeps_its_work_and_ends_the_same(
    chaos: ModuleType, tmp_path: Path
) -> None:
    first, again = (chaos.simulated(tmp_path / name, 40, 8, 3) for name in ("first", "again"))
    assert first["digests"] == again["digests"] and len(first["digests"]) == 40
    assert first["kept"] >= chaos.TARGET
    assert first["damaged in a model"] == 0 and first["honest and refused"] == 0
    assert first["met"]["slow node"] and first["met"]["bit flipped"], "no chaos was met"
