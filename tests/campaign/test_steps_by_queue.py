"""With steps_by=queue all facilities end together, and take as many steps as before in the mean."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.campaign.asked import _refuse_large_claims, request, training_words, without_bundle
from atoll.campaign.steps_by_queue import Pace, choose_steps, pace_of, shared_steps
from atoll.campaign.store import CampaignStore, checked_campaign
from atoll.cluster.compare import expected_wait_seconds
from atoll.config.compose import campaign_values, compose
from atoll.errors import UserError
from atoll.settings.exchange import read_answer

PACES = st.builds(
    Pace, st.floats(0.0, 1e6), st.floats(1e-3, 1e3)
)  # seconds of queue and transfers, and of a step


@given(st.lists(PACES, min_size=1, max_size=9), st.integers(1, 2000), st.floats(1.0, 20.0))
def test_the_sum_is_as_before_and_nobody_is_outside_the_bounds(paces, steps, span):
    known = {str(n): pace for n, pace in enumerate(paces)}
    chosen = shared_steps(known, steps, span)
    assert sum(chosen.values()) == steps * len(known)
    for name, count in chosen.items():
        assert max(1.0, steps / span) <= count <= max(1.0, steps * span)
        others = [other for other in known if other != name and chosen[other] < int(steps * span)]
        if count > max(1, -(-steps // span)):  # one step fewer here, one more there: not sooner
            ends = known[name].seconds(count)
            assert all(
                known[other].seconds(chosen[other] + 1) >= ends * (1 - 1e-9) for other in others
            )


def test_who_waits_longer_takes_fewer_and_who_is_new_takes_the_mean():
    paces = {"near": Pace(0.0, 1.0), "far": Pace(60.0, 1.0), "new": None}
    assert shared_steps(paces, 100, 4.0) == {"near": 130, "far": 70, "new": 100}
    slow = {"fast": Pace(0.0, 1.0), "slow": Pace(0.0, 3.0)}
    assert shared_steps(slow, 100, 4.0) == {"fast": 150, "slow": 50}
    assert shared_steps(slow, 100, 1.0) == {"fast": 100, "slow": 100}


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["federation=demo", "name=c", "rounds=9", "steps=30", "steps_by=queue"]
    campaign = checked_campaign(campaign_values(words))
    store = CampaignStore(campaign, tmp_path / "campaigns" / "c")
    for number in range(9):
        store.model(number).mkdir(parents=True)
        (store.model(number) / "manifest.json").write_text(json.dumps({"digest": "0" * 64}))
    return store


def end_round(store, number, name, submitted, started, ended, **node_seconds):
    times = {"submitted": submitted, "started": started, "ended": ended}
    answer = {"state": "ready", **times, "node_seconds": node_seconds}
    store.record_answer(number, store.site(name), answer)
    store.remember_nonce(number, store.site(name), f"{number}-{name}")
    store.journal(number).append("received", facility=name, bytes=1, seconds=4.0)


def test_a_pace_is_the_median_of_the_last_rounds(store):
    north = store.site("north")
    assert pace_of(store, 1, north) is None
    end_round(store, 1, "north", 0.0, 100.0, 160.0)
    assert pace_of(store, 2, north) == Pace(104.0, 2.0)
    # half of this job's time were its steps; the queue is before the job
    end_round(store, 2, "north", 0.0, 10.0, 130.0, queue=10.0, start=60.0, compute=50.0, input=10.0)
    end_round(store, 3, "north", 0.0, 20.0, 110.0)
    assert pace_of(store, 4, north) == Pace(74.0, 2.0)
    store.record_answer(4, north, {"state": "failed", "why": "no"})
    assert pace_of(store, 5, north) == Pace(74.0, 2.0)
    for number in range(5, 9):
        end_round(store, number, "north", 0.0, 1.0, 31.0)
    assert pace_of(store, 9, north) == Pace(5.0, 1.0)


def test_the_text_of_rounds_that_a_facility_missed_is_not_skipped(store):
    """Nor is it said to be read: text that ends early would end it then."""
    campaign = store.campaign.model_copy(update={"steps_by": "fixed"})
    store, [north, east, _] = CampaignStore(campaign, store.folder), campaign.sites
    for number in (1, 2):
        store.remember_nonce(number, east, f"e{number}")
        store.journal(number).append("received", facility="east")
    for number in (3, 5):  # a kill came before it was taken, and it came as late work
        store.remember_nonce(number, east, "e3")
    store.journal(5).append("received", facility="east")
    for number in (4, 5):  # and one that was never asked for again
        store.remember_nonce(number, north, f"n{number}")
    store.journal(4).append("received", facility="north")
    assert [store.steps_before(6, site) for site in (north, east)] == [30, 90]
    assert store.steps_before(3, east) == 60


def test_a_pace_outlives_rounds_that_a_facility_missed(store):
    """Else the slowest, once away, would be asked for most."""
    north = store.site("north")
    end_round(store, 1, "north", 0.0, 100.0, 160.0)
    for number in range(2, 9):
        store.record_answer(number, north, {"state": "failed", "why": "no"})
    assert pace_of(store, 9, north) == Pace(104.0, 2.0)


def test_spare_nodes_make_no_step_shorter(store):
    spent = {"start": 20.0, "compute": 40.0, "idle": 60.0}  # one of two nodes did nothing
    end_round(store, 1, "north", 0.0, 100.0, 160.0, **spent)
    assert pace_of(store, 2, store.site("north")) == Pace(124.0, pytest.approx(40 / 30))


def test_what_a_round_asks_is_chosen_once_and_bounds_what_is_claimed(store, monkeypatch):
    for name, started in {"north": 90.0, "east": 0.0, "west": 0.0}.items():
        end_round(store, 1, name, 0.0, started, started + 30.0)
    choose_steps(store, 1)
    choose_steps(store, 2)
    chosen = store.journal(2).last("steps")["steps"]
    assert chosen == {"north": 8, "east": 41, "west": 41}
    end_round(store, 1, "north", 0.0, 9.0, 30.0)  # whatever comes to be known later
    choose_steps(store, 2)
    assert [store.steps(2, site) for site in store.campaign.sites] == [8, 41, 41]
    words = request(store, 3, store.site("north"))["overrides"]
    assert "training.steps=30" in words  # of a round that has not begun
    assert f"training.consumed_samples={30 * 12}" in words, "of round 2 nothing came"
    end_round(store, 2, "north", 40.0, 49.0, 70.0)
    words = request(store, 3, store.site("north"))["overrides"]
    assert f"training.consumed_samples={(30 + 8) * 12}" in words
    assert "training.consumed_steps=60" in words
    monkeypatch.setattr("atoll.campaign.asked.sequence_tokens", lambda *_: 128)
    (store.model(0) / "master").mkdir()
    for name, most in chosen.items():
        claim = type("Claim", (), {"files": {}, "tokens": most * 12 * 128, "steps": most})
        _refuse_large_claims(store, store.site(name), claim, store.steps(2, store.site(name)))
        claim.steps = most + 1
        with pytest.raises(UserError, match=f"says {most + 1} steps, at most {most}"):
            _refuse_large_claims(store, store.site(name), claim, store.steps(2, store.site(name)))


def test_a_round_takes_its_share_of_the_schedule_whatever_its_steps(store):
    asked = training_words(store.campaign, 3, store.site("north"), 120, 30)
    [stride] = [word for word in asked if word.startswith("training.schedule_stride=")]
    training = compose([*without_bundle(asked)[0], "model.source=here", "name=x"]).run.training
    assert stride == "training.schedule_stride=0.25"
    assert training.place_in_schedule(120, 120) == (90, 270)
    assert training.place_in_schedule(1, 120) == (61, 270)
    assert "stride" not in " ".join(training_words(store.campaign, 3, store.site("north"), 30, 30))


def test_steps_that_take_no_time_end_no_campaign(store):
    """A facility says that its job's time was all lost, but for nearly nothing."""
    nothing = {"compute": 5e-324, "lost": 1e12}
    for name in ("north", "east", "west"):
        end_round(store, 1, name, 0.0, 1.0, 31.0, **(nothing if name == "north" else {}))
    choose_steps(store, 2)
    chosen = store.journal(2).last("steps")["steps"]
    assert sum(chosen.values()) == 90
    assert shared_steps({"a": Pace(5.0, 0.0), "b": Pace(1e12, 5e-324)}, 30, 4.0)


