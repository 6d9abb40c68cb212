"""How much of this machine's disk, and of a round's time, one facility can take."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_hostile_facilities import READY, made, say, saying, short_samples, store_of

from atoll.campaign import round as round_
from atoll.campaign import streamflow, transfer
from atoll.campaign.asking import collect_here
from atoll.campaign.calls import Over
from atoll.campaign.lasting_settings import keep_settings
from atoll.campaign.round import keep_only
from atoll.campaign.store import CampaignStore
from atoll.campaign.transfer import PARTS, Unreachable, fetch
from atoll.errors import UserError

__all__ = ["short_samples"]

# the facility's side: rsync's own server, of a file that grows when its length has been told
GROWING = """\
import os, subprocess, sys, threading, time
os.set_blocking(0, True)
os.set_blocking(1, True)
server = sys.argv[sys.argv.index("rsync") :]
process = subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

def forward():
    while piece := os.read(0, 1 << 16):
        time.sleep(0.3)
        process.stdin.write(piece)
        process.stdin.flush()
    process.stdin.close()

threading.Thread(target=forward, daemon=True).start()
seen = b""
while piece := os.read(process.stdout.fileno(), 1 << 16):
    seen = (seen + piece)[-1 << 16 :]
    if b"delta-0" in seen and os.path.exists(GROWN):
        os.replace(GROWN, FILE)
    while piece:
        piece = piece[os.write(1, piece) :]
sys.exit(process.wait())
"""


@pytest.mark.login_node
def test_a_file_that_grows_while_it_comes_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, programs = tmp_path / "update", tmp_path / "bin"
    source.mkdir(), programs.mkdir()
    file = source / "delta-0.safetensors"
    file.write_bytes(bytes(1000))
    grown = tmp_path / "grown"
    with open(grown, "wb") as content:
        content.truncate(50_000_000)
    (programs / "far.py").write_text(f"FILE, GROWN = {str(file)!r}, {str(grown)!r}\n{GROWING}")
    monkeypatch.setattr(transfer, "ssh", lambda _: [sys.executable, str(programs / "far.py")])
    store = store_of(tmp_path)
    far = store.campaign.sites[0].model_copy(update={"host": "far"})
    with pytest.raises(UserError, match="rsync stopped") as error:
        fetch(store.campaign, far, str(source), tmp_path / "here", [file.name], 1000)
    assert not isinstance(error.value, Unreachable), "it is counted"
    assert "File too large" in error.value.found, error.value
    came = [path.stat().st_size for path in (tmp_path / "here").rglob("*") if path.is_file()]
    assert file.stat().st_size == 50_000_000 and max(came, default=0) <= transfer.LEAST_LIMIT_BYTES


def test_parts_of_other_updates_do_not_stay(tmp_path: Path) -> None:
    """A facility that cuts each transfer, and names other files in each, would fill the disk."""
    for name in ("delta-1.safetensors", "delta-2.safetensors"):
        (tmp_path / PARTS).mkdir(exist_ok=True)
        (tmp_path / PARTS / name).touch()
    (tmp_path / PARTS / "folder").mkdir()
    keep_only(tmp_path, {"delta-2.safetensors"})
    assert [path.name for path in (tmp_path / PARTS).iterdir()] == ["delta-2.safetensors"]


@pytest.mark.login_node
def test_the_grace_is_had_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers when the grace is nearly over; then its files do not come."""
    deadline, grace = 0.5, 6.0
    store = store_of(tmp_path, deadline_minutes=deadline / 60, grace_minutes=grace / 60)
    alive = "for n in 1 2 3 4 5; do echo >&2; sleep 1; done\n"
    no = say('{"state": "failed", "why": "x"}')
    store = saying(store, tmp_path, north=alive + say(READY), south=no)
    waited: list[float] = []

    def never_comes(*words: Any) -> None:
        over: Over = words[-1]
        began = time.monotonic()
        while not over(0.0) and time.monotonic() - began < 20:
            time.sleep(0.05)
        waited.append(time.monotonic() - began)
        raise Unreachable("nothing came", "wait")

    monkeypatch.setattr(round_, "fetch", never_comes)
    collect_here(store, 1)
    assert len(waited) == 1 and waited[0] < grace / 2


