"""The inside half of `atoll doctor`: what ranks see, how fast they talk, what is wrong with it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import small_run
from rank_pool import RankPool

from atoll.monitor import bandwidth
from atoll.monitor import node_probe as probe
from atoll.settings import Facility
from atoll.sharding.process_group import World


def seen(world: World, facility: Facility) -> probe.Report:
    return probe.report(world, facility)


def speeds(world: World) -> list[bandwidth.Speed]:
    return bandwidth.measure(world)


@pytest.fixture
def facility(tmp_path: Path) -> Facility:
    return small_run.settings(tmp_path, 2).facility


@pytest.fixture
def report() -> probe.Report:
    return probe.Report(
        rank=0,
        host="n1",
        visible_devices=1,
        device="H200",
        device_id="GPU-1",
        cores=[0, 1, 2, 5],
        torch="2.13.0",
        runtime="CUDA 13.0",
        missing_interfaces=[],
    )


def test_every_rank_reports(ranks: RankPool, facility: Facility) -> None:
    reports = ranks.run(seen, facility, world=2)
    assert [one.rank for one in reports] == [0, 1]
    assert all(one.cores and one.runtime == "processor" for one in reports)
    assert probe.faults(reports, ["gloo over TCP"], facility) == []


def test_each_collective_has_a_row_for_each_size(ranks: RankPool) -> None:
    [rows, _] = ranks.run(speeds, world=2)
    assert {one.collective for one in rows} == set(bandwidth.COLLECTIVES)
    sizes = [one.size_bytes for one in rows if one.collective == "all_reduce"]
    assert sizes[:3] == bandwidth.SIZES_BYTES["cpu"][:3]
    for one in rows:
        rate = one.size_bytes / one.seconds / 1e9
        assert one.algorithm_gb_s == pytest.approx(rate)
        assert one.bus_gb_s == pytest.approx(rate * (1 if one.collective == "all_reduce" else 0.5))


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert bandwidth.bus_factor("all_reduce", 4) == 1.5
    assert bandwidth.bus_factor("all_gather", 4) == 0.75


def test_two_ranks_on_one_device_are_told(report: probe.Report, facility: Facility) -> None:
    with_gpus = facility.model_copy(
        update={"node": facility.node.model_copy(update={"device": "cuda"})}
    )
    pair = [report, replace(report, rank=1)]
    [(found, _)] = probe.faults(pair, [], with_gpus)
    assert found == "ranks 0 and 1 share a device of n1"
    assert probe.faults([report, replace(report, rank=1, host="n2")], [], with_gpus) == []
    [(found, _)] = probe.faults([replace(report, device_id="")], [], with_gpus)
    assert found == "no device is visible on n1"


def test_interfaces_that_are_not_there(facility: Facility, tmp_path: Path) -> None:
    for name in ("lo", "hsn0", "hsn1"):
        (tmp_path / "net" / name).mkdir(parents=True)
    for words, missing in (("hsn", []), ("ib0,hsn0", ["ib0"]), ("^docker", []), ("=lo", [])):
        named = facility.model_copy(update={"environment": {"NCCL_SOCKET_IFNAME": words}})
        assert probe.missing_interfaces(named, tmp_path / "net") == missing


def test_a_network_that_nccl_did_not_use(report: probe.Report, facility: Facility) -> None:
    lines = "n1:1:1 [0] NCCL INFO Using network Socket\nn1:1:1 [0] NCCL INFO other\n"
    assert probe.transports_in(lines) == ["network Socket"]
    named = facility.model_copy(update={"environment": {"NCCL_NET": "AWS Libfabric"}})
    [(found, hint)] = probe.faults([report], ["network Socket"], named)
    assert found == "NCCL fell back to TCP, though NCCL_NET is set"
    assert "facility.binds" in hint


def test_what_was_found_is_text_and_json(report: probe.Report) -> None:
    speed = bandwidth.Speed("all_reduce", 1024, 0.001, 0.001, 0.0015)
    text = probe.as_text([report], ["network IB"], [speed], [("too slow", "fix it")])
    assert "rank 0: n1, H200, 1 devices visible, cores 0-2,5, torch 2.13.0, CUDA 13.0" in text
    assert "all_reduce             1,024 B" in text
    assert text.endswith("wrong: too slow\n       fix it")
    assert json.dumps(report.cores) == "[0, 1, 2, 5]"