def test_with_fixed_steps_nothing_is_noted(store):
    campaign = store.campaign.model_copy(update={"steps_by": "fixed"})
    fixed = CampaignStore(campaign, store.folder)
    choose_steps(fixed, 1)
    assert fixed.journal(1).records() == []
    choose_steps(store, 1)
    assert store.journal(1).last("steps")["steps"] == {"north": 30, "east": 30, "west": 30}


def test_a_time_that_cannot_be_is_no_pace(store):
    for number, (started, ended) in enumerate([(10.0, 10.0), (10.0, 3.0)], start=1):
        end_round(store, number, "north", 0.0, started, ended)
    assert pace_of(store, 3, store.site("north")) is None


def test_a_queue_that_its_scheduler_says_is_shorter_is_taken_as_such(store):
    """No longer one: sbatch --test-only takes every running job to last its whole limit."""
    north, east = store.site("north"), store.site("east")
    for number in (1, 2):
        end_round(store, number, "north", 0.0, 100.0, 160.0)
    for said, other_seconds in ((1000.0, 104.0), (30.0, 34.0), (0.0, 4.0)):
        answer = store.state(2, north).answer | {"expected_wait_seconds": said}
        store.record_answer(2, north, answer)
        assert pace_of(store, 3, north) == Pace(other_seconds, 2.0)
    assert pace_of(store, 3, east) is None


def test_a_facility_says_how_long_its_queue_is_now(tmp_path, monkeypatch):
    run = compose(["facility=generic_slurm", "name=r", f"folders.runs={tmp_path}"]).run
    (tmp_path / "sbatch").write_text(
        "#!/bin/sh\ncase $1 in --test-only) "
        "echo sbatch: Job 7 to start at $(date -d '10 minutes' +%FT%H:%M):00 >&2;; esac\n"
    )
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert 500 < expected_wait_seconds(run) <= 600
    told = read_answer('{"state": "ready", "expected_wait_seconds": 540.0}', "north")
    assert told["expected_wait_seconds"] == 540.0
    with pytest.raises(UserError, match="no answer of `atoll site`"):
        read_answer('{"state": "ready", "expected_wait_seconds": -1}', "north")
    assert expected_wait_seconds(compose(["facility=laptop", "name=r"]).run) is None