def test_what_a_facility_says_while_it_works_is_short(tmp_path: Path) -> None:
    """A column more at each question would fill its journal."""
    store, kept = store_of(tmp_path), {"training": 3.0}
    [north, _] = store.campaign.sites
    for number in range(5):
        words = {f"{number}{'x' * 60}": 1.0}
        store.record_answer(1, north, {"state": "running", "node_seconds": words})
    assert len(store.journal(1).records("answered")) == 1
    store.record_answer(1, north, {"state": "ready", "node_seconds": kept})
    assert store.state(1, north).answer["node_seconds"] == kept


def run_of(store: CampaignStore, monkeypatch: pytest.MonkeyPatch, failing: set[str]) -> list[Any]:
    """A StreamFlow that ends badly where one of these facilities is in the workflow."""
    runs: list[list[str]] = []

    def carried_out(program: str, folder: Path, number: int, *times: float) -> int:
        names = [key.removeprefix("facility_") for key in written[-1] if key.startswith("facility")]
        runs.append(names)
        return int(bool(failing & set(names)))

    written: list[dict[str, Any]] = []
    monkeypatch.setattr(streamflow, "found_program", lambda: "streamflow")
    monkeypatch.setattr(streamflow, "carry_out", carried_out)
    inputs = streamflow._inputs

    def noted(*words: Any, **more: Any) -> dict[str, Any]:
        written.append(inputs(*words, **more))
        return written[-1]

    monkeypatch.setattr(streamflow, "_inputs", noted)
    return runs


def test_a_workflow_that_fails_is_counted_to_whoever_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path, deadline_minutes=5, poll_seconds=0.01, engine="streamflow")
    keep_settings(store)
    runs, (north, south) = run_of(store, monkeypatch, {"north"}), store.campaign.sites
    monkeypatch.setattr(
        streamflow.time, "sleep", lambda _: store.leave_out(1, south, "it is at work")
    )
    streamflow.collect(store, 1)
    assert runs[:3] == [["north", "south"], ["north"], ["south"]]
    assert store.state(1, south).failures == 0
    assert store.state(1, north).failures == 2, "once alone after each run that failed"


@pytest.mark.login_node
def test_a_workflow_that_fails_for_want_of_room_here_is_counted_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path, deadline_minutes=5, poll_seconds=0.01, engine="streamflow")
    keep_settings(store)
    run_of(store, monkeypatch, {"north"})
    (store.folder / "streamflow").mkdir()
    (store.folder / "streamflow" / ".room").symlink_to("/dev/full")
    with pytest.raises(transfer.NoRoom, match="No space left on device"):
        streamflow.collect(store, 1)
    assert all(store.state(1, site).failures == 0 for site in store.campaign.sites)


@pytest.mark.login_node
def test_what_is_ready_when_the_time_is_over_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workflow that one facility kept waiting has not asked the others since."""
    # over before anybody has answered: else whoever fails alone is found first
    store = store_of(tmp_path, deadline_minutes=1e-6, train=["data.sequence_tokens=16"])
    made(tmp_path, "north")
    store = saying(store, tmp_path, north=say(READY), south="exit 3")
    keep_settings(store)
    run_of(store, monkeypatch, {"north", "south"})
    streamflow.collect(store, 1)
    assert [path.parent.name for path in store.updates(1)] == ["north"]
    assert set(store.left_out(1)) == {"south"}


def test_a_workflow_and_what_follows_it_have_the_grace_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path, deadline_minutes=0.001, grace_minutes=10, engine="streamflow")
    store = saying(store, tmp_path, north="exit 3", south="exit 3")
    keep_settings(store)
    monkeypatch.setattr(streamflow, "COLLECT_SECONDS", 1.0)
    ends: list[float] = []

    def asked(store: CampaignStore, number: int, end: float) -> None:
        ends.append(end)
        for site in store.campaign.sites:
            store.leave_out(1, site, "late")

    def carried_out(*_: Any) -> int:
        now = time.time()
        monkeypatch.setattr(streamflow.time, "time", lambda: now + 590.0)  # the grace, nearly
        return 1

    monkeypatch.setattr(streamflow, "found_program", lambda: "streamflow")
    monkeypatch.setattr(streamflow, "carry_out", carried_out)
    monkeypatch.setattr(streamflow, "_find_failing", lambda *_: None)
    monkeypatch.setattr(streamflow, "collect_here", asked)
    began = time.time()
    streamflow.collect(store, 1)
    assert len(ends) == 1 and ends[0] < began + 10 * 60 + 100.0


def test_no_file_of_a_facility_comes_through_a_workflow(tmp_path: Path) -> None:
    """StreamFlow unpacks whatever is sent in its place, over any file of this machine's user."""
    store = store_of(tmp_path, engine="streamflow")
    keep_settings(store)
    streamflow.write(store, 1, {"north": None, "south": None}, everyone=True)
    folder = store.folder / "streamflow"
    written = {path.name: path.read_text() for path in folder.glob("*.cwl")}
    assert len(written) == 6 and not [name for name, text in written.items() if "File" in text]
    train = streamflow.yaml.safe_load(written["train_north.cwl"])
    assert train["outputs"]["done"]["type"] == "int"


