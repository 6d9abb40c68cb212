"""What a round's journal says after a kill, and where a facility stands by it."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from atoll import run_dir
from atoll.campaign import asking, coordinator, last_loss
from atoll.campaign import round as round_
from atoll.campaign.journal import Journal, alone
from atoll.campaign.lasting_settings import keep_settings
from atoll.campaign.round import go_on
from atoll.campaign.store import CampaignStore, checked_campaign, load_store
from atoll.campaign.transfer import Unreachable
from atoll.errors import UserError

FULL = """#!/bin/sh
echo 'rsync: [receiver] write failed on "x": No space left on device (28)' >&2
echo 'rsync error: error in file IO (code 11) at receiver.c(380) [receiver=3.2.7]' >&2
exit 11
"""

BASE = "0" * 64


def store_of(folder: Path, **changes: Any) -> CampaignStore:
    sites = [{"name": name, "folder": str(folder / name)} for name in ("north", "south")]
    values = {"name": "c", "sites": sites, "start": [], "attempts": 2} | changes
    return CampaignStore(checked_campaign(values), folder / "campaigns" / "c")


def test_a_line_that_a_kill_cut_off_is_not_there(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "round-001")
    assert journal.records() == [] and journal.last("asked") == {}
    journal.append("asked", request={"round": 1})
    with open(journal.path, "a") as file:
        file.write('{"event": "submitted", "ti')
    assert [record["event"] for record in journal.records()] == ["asked"]
    journal.append("submitted", run="r")
    assert [record["event"] for record in journal.records()] == ["asked", "submitted"]
    assert journal.last("submitted")["run"] == "r"
    assert len(journal.path.read_text().splitlines()) == 3


def test_facilities_join_and_leave_but_stay_where_they_are(tmp_path: Path) -> None:
    sites = [{"name": name, "folder": f"/{name}"} for name in ("north", "south", "west")]
    values: dict[str, Any] = {"name": "c", "start": [], "sites": sites[:2]}
    keep_settings(CampaignStore(checked_campaign(values), tmp_path))
    store = keep_settings(CampaignStore(checked_campaign(values | {"sites": sites[1:]}), tmp_path))
    assert [site.name for site in load_store(tmp_path).campaign.sites] == ["south", "west"]
    north = store.round(1) / "north" / "update"
    north.mkdir(parents=True)
    assert store.updates(1) == [north], "what it sent stays part of its round"
    run_dir.write_whole(store.model(0) / "manifest.json", "{}")
    store.record_answer(1, store.site("south"), {"state": "running"})
    moved = [sites[1] | {"folder": "/elsewhere"}]
    with pytest.raises(UserError, match=r"was begun with sites\.south="):
        keep_settings(CampaignStore(checked_campaign(values | {"sites": moved}), tmp_path))


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with alone(tmp_path), pytest.raises(BlockingIOError), alone(tmp_path, wait=False):
        pass
    with alone(tmp_path, wait=False):
        pass


def test_an_answer_is_written_once_and_has_no_say_over_the_journal(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    north = store.campaign.sites[0]
    hostile = {"state": "running", "facility": "south", "event": "left out", "self": 1}
    for _ in range(3):
        store.record_answer(1, north, hostile)
    [record] = store.journal(1).records()
    assert record["event"] == "answered" and record["facility"] == "north"
    assert store.state(1, north).text == "running" and len(store.unsettled(1)) == 2


def test_jobs_that_change_in_every_answer_do_not_fill_the_journal(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    north = store.campaign.sites[0]
    for seconds in range(100):
        answer = {"state": "running", "jobs": [{"job": "7", "elapsed_seconds": seconds}] * 100}
        store.record_answer(1, north, answer)
        store.record_answer(1, north, {"state": "unreachable", "why": "no route"})
        store.record_answer(1, north, answer | {"state": "ready"})
    assert not any("jobs" in record for record in store.journal(1).records())
    assert store.jobs(1, north) == []
    store.keep_jobs(1, north, answer["jobs"])
    assert store.jobs(1, north)[0]["elapsed_seconds"] == 99
    assert store.jobs(1, store.campaign.sites[1]) == []


def test_who_was_left_out_is_asked_again_when_the_round_is_reopened(tmp_path: Path) -> None:
    store = store_of(tmp_path, deadline_minutes=1.0)
    north, south = store.campaign.sites
    begun = store.deadline(1)
    assert store.deadline(1) == begun
    for _ in range(2):
        store.count_failure(1, north, "no")
    store.update(1, south).mkdir(parents=True)
    assert store.left_out(1) == {"north": "no"} and store.unsettled(1) == []
    store.journal(1).append("reopened")
    assert store.unsettled(1) == [north] and store.state(1, north).failures == 0
    assert store.deadline(1) >= begun
    assert len(store.journal(1).records("began")) == 2


def test_the_clock_starts_anew_when_the_round_before_is_averaged(tmp_path: Path) -> None:
    """Where rounds overlap: whoever was at that one until then has all of its time."""
    store = store_of(tmp_path, deadline_minutes=1.0)
    assert store.deadline(2) == store.deadline(2)
    run_dir.write_whole(store.model(1) / "manifest.json", "{}")
    assert store.deadline(2) == store.deadline(2)
    assert [record["early"] for record in store.journal(2).records("began")] == [True, False]


def test_a_clock_that_was_ahead_once_gives_nobody_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = store_of(tmp_path, deadline_minutes=1.0), time.time()
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: now + 1e6)
        assert store.deadline(1) == pytest.approx(now + 1e6 + 60)
    deadline = store.deadline(1)
    assert deadline < now + 600 and store.deadline(1) == deadline


def test_late_work_is_asked_for_until_it_comes_to_nothing(tmp_path: Path) -> None:
    store = store_of(tmp_path, rule={"max_staleness": 1})
    north = store.campaign.sites[0]
    store.leave_out(1, north, "no update", late=True)
    assert store.asked_round(2, north) == 1
    store.leave_out(2, north, "no update", late=True)
    assert store.asked_round(3, north) == 3, "two rounds late is too late"
    store.journal(2).append("afresh", facility="north", why="its job failed")
    assert store.asked_round(2, north) == 2


def told(store: CampaignStore, number: int, *states: str) -> None:
    """What the first facility says, one after the other; `wrong` is a failure of it."""
    north = store.campaign.sites[0]
    for state in states:
        if state == "wrong":
            store.count_failure(number, north, "no login")
        else:
            store.record_answer(number, north, {"state": state})


@pytest.mark.parametrize(
    ("states", "failures"),
    [
        (["wrong", "running", "wrong", "running", "wrong"], 1),
        (["wrong", "queued", "wrong"], 1),
        (["wrong", "ready", "wrong"], 2),  # the same wrong update each time
        (["wrong", "retry", "wrong"], 2),
        (["wrong", "unreachable", "wrong"], 2),
    ],
)
def test_errors_of_a_line_do_not_add_up_over_a_days_work(
    tmp_path: Path, states: list[str], failures: int
) -> None:
    store = store_of(tmp_path, attempts=3)
    told(store, 1, *states)
    state = store.state(1, store.campaign.sites[0])
    assert state.failures == failures and not state.settled


@pytest.mark.parametrize(
    ("states", "asked"),
    [
        (["running"], 1),
        (["queued", "unreachable"], 1),
        (["unknown"], 1),
        ([], 2),
        (["running", "ready"], 2),  # it is done, and what it sends is wrong
        (["running", "retry"], 2),
    ],
)
def test_the_job_of_who_is_left_out_for_errors_is_waited_for(
    tmp_path: Path, states: list[str], asked: int
) -> None:
    """Else the next round's would be submitted beside it."""
    store = store_of(tmp_path, rule={"max_staleness": 1})
    told(store, 1, *states, "wrong", "wrong")
    north = store.campaign.sites[0]
    assert store.left_out(1) == {"north": "no login"}
    assert store.asked_round(2, north) == asked


