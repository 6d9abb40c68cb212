"""Nodes tried before step 1: who is compared with whom, and what a bad node leads to."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_run
import torch
from rank_pool import RankPool

from atoll import run_dir
from atoll.errors import UserError
from atoll.health import preflight as preflight_module
from atoll.health import probes
from atoll.health.faults import faults
from atoll.health.preflight import Tried, below_certificate, preflight, unfit_nodes
from atoll.health.probes import Figures, partners
from atoll.report.run import read, run_tables
from atoll.settings import Run
from atoll.sharding.process_group import SharedError, World

ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_run.write_text(tmp_path)
    return tmp_path


def tried(*tflops: float, links: tuple[float | None, ...] = (), nodes: str = "") -> list[Tried]:
    """Ranks n0, n1, … of such figures; or on the nodes that `nodes` has a letter for."""
    others = links or (None,) * len(tflops)
    return [
        Tried(f"n{nodes[n] if nodes else n}", f"cuda:{n}", Figures(each, 100.0, None, link))
        for n, (each, link) in enumerate(zip(tflops, others, strict=True))
    ]


def test_a_node_far_below_the_median_is_unfit():
    assert unfit_nodes(tried(10.0, 9.0, 8.0, 11.0), 0.7) == []
    [fault] = unfit_nodes(tried(10.0, 10.5, 4.0, 11.0), 0.7)
    assert (fault.kind, fault.blame, fault.node, fault.rank) == ("unfit", "node", "n2", 2)
    assert fault.device == "cuda:2"
    assert fault.evidence == "matrix products of 4 TFLOP/s, 0.38 of the median, 10.5"
    [fault] = unfit_nodes(tried(10.0, 4.0), 0.7)
    assert fault.node == "n1", "of two, the slower"


def test_a_node_has_one_fault_of_its_worst_figure():
    ranks = tried(10.0, 10.0, 10.0, 5.0, links=(9.0, 9.0, 9.0, 1.0))
    [fault] = unfit_nodes(ranks, 0.7)
    assert fault.evidence == "messages to other nodes of 1 GB/s, 0.11 of the median, 9"


def test_of_processors_a_node_s_best_rank_counts():
    """They are shared: one of its ranks may have had to wait for others."""
    shared = [replace(each, device="") for each in tried(10.0, 2.0, 9.0, 9.5, nodes="0011")]
    assert unfit_nodes(shared, 0.7) == []
    shared = [replace(each, device="") for each in tried(10.0, 2.0, 3.0, 2.5, nodes="0011")]
    assert [(fault.node, fault.rank) for fault in unfit_nodes(shared, 0.7)] == [("n1", 2)]


def test_the_certificate_speaks_where_there_are_no_peers():
    known = {"gemm_tflops": 20.0, "memory_gb_s": 100.0}
    alone = tried(10.0, 10.0, nodes="00")
    assert unfit_nodes(alone, 0.7) == []
    [fault] = unfit_nodes(alone, 0.7, known)
    assert fault.evidence == "matrix products of 10 TFLOP/s, 0.50 of the certificate, 20"
    assert unfit_nodes(tried(10.0, 10.0, 10.0), 0.7, known) == [], "all of them: no node's fault"
    [line] = below_certificate(tried(10.0, 10.0, 10.0), 0.7, known)
    assert line == (
        "all nodes: matrix products of 10 TFLOP/s in the median, the facility's certificate says 20"
    )


@pytest.mark.parametrize("count", range(1, 10))
def test_pairs_meet_in_the_same_round(count: int):
    rounds = list(zip(*(partners(n, count) for n in range(count)), strict=True))
    for row in rounds:
        assert all(row[other] == n for n, other in enumerate(row) if other is not None)
        assert all(other != n for n, other in enumerate(row))
    met = [{row[n] for row in rounds} - {None} for n in range(count)]
    assert all(len(others) >= min(2, count - 1) for others in met)


def on_two_nodes(world: World, run: Run, slow_node: int) -> Any:
    """Try nodes of two ranks, one of them slow at matrix products."""
    os.environ["SLURMD_NODENAME"] = f"n{world.rank // 2}"
    measured, state = probes.measured_tflops, torch.get_rng_state()

    def slowly(*args: Any) -> float:
        return measured(*args) * (0.01 if world.rank // 2 == slow_node else 1.0)

    probes.measured_tflops = slowly
    started = time.monotonic()
    try:
        record = preflight(run, run_dir.folder(run), world)
    except SharedError as error:
        return error.found, error.hint
    finally:
        probes.measured_tflops = measured
        del os.environ["SLURMD_NODENAME"]
    assert torch.equal(torch.get_rng_state(), state), "random numbers are as they were"
    return record, time.monotonic() - started


def test_a_bad_node_ends_the_job_before_its_first_step(
    ranks: RankPool, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    run = small_run.settings(folder, 2, nodes=2, preflight=True, watch={"preflight_share": 0.1})
    run_folder = small_run.ready(run)
    monkeypatch.setattr(preflight_module, "PAUSE_SECONDS", 0.0)
    answers = ranks.run(on_two_nodes, run, 1, world=4)
    assert len(set(answers)) == 1, "all ranks say the same"
    found, hint = answers[0]
    assert found.startswith("unfit before step 1: n1: matrix products of ")
    assert "preflight=false" in hint
    [fault] = faults(run_folder)
    assert (fault.kind, fault.blame, fault.node) == ("unfit", "node", "n1")


def test_good_nodes_are_written_down(ranks: RankPool, folder: Path):
    run = small_run.settings(folder, 2, nodes=2, preflight=True, watch={"preflight_share": 1e-9})
    record, seconds = ranks.run(on_two_nodes, run, -1, world=4)[0]
    for name in preflight_module.UNITS:
        assert record[name]["median"] >= record[name]["lowest"] > 0
        assert record[name]["node"] in ("n0", "n1")
    assert record["seconds"] <= round(seconds, 3) < 30


def test_a_run_s_losses_are_the_same_with_it(ranks: RankPool, folder: Path):
    losses = []
    for name, asked in (("tried", True), ("untried", False)):
        run = small_run.settings(
            folder, 1, name=name, preflight=asked, sharding=small_run.sharding("single")
        )
        run_folder = small_run.ready(run)
        ranks.run(small_run.train_here, run, world=1)
        losses.append(small_run.losses(run_folder))
        assert len(small_run.records(run_folder, "preflight")) == asked
        rows = run_tables([read(run_folder)])["Before step 1"]
        assert [row["figure"] for row in rows] == ["gemm_tflops", "memory_gb_s"] * asked
    assert losses[0] == losses[1]


def test_one_node_below_its_certificate_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = small_run.settings(
        folder,
        1,
        preflight=True,
        sharding=small_run.sharding("single"),
        folders__facilities=str(folder / "facilities"),
    )
    run_dir.write_whole(run_dir.certificate(run), json.dumps({"gemm_tflops": 1e6}))
    small_run.ready(run)
    monkeypatch.setattr(preflight_module, "PAUSE_SECONDS", 0.0)
    with pytest.raises(UserError, match=r"of the certificate, 1e\+06"):
        small_run.train_here(ALONE, run)
    assert "start: matrix products of" in capsys.readouterr().err
    assert not run_dir.result_file(run_dir.folder(run)).exists()


def test_it_is_asked_for_where_there_is_a_scheduler(folder: Path):
    def tries(scheduler: str, ranks: int, **changes: Any) -> bool:
        facility = {"name": "here", "scheduler": scheduler, "node": small_run.NODE}
        launcher = {"name": "static"}
        run = small_run.settings(folder, ranks, facility=facility, launcher=launcher, **changes)
        return run.tries_nodes

    assert tries("slurm", 2) and not tries("none", 2)
    assert not tries("slurm", 1), "a rank alone has nobody to be compared with"
    assert tries("none", 1, preflight=True) and not tries("slurm", 2, preflight=False)