@pytest.mark.login_node
def test_a_step_that_hangs_at_a_facility_is_ended_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words as they are run there, by a program that never ends."""
    monkeypatch.setattr(streamflow, "LATE_SECONDS", 1.0)
    store = saying(store_of(tmp_path), tmp_path, north="exec sleep 60")
    [north] = store.campaign.sites
    words = streamflow._step_there(north, tmp_path, wait_seconds=0.0)["baseCommand"]
    began = time.monotonic()
    assert (
        subprocess.run(words).returncode in streamflow._step_there(north, None, 0)["successCodes"]
    )
    assert time.monotonic() - began < 20


@pytest.mark.login_node
@pytest.mark.parametrize("step", ["true", "sh -c 'sleep 6; true' x round"])
def test_a_workflow_that_waits_for_nothing_here_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """But not while a model or an update is on its way."""
    program = tmp_path / "streamflow"
    program.write_text(f"#!/bin/sh\n{step} &\nsleep 60\n")
    program.chmod(0o755)
    began = time.time()
    monkeypatch.setattr(streamflow, "LOOK_SECONDS", 0.2)
    code = streamflow.carry_out(str(program), tmp_path, 1, began + 100, began + 1)
    took = time.time() - began
    assert code == 1 and took < 40 and (took > 6) is ("round" in step)


@pytest.mark.login_node
@pytest.mark.parametrize(("step", "code"), [("true", 1), ("sh -c 'sleep 60; true' x round", 0)])
def test_what_is_on_its_way_when_a_workflow_is_ended_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int
) -> None:
    """A large model takes longer than the time that one has alone, after another's failure."""
    program = tmp_path / "streamflow"
    program.write_text(f"#!/bin/sh\n{step} &\nsleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(streamflow, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(streamflow, "COLLECT_SECONDS", 1.0)
    assert streamflow.carry_out(str(program), tmp_path, 1, time.time() + 1) == code


def test_no_exit_code_of_a_facility_ends_a_workflow(tmp_path: Path) -> None:
    store = saying(store_of(tmp_path, engine="streamflow"), tmp_path, north="exit 3")
    keep_settings(store)
    streamflow.write(store, 1, {"north": None, "south": None}, everyone=True)
    folder = store.folder / "streamflow"
    train = streamflow.yaml.safe_load((folder / "train_north.cwl").read_text())
    assert train["successCodes"] == list(range(256))
    assert "successCodes" not in streamflow.yaml.safe_load((folder / "take.cwl").read_text())
    assert round_.main([str(store.folder), "1", "take", "north"]) == 0
    assert store.state(1, store.site("north")).failures == 1


def test_a_model_that_cannot_be_sent_ends_no_workflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = saying(store_of(tmp_path), tmp_path, north="echo 'atoll: no room' >&2; exit 2")
    keep_settings(store)
    assert round_.main([str(store.folder), "1", "send", "north"]) == 0
    assert store.state(1, store.site("north")).failures == 1