@pytest.mark.parametrize(
    ("states", "asked"),
    [
        (["unreachable"], 2),
        (["needs", "unreachable"], 2),
        (["retry"], 2),  # its scheduler took no job
        (["running", "unreachable"], 1),
        (["queued"], 1),
        (["ready", "unreachable"], 1),  # its files did not come
        (["running", "retry"], 1),
    ],
)
def test_who_never_began_a_round_is_asked_for_the_next(
    tmp_path: Path, states: list[str], asked: int
) -> None:
    store = store_of(tmp_path, rule={"max_staleness": 2})
    north = store.campaign.sites[0]
    told(store, 1, *states)
    store.leave_out_late(1)
    assert store.asked_round(2, north) == asked
    told(store, 2, "unreachable")
    store.leave_out_late(2)
    assert store.asked_round(3, north) == (1 if asked == 1 else 3), "it is at the first yet"


def test_errors_of_a_line_leave_what_was_begun(tmp_path: Path) -> None:
    """Its model was on the way, or it trained while it was asked."""
    store = store_of(tmp_path, rule={"max_staleness": 1})
    north = store.campaign.sites[0]
    store.record_answer(1, north, {"state": "unreachable", "why": "cut off", "begun": True})
    told(store, 1, "wrong", "wrong")
    assert store.asked_round(2, north) == 1
    assert store.has_worked("north"), "its settings stay"


