"""What a machine does in a second: measured by ranks, kept beside what a doctor's job wrote."""

import json
from pathlib import Path

import pytest
import small_run
import torch
from composing import composed, here, tree
from rank_pool import RankPool

from atoll import run_dir
from atoll.cluster import plan
from atoll.config import certificate
from atoll.monitor import rate_probe
from atoll.monitor.bandwidth import Speed
from atoll.sharding.process_group import World

__all__ = ["composed", "here", "tree"]


def quickly(world: World) -> dict:
    rate_probe.SECONDS_EACH = 0.0
    rate_probe.WIDTHS = {"cpu": (16, 32)}
    rate_probe.TOKENS, rate_probe.OPTIMIZED = {"cpu": 32}, {"cpu": 1024}
    rate_probe.MESSAGES_BYTES = {"cpu": (2**10, 2**12)}
    return rate_probe.measured(world)


@pytest.fixture(scope="module")
def rates(ranks: RankPool) -> dict:
    first, second = ranks.run(quickly, world=2)
    assert first.keys() == second.keys()
    return dict(first)


def test_every_rate_is_positive_alone_and_together(rates: dict) -> None:
    assert rates["ranks"] == 2 and rates["device"] == "cpu"
    assert rates["alone"].keys() == rates["together"].keys()
    for own in (rates["alone"], rates["together"], *rates["collectives"].values()):
        for rate in own.values():
            assert all(each > 0 for each in (rate.values() if isinstance(rate, dict) else [rate]))
    assert rates["collectives"].keys() == {"all_reduce", "all_gather", "reduce_scatter"}


def test_what_else_a_machine_does_is_in_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first measurement of each message meets a machine that is busy."""
    small, large = rate_probe.MESSAGES_BYTES["cpu"]
    seen = set()

    def timed(world: World, name: str, size: int) -> Speed:
        busy = (name, size) not in seen
        seen.add((name, size))
        return Speed(name, size, (0.05 if busy else 0.0) + 1e-4 + size / 1e9, 0.0, 0.0)

    monkeypatch.setattr(rate_probe, "timed", timed)
    links = rate_probe.links(World(0, 2, torch.device("cpu")))
    assert links["all_gather"]["latency_us"] == pytest.approx(1e6 * (1e-4 + small / 1e9))
    assert links["all_gather"]["gb_s"] == pytest.approx(0.5 * large / (large - small))


def test_a_call_takes_what_a_quarter_of_its_repeats_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.1, 0.09, 0.01, 0.05, 0.06])
    monkeypatch.setattr(rate_probe, "SECONDS_EACH", 0.2)
    monkeypatch.setattr(rate_probe, "seconds_of", lambda device, call: next(seconds))
    # behind a first call, until they add up to 0.2 s: the second quickest of four
    assert rate_probe.quick_seconds(torch.device("cpu"), lambda: None) == 0.05
    monkeypatch.setattr(rate_probe, "seconds_of", lambda device, call: 0.3)
    assert rate_probe.quick_seconds(torch.device("cpu"), lambda: None) == 0.3


def test_an_optimizer_that_fails_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def fails(self: object, closure: object = None) -> None:
        raise RuntimeError("no backend for this device")

    monkeypatch.setattr(rate_probe, "OPTIMIZED", {"cpu": 64})
    monkeypatch.setattr(bitsandbytes.optim.AdamW8bit, "step", fails)
    assert set(rate_probe.optimizers_gb_s(torch.device("cpu"))) == {"optimizer_gb_s"}


def test_no_share_of_the_logits_is_denormal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some processors multiply denormal numbers slowly, and no model has any."""
    least = []

    def loss(hidden: torch.Tensor, head: torch.Tensor, *rest: object) -> None:
        least.append(float((hidden @ head.T).softmax(-1).detach().min()))

    monkeypatch.setattr(rate_probe, "chunked_cross_entropy", loss)
    rate_probe.logits_gb_s(torch.device("cpu"), 1.0)
    assert min(least) > torch.finfo(torch.float32).tiny


def test_a_certificate_keeps_what_the_other_command_wrote(tmp_path: Path, rates: dict) -> None:
    run = small_run.settings(tmp_path, 2, folders__facilities=str(tmp_path / "facilities"))
    run_dir.add_to_certificate(run, {"rates": {"device": "cpu"}})
    run_dir.add_to_certificate(run, {"gemm_tflops": 0.1, "measured_on": "2026-11-24"})
    run_dir.add_to_certificate(run, {"rates": rates})
    written = json.loads(run_dir.certificate(run).read_text())
    assert (written["gemm_tflops"], written["measured_on"]) == (0.1, "2026-11-24")
    assert certificate.rates(run) == json.loads(json.dumps(rates))
    assert "rates by atoll plan --measure" in certificate.origin(run)


def test_links_that_a_doctors_job_measured_between_devices_are_rates(tmp_path: Path) -> None:
    run = small_run.settings(tmp_path, 2, folders__facilities=str(tmp_path / "facilities"))
    figures = {"bandwidth_in_node_gb_s": 200.0, "bandwidth_between_nodes_gb_s": None}
    run_dir.add_to_certificate(run, figures | {"device": "cpu", "measured_on": "2026-11-25"})
    assert certificate.rates(run) is None  # processors share their cores with messages
    run_dir.add_to_certificate(run, {"device": "NVIDIA H100 80GB HBM3"})
    assert certificate.rates(run) == {"links": {"bandwidth_in_node_gb_s": 200.0}}


def test_plan_reads_the_rates(here: Path, rates: dict, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["facility=laptop", "model=llama_tiny"]
    assert plan.main(words) == 0
    assert "time: unknown" in capsys.readouterr().out
    measured = {"facility": "laptop", "measured_on": "2026-11-24", "rates": rates}
    run_dir.write_whole(here / "facilities" / "laptop.json", json.dumps(measured))
    assert plan.main(words) == 0
    assert "at the measured rates" in capsys.readouterr().out
