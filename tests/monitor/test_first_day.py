"""The first-day certificate: measured on ranks here, read by whoever composes, plans or asks."""

import json
import re
from dataclasses import fields, replace
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import small_run
import torch
from composing import composed, here, tree
from rank_pool import RankPool

from atoll import run_dir
from atoll.cluster import doctor, plan
from atoll.cluster.facility_checks import OK, WRONG, measured
from atoll.config import certificate, compose
from atoll.errors import UserError
from atoll.launch import Placement
from atoll.monitor import first_day
from atoll.settings import Run
from atoll.sharding.process_group import World

__all__ = ["composed", "here", "tree"]


def on_two_nodes(world: World, run: Run, folder: Path) -> dict:
    placement = Placement(world.rank, 4, world.rank % 2, 2, world.rank // 2, 2, "n1", 1, "slurm")
    return first_day.certificate(run, folder, world, placement, ["gloo over TCP"], [])


def test_four_ranks_on_two_nodes_measure(ranks: RankPool, tmp_path: Path):
    small_run.write_text(tmp_path)
    run = small_run.settings(tmp_path, 2, nodes=2, facility__account="secret-account")
    found = ranks.run(on_two_nodes, run, tmp_path, world=4)
    assert found[0] == found[3]
    one = found[0]
    assert set(one) == {field.name for field in fields(first_day.Certificate)}
    assert one["measured_on"] == datetime.now(timezone.utc).date().isoformat()
    for rate in ("gemm_tflops", "bandwidth_in_node_gb_s", "bandwidth_between_nodes_gb_s"):
        assert one[rate] > 0, rate
    assert one["file_write_gb_s"] > 0
    assert (one["nodes"], one["ranks_per_node"], one["device"]) == (2, 2, "cpu")
    assert "secret-account" not in json.dumps(one)
    assert not list(tmp_path.glob("*.partial"))


def counted(world: World, local: int, visible: int, stated: int) -> int | None:
    """What ranks say of a node's devices where each is shown `visible` of them."""
    node, on_device = world.rank // local, replace(world, device=torch.device("cuda", 0))
    placement = Placement(
        world.rank, world.size, world.rank % local, local, node, world.size // local, "n1", 1, "x"
    )
    own = SimpleNamespace(uuid=f"GPU-{world.rank % local}")
    with (
        mock.patch.object(torch.cuda, "device_count", lambda: visible),
        mock.patch.object(torch.cuda, "get_device_properties", lambda _: own),
    ):
        return first_day.devices_of_a_node(on_device, placement, stated)


@pytest.mark.parametrize(
    ("local", "visible", "stated", "devices"),
    [
        (4, 1, 4, 4),  # each rank is shown its own
        (2, 1, 2, 2),
        (4, 4, 4, 4),
        (2, 1, 4, None),  # half of the node was asked for
        (2, 4, 4, 4),
        (2, 4, 2, 4),
        (4, 1, 3, 4),
    ],
)
def test_the_ranks_of_a_node_count_its_devices_together(
    ranks: RankPool, local: int, visible: int, stated: int, devices: int | None
) -> None:
    assert ranks.run(counted, local, visible, stated, world=4) == [devices] * 4


LINE = ("facility=generic_slurm", "facility.account=x", "facility.node.compute_capability=8.0")


@pytest.fixture
def certified(composed, here):
    """The run, with a certificate of its facility beside it."""

    def write(**changes) -> Run:
        run = composed(*LINE).run
        one = {"facility": "generic_slurm", "measured_on": "2026-11-20", "gemm_tflops": 250.5}
        one |= {"bandwidth_between_nodes_gb_s": 88.1, "bandwidth_in_node_gb_s": None} | changes
        run_dir.write_whole(run_dir.certificate(run), json.dumps(one))
        return run

    return write


def test_where_figures_come_from(composed, certified):
    assert (
        certificate.origin(composed("facility=leonardo").run) == "as documented, read on 2026-11-22"
    )
    line = certificate.origin(certified())
    assert line == "measured on 2026-11-20: 250.5 TFLOP/s a device, 88.1 GB/s between nodes"


def test_compose_plan_and_doctor_say_so(certified, capsys):
    run = certified()
    assert compose.main([*LINE]) == 0
    assert capsys.readouterr().out.startswith("# generic_slurm: measured on 2026-11-20: 250.5")
    assert "measured on 2026-11-20" in plan.head(run, compose.known_shape(run))
    [finding] = measured(run, {})
    assert (finding.state, finding.found[:11]) == (OK, "measured on")


def test_a_contradiction_is_wrong(certified):
    run = certified(compute_capability="7.0", devices=1)
    [_, finding] = measured(run, {})
    assert finding.state == WRONG
    assert finding.found == "facility.node.compute_capability: stated 8.0, measured 7.0"


def test_devices_that_were_not_counted_contradict_nothing(certified):
    run = certified(devices=None)
    assert [finding.state for finding in measured(run, {})] == [OK]


def test_what_is_no_certificate_is_refused(certified):
    run = certified(facility="other")
    with pytest.raises(UserError, match=re.escape("is no certificate of generic_slurm")):
        certificate.origin(run)


@pytest.mark.login_node
def test_the_doctor_s_job_may_write_it_and_git_ignores_it(composed):
    run = doctor.as_probe(composed(*LINE, "folders.facilities=/scratch/facilities")).run
    assert run.facility.binds == ["/scratch/facilities"]
    ignored = (Path(__file__).parents[2] / ".gitignore").read_text().splitlines()
    assert "/facilities/" in ignored


def test_the_doctor_s_job_may_write_it_behind_a_link_of_the_home_folder(
    composed, tmp_path, monkeypatch
):
    """A container has the home folder, link and all, before its binds."""
    (tmp_path / "lustre" / "facilities").mkdir(parents=True)
    (tmp_path / "scratch").symlink_to("lustre")
    monkeypatch.setenv("HOME", str(tmp_path))
    run = doctor.as_probe(composed(*LINE, "folders.facilities='~/scratch/facilities'")).run
    real = f"{tmp_path}/lustre/facilities"
    assert run.facility.binds == [real, f"{real}:{tmp_path}/scratch/facilities"]