def test_errors_of_a_line_leave_a_late_job_at_work(tmp_path: Path) -> None:
    store = store_of(tmp_path, rule={"max_staleness": 2})
    north = store.campaign.sites[0]
    told(store, 1, "running")
    store.leave_out_late(1)
    told(store, 2, "wrong", "wrong")
    assert "north" in store.left_out(2) and store.asked_round(3, north) == 1


def test_whoever_failed_is_not_asked_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its attempts would be over before anything mends itself."""
    store = store_of(tmp_path, attempts=3, poll_seconds=30.0)
    north = store.campaign.sites[0]
    monkeypatch.setattr(asking, "go_on", lambda *_: store.count_failure(1, north, "no login"))
    assert list(asking.questions(store, 1, north)) == [30.0, 30.0]


def test_a_full_disk_at_a_facility_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was called unreachable, and tried until the deadline."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "rsync": FULL,
        "far": '#!/bin/sh\necho \'{"state": "needs", "have": -1}\'\n',
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    store = store_of(tmp_path)
    north = store.campaign.sites[0].model_copy(update={"command": [str(programs / "far")]})
    for part in ("master", "export"):
        (store.model(0) / part).mkdir(parents=True)
    (store.model(0) / "manifest.json").write_text(json.dumps({"digest": "0" * 64}))
    go_on(store, 1, north)
    state = store.state(1, north)
    assert state.failures == 1 and "No space left on device" in state.text
    go_on(store, 1, north)
    assert "code 11" in store.left_out(1)["north"]


def test_nobody_holds_a_campaign_that_asks_for_its_last_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One measures, one says no each time, one is silent; asked again, nobody is asked twice."""
    places = {name: tmp_path / name for name in ("reef", "lagoon", "shoal")}
    sites = [{"name": name, "folder": str(place)} for name, place in places.items()]
    store = store_of(tmp_path, sites=sites, attempts=2, grace_minutes=1e-3, poll_seconds=0.01)
    answers: list[str] = []

    def bring(_: object, asked: int, site: Any, words: Any, *rest: Any, **more: Any) -> Any:
        answers.append(site.name)
        assert more["over"](1.0), "who says nothing for longer than the grace is not waited for"
        assert not more["over"](0.0)
        assert asked == 3 and (words["base"], words["global_round"]) == (BASE, 2)
        assert words["overrides"][-1] == "training.steps=0" and "--measure" in rest
        if site.name == "lagoon":
            raise UserError("lagoon: no", "") if answers.count("lagoon") > 1 else KeyError("odd")
        if site.name == "shoal":
            raise Unreachable("shoal does not answer", "")
        return {"state": "ready" if answers.count("reef") > 1 else "queued", "losses": [2.5]}

    append = Journal.append

    def append_slowly(*words: Any, **more: Any) -> Any:
        time.sleep(0.07)  # a disk may sync for longer than the grace: nobody was silent meanwhile
        return append(*words, **more)

    monkeypatch.setattr(Journal, "append", append_slowly)
    monkeypatch.setattr(last_loss, "bring", bring)
    monkeypatch.setattr(last_loss, "request", lambda *_: {"overrides": []})
    store.model(2).mkdir(parents=True)
    (store.model(2) / "manifest.json").write_text(json.dumps({"digest": BASE}))
    last_loss.measure_last(store, 2)
    assert store.global_loss(2) == 2.5
    left_out = {r["facility"]: r["why"] for r in store.loss_journal(2).records("left out")}
    assert left_out == {"lagoon": "lagoon: no", "shoal": "shoal does not answer"}
    assert answers.count("lagoon") == 2
    answers.clear()
    last_loss.measure_last(store, 2)
    assert not answers


