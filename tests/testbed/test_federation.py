"""Campaigns of two facilities: two Slurms, each with its own user, reached over real ssh."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed import CLUSTERS
from testbed_site import HOW, ROOT, Site
from two_facilities import (
    TEXTS,
    Door,
    coordinator,
    home,
    login_node_python,
    ssh_server,
    two_facilities,
)

from atoll.campaign.coordinator import make_first_model, run
from atoll.campaign.round import go_on
from atoll.campaign.store import CampaignStore, checked_campaign
from atoll.campaign.transfer import Unreachable, ask, send
from atoll.errors import UserError

STREAMFLOW = ROOT / ".venv-streamflow" / "bin" / "streamflow"


@pytest.fixture(scope="module")
def door(site: Site) -> Iterator[Door]:
    with ssh_server(site) as door:
        yield door


@pytest.fixture(scope="module")
def host_python(site: Site) -> Path:
    return login_node_python(site)


@pytest.fixture
def federation(site: Site, door: Door, host_python: Path) -> Iterator[dict[str, Any]]:
    with two_facilities(site, door, host_python) as values:
        yield values


def jobs(values: dict[str, Any], number: int) -> list[list[str]]:
    """Ids of the jobs that each facility has queued for a round."""
    found = []
    for cluster, site in zip(CLUSTERS, values["sites"], strict=True):
        folder = home(cluster.user) / site["folder"] / "runs"
        files = list(folder.glob(f"*-round-{number:03d}-*/jobs.txt"))
        lines = [line for path in files for line in path.read_text().splitlines()]
        found.append([line.split()[1] for line in lines])
    return found


def until(ready: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(process.communicate()[0])
        time.sleep(0.2)


def manifests(values: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """What the global model of each round was made of."""
    store = CampaignStore(checked_campaign(values), Path(values["folder"]) / "islands")
    numbers = range(1, rounds + 1)
    return [json.loads((store.model(n) / "manifest.json").read_text()) for n in numbers]


def test_one_round_of_two_facilities_through_streamflow(federation: dict[str, Any]) -> None:
    if not STREAMFLOW.is_file():
        pytest.skip(HOW)
    values = federation | {"engine": "streamflow"}
    running = coordinator(values)
    output, _ = running.communicate(timeout=600)
    assert running.returncode == 0, output
    [manifest] = manifests(values, 1)
    assert set(manifest["weights"]) == set(TEXTS) and not manifest["rejected"]
    assert [len(ids) for ids in jobs(values, 1)] == [1, 1]


@pytest.mark.full
def test_two_facilities_through_streamflow(federation: dict[str, Any]) -> None:
    """Two fragments. In round 1 a job is cancelled and ranks are killed, as when memory is full.

    In round 2 the coordinator is killed when the jobs are queued; started again, it waits for them.
    """
    if not STREAMFLOW.is_file():
        pytest.skip(HOW)
    rule = federation["rule"] | {"fragments": 2}
    values = federation | {"engine": "streamflow", "rounds": 2, "rule": rule}
    first = coordinator(values)
    until(lambda: all(jobs(values, 1)), first)
    subprocess.run(["scancel", jobs(values, 1)[0][0]], check=True)
    killed = ["pkill", "-KILL", "-u", CLUSTERS[1].user, "-f", "atoll launch"]
    until(lambda: subprocess.run(killed).returncode == 0, first)
    until(lambda: all(jobs(values, 2)), first, seconds=600)
    assert [len(ids) for ids in jobs(values, 1)] == [2, 2]
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    second = coordinator(values)
    said, _ = second.communicate(timeout=600)
    assert second.returncode == 0, said
    assert [len(ids) for ids in jobs(values, 2)] == [1, 1]
    store = CampaignStore(checked_campaign(values), Path(values["folder"]) / "islands")
    for number, manifest in enumerate(manifests(values, 2), 1):
        assert set(manifest["weights"]) == set(TEXTS) and not manifest["rejected"]
        # it travels alone, and each fragment has a length of its own
        assert list(manifest["norms_before"])[-1] == str((number - 1) % 2)
    workflow = (store.folder / "streamflow" / "round.cwl").read_text()
    assert "run: train_east.cwl" in workflow and "cwlVersion: v1.2" in workflow


@pytest.mark.matrix
def test_a_facility_behind_a_closed_door_is_left_out(federation: dict[str, Any]) -> None:
    """By the engine without a workflow system, and the other one's update is enough."""
    values = federation | {"rule": federation["rule"] | {"quorum": 1}}
    values["sites"][0]["host"] = "nobody-like-this@127.0.0.1"
    store = CampaignStore(checked_campaign(values), Path(values["folder"]) / "islands")
    make_first_model(store)
    while "east" in [site.name for site in store.unsettled(1)]:
        for site in store.unsettled(1):
            go_on(store, 1, site)
        time.sleep(store.campaign.poll_seconds)
    over = store.campaign.model_copy(update={"deadline_minutes": 0.001})
    assert run(CampaignStore(over, store.folder)) == 0
    assert "Permission denied" in store.left_out(1)["testbed"]
    manifest = json.loads((store.model(1) / "manifest.json").read_text())
    assert list(manifest["weights"]) == ["east"]