def losing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[str]) -> CampaignStore:
    """A campaign of one facility that is asked for its last loss, and what it says."""
    store = store_of(tmp_path, poll_seconds=0.01)
    sites = store.campaign.sites[:1]
    store = CampaignStore(store.campaign.model_copy(update={"sites": sites}), store.folder)

    def bring(*_: object, **__: object) -> Any:
        if (state := answers.pop(0)) == "wrong":
            raise UserError("north: its certificate is over", "renew it")
        return {"state": state, "losses": [2.5]}

    monkeypatch.setattr(last_loss, "bring", bring)
    monkeypatch.setattr(last_loss, "request", lambda *_: {"overrides": []})
    store.model(1).mkdir(parents=True)
    (store.model(1) / "manifest.json").write_text(json.dumps({"digest": BASE}))
    return store


def test_errors_of_a_line_do_not_add_up_while_a_loss_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = losing(tmp_path, monkeypatch, ["wrong", "queued", "wrong", "running", "ready"])
    last_loss.measure_last(store, 1)
    assert store.global_loss(1) == 2.5


def test_a_loss_that_nobody_said_is_asked_for_when_the_line_is_typed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = losing(tmp_path, monkeypatch, ["wrong", "wrong", "ready"])
    last_loss.measure_last(store, 1)
    assert store.global_loss(1) is None and "without north" in coordinator.last_line(store, 1)
    last_loss.measure_last(store, 1)
    assert store.global_loss(1) == 2.5 and "without" not in coordinator.last_line(store, 1)


def test_who_failed_to_measure_has_its_attempts_again_when_the_line_is_typed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A facility counts its jobs of a request, and says at once that they failed."""
    store, jobs, mended = losing(tmp_path, monkeypatch, []), [], []

    def bring(_: object, __: int, ___: Any, words: Any, *____: Any, **_____: Any) -> Any:
        if len(jobs) >= words["attempts"]:
            return {"state": "failed", "why": f"{len(jobs)} attempts: no such file"}
        jobs.append(words["attempts"])
        return {"state": "ready" if mended else "retry", "losses": [2.5]}

    monkeypatch.setattr(last_loss, "bring", bring)
    for tries in (2, 4):
        last_loss.measure_last(store, 1)
        assert store.global_loss(1) is None and len(jobs) == tries
    mended.append(True)
    last_loss.measure_last(store, 1)
    assert store.global_loss(1) == 2.5 and jobs == [2, 2, 4, 4, 6]


def test_the_last_model_is_sent_again_when_the_line_is_typed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A facility without room lost it as often as it came."""
    store, sent = store_of(tmp_path, poll_seconds=0.01, attempts=1), []
    sites = store.campaign.sites[:1]
    store = CampaignStore(store.campaign.model_copy(update={"sites": sites}), store.folder)
    room = [0]

    def asked(*_: Any) -> dict[str, Any]:
        has_it = sent and room[0]
        return {"state": "ready", "losses": [2.5]} if has_it else {"state": "needs", "have": -1}

    monkeypatch.setattr(round_, "send", lambda *words, **_: sent.append(words[3]))
    monkeypatch.setattr(round_, "_asked", asked)
    monkeypatch.setattr(last_loss, "request", lambda *_: {"overrides": []})
    for part in ("master", "export"):
        (store.model(1) / part).mkdir(parents=True)
    (store.model(1) / "manifest.json").write_text(json.dumps({"digest": BASE}))
    for _ in range(3):
        last_loss.measure_last(store, 1)
        assert store.global_loss(1) is None
    sent.clear()
    room[0] = 1
    last_loss.measure_last(store, 1)
    assert sent and store.global_loss(1) == 2.5


def test_a_loss_that_was_measured_while_nobody_looked_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, and typed again behind the deadline: each is asked once, as rounds ask."""
    store = store_of(tmp_path, deadline_minutes=1.0)
    began = {"event": "began", "time": time.time() - 3600}
    store.loss_journal(1).path.parent.mkdir(parents=True)
    run_dir.append_record(store.loss_journal(1).path, began)
    asked: list[str] = []

    def bring(_: object, __: int, site: Any, *rest: Any, **more: Any) -> Any:
        asked.append(site.name)
        assert not more["over"](0.0), "it has the grace"
        return {"state": "ready" if site.name == "north" else "running", "losses": [2.5]}

    monkeypatch.setattr(last_loss, "bring", bring)
    monkeypatch.setattr(last_loss, "request", lambda *_: {"overrides": []})
    store.model(1).mkdir(parents=True)
    (store.model(1) / "manifest.json").write_text(json.dumps({"digest": BASE}))
    last_loss.measure_last(store, 1)
    assert sorted(asked) == ["north", "south"] and store.global_loss(1) == 2.5
    [left] = store.loss_journal(1).records("left out")
    assert left["facility"] == "south"


def test_the_last_model_is_sent_over_a_slow_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer takes longer than the grace, in silence; the line is cut at its end, once."""
    store, now = store_of(tmp_path, grace_minutes=1.0, poll_seconds=0.01), [time.time()]
    sites = store.campaign.sites[:1]
    store = CampaignStore(store.campaign.model_copy(update={"sites": sites}), store.folder)
    sent: list[str] = []

    def send(*words: Any, **more: Any) -> None:
        now[0] += 100.0
        over = more.get("over") or words[-1]
        sent.append(words[3])
        if over(100.0) or len(sent) == 1:
            raise Unreachable("north: rsync stopped", "")

    def asked(*_: Any) -> dict[str, Any]:
        is_there = any(target.endswith("round-001") for target in sent)
        return {"state": "ready", "losses": [2.5]} if is_there else {"state": "needs", "have": -1}

    monkeypatch.setattr(last_loss.time, "time", lambda: now[0])
    monkeypatch.setattr(round_, "send", send)
    monkeypatch.setattr(round_, "_asked", asked)
    monkeypatch.setattr(last_loss, "request", lambda *_: {"overrides": []})
    for part in ("master", "export"):
        (store.model(1) / part).mkdir(parents=True)
    (store.model(1) / "manifest.json").write_text(json.dumps({"digest": BASE}))
    last_loss.measure_last(store, 1)
    assert not store.loss_journal(1).records("left out")
    assert store.global_loss(1) == 2.5