def test_neither_cluster_believes_the_other(site: Site) -> None:
    """Their munge keys differ, and a user of one is nobody at the other."""
    ours = subprocess.run(["munge", "--no-input"], capture_output=True, check=True).stdout
    socket_file = f"--socket={CLUSTERS[1].munge_socket}"
    theirs = subprocess.run(["unmunge", socket_file], input=ours, capture_output=True)
    assert b"Invalid credential" in theirs.stderr
    srun = ["runuser", "-u", CLUSTERS[1].user, "--", "srun", "--account=island", "true"]
    done = subprocess.run(srun, capture_output=True, text=True, cwd="/")
    assert done.returncode != 0 and "Invalid account" in done.stderr


CUT = """\
import os, select, socket, sys
line, left = socket.create_connection((sys.argv[1], int(sys.argv[2]))), int(sys.argv[3])
while left > 0:
    for ready in select.select([0, line], [], [])[0]:
        content = os.read(0, 65536) if ready == 0 else line.recv(65536)
        if not content:
            sys.exit()
        (line.sendall if ready == 0 else lambda x: os.write(1, x))(content)
        left -= len(content)
"""


def test_a_line_that_is_cut_leaves_nothing_half_and_goes_on(
    door: Door, federation: dict[str, Any], tmp_path: Path
) -> None:
    """The line ends after 8 of 12 MiB; the second transfer goes on from there."""
    (tmp_path / "cut.py").write_text(CUT)
    (tmp_path / "model").mkdir()
    content = os.urandom(12 << 20)
    (tmp_path / "model" / "master.safetensors").write_bytes(content)
    cut = f"ProxyCommand={sys.executable} {tmp_path}/cut.py %h %p {8 << 20}"
    whole = checked_campaign(federation)
    site, place = whole.sites[0], f"{whole.sites[0].folder}/incoming"
    arrived = home(CLUSTERS[0].user) / place
    broken = whole.model_copy(update={"ssh_options": [*door.options, "-o", cut]})
    with pytest.raises(Unreachable, match="testbed: rsync stopped"):
        send(broken, site, tmp_path / "model", place)
    deadline = time.monotonic() + 30  # until the other end has noticed, and put away what it has
    while not (half := arrived / ".rsync-partial" / "master.safetensors").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not (arrived / "master.safetensors").exists()
    assert 1 << 20 < half.stat().st_size < 12 << 20
    less = f"ProxyCommand={sys.executable} {tmp_path}/cut.py %h %p {9 << 20}"
    resumed = whole.model_copy(update={"ssh_options": [*door.options, "-o", less]})
    send(resumed, site, tmp_path / "model", place)
    assert (arrived / "master.safetensors").read_bytes() == content


def test_an_unknown_host_key_is_refused(
    door: Door, federation: dict[str, Any], tmp_path: Path
) -> None:
    empty = tmp_path / "known_hosts"
    empty.touch()
    stranger = door._replace(known_hosts=empty)
    campaign = checked_campaign(federation | {"ssh_options": stranger.options})
    with pytest.raises(UserError, match="testbed refuses ssh: Host key verification") as error:
        ask(campaign, campaign.sites[0], ["status", "x"])
    assert not isinstance(error.value, Unreachable)


def test_what_a_command_there_refuses_is_told_here(federation: dict[str, Any]) -> None:
    campaign = checked_campaign(federation)
    with pytest.raises(UserError, match="testbed: no run at nothing"):
        ask(campaign, campaign.sites[0], ["status", "nothing"])
