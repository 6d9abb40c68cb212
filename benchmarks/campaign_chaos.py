"""A campaign under chaos, in virtual time: the real coordinator, and facilities that are simulated.

    python benchmarks/campaign_chaos.py [--rounds 1250] [--seed 1] [--quick] [--check]
    python benchmarks/campaign_chaos.py --real [--minutes 30]      (as root: make testbed image-cpu)

Eight facilities take a round's work from queues of random length. They go down, are slow, lose
jobs and transfers, and send what is damaged, too large or more than was asked for; the coordinator
itself is killed and started again. Its own code asks, takes, checks, averages and keeps its
journals (a tiny model, real files); only clock, scheduler and network are simulated. The whole is
done twice: the digests of all models have to be the same. `--real`: in real time, between the two
Slurms of the testbed (campaign_chaos_real.py).
"""

import argparse
import contextlib
import heapq
import io
import json
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import results
import torch
from safetensors.torch import load_file, save_file

from atoll.campaign import average, coordinator
from atoll.campaign import round as campaign_round
from atoll.campaign.asking import questions
from atoll.campaign.journal import round_name
from atoll.campaign.store import CampaignStore, checked_campaign
from atoll.campaign.transfer import Unreachable
from atoll.federation import aggregate_command
from atoll.federation.global_model import first_global
from atoll.federation.make_delta import make_delta
from atoll.settings.federation import Campaign, Site

TARGET = 0.85
TESTBED = Path(__file__).resolve().parents[1] / "tests" / "testbed"
BEGIN = 1_767_225_600.0  # of the virtual clock
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
STEPS, BATCH, SEQUENCE_TOKENS = 500, 64, 4096
CALL_SECONDS, TRANSFER_SECONDS = 4.0, 90.0
# of a facility: seconds that it is up, and down, on average; its queue's and its work's medians
UP, DOWN, QUEUE, WORK = 10 * DAY, 6 * HOUR, 25 * MINUTE, 3 * HOUR
KILLED = 1 / 10_000  # of the coordinator, at a question
# what befalls a round's work of one facility -> how often
MISFORTUNES = {
    "slow node": 0.05,  # all of it takes one to three times as long
    "job lost": 0.03,  # an attempt ends somewhere in between
    "transfer cut": 0.05,
    "bit flipped": 0.01,
    "huge": 0.005,
    "claims too much": 0.005,
    "banner": 0.005,  # the login shell greets, once
}
DAMAGED = ("bit flipped", "huge", "claims too much")


class Killed(BaseException):
    """The coordinator is gone, whatever it was at."""


@dataclass
class Clock:
    """Seconds since 1970, which pass when somebody waits."""

    now: float = BEGIN

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Job:
    """The work of one round at one facility."""

    starts: float
    ends: float
    trained_seconds: float  # of all attempts
    failed: bool


@dataclass
class Facility:
    """A facility's scheduler, disk and line, as the coordinator meets them."""

    name: str
    folder: Path
    seed: int
    clock: Clock
    outages: list[tuple[float, float]] = field(default_factory=list)
    have: int = -1  # the newest global model there
    jobs: dict[int, Job] = field(default_factory=dict)
    met: Counter[str] = field(default_factory=Counter)
    greeted: set[int] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)
    busy: float = 0.0  # what the call under way takes

    def draw(self, number: int, what: str) -> random.Random:
        """The same for a facility, round and matter, in whatever order they come."""
        return random.Random(f"{self.seed} {self.name} {number} {what}")

    def suffers(self, number: int, what: str) -> bool:
        return self.draw(number, what).random() < MISFORTUNES[what]

    def is_down(self, moment: float) -> bool:
        if not self.outages:
            self.outages.append((BEGIN, BEGIN))
        draws = self.draw(len(self.outages), "outage")
        while self.outages[-1][1] <= moment:
            start = self.outages[-1][1] + draws.expovariate(1 / UP)
            self.outages.append((start, start + draws.lognormvariate(0.0, 0.7) * DOWN))
            draws = self.draw(len(self.outages), "outage")
        return any(start <= moment < end for start, end in self.outages[-2:])

    def down_seconds(self, until: float) -> float:
        return sum(max(0.0, min(end, until) - start) for start, end in self.outages)

    def refuse_if_down(self) -> None:
        if self.is_down(self.clock.now):
            self.met["call while down"] += 1
            raise Unreachable(f"{self.name} does not answer: no route to host", "try it later")

    def submit(self, number: int, attempts: int) -> Job:
        """Queue and work, attempt after attempt; an outage stops both, and work goes on after."""
        moment, trained, failed = self.clock.now, 0.0, True
        for attempt in range(attempts):
            draws = self.draw(number, f"attempt {attempt}")
            moment += draws.lognormvariate(0.0, 1.0) * QUEUE
            starts = moment
            seconds = WORK * draws.lognormvariate(0.0, 0.1)
            if self.suffers(number, "slow node"):
                self.met["slow node"] += attempt == 0
                seconds *= draws.uniform(1.0, 3.0)
            lost = draws.random() < MISFORTUNES["job lost"]
            self.met["job lost"] += lost
            seconds *= draws.random() if lost else 1.0
            moment, trained = self.after(moment, seconds), trained + seconds
            if not lost:
                failed = False
                break
        return Job(starts, moment, trained, failed)

    def after(self, moment: float, seconds: float) -> float:
        """When so much work from a moment on is done."""
        while seconds > 0:
            down = self.is_down(moment)
            seconds -= 0 if down else 5 * MINUTE
            moment += 5 * MINUTE
        return moment

    def ask(self, words: Sequence[str]) -> str:
        """What `atoll site` prints."""
        self.busy += CALL_SECONDS
        self.refuse_if_down()
        number, request = int(words[2]), json.loads(words[4])
        if self.have < number - 1:
            return json.dumps({"state": "needs", "have": self.have})
        if number not in self.jobs:
            self.jobs[number] = self.submit(number, request["attempts"])
        job = self.jobs[number]
        if self.clock.now < job.ends:
            state = "queued" if self.clock.now < job.starts else "running"
            return json.dumps({"state": state})
        if job.failed:
            return json.dumps({"state": "failed", "why": "every attempt was lost"})
        update = self.folder / "rounds" / round_name(number) / "update"
        if not update.is_dir():
            self.make_update(number, request, update)
        if self.suffers(number, "banner") and number not in self.greeted:
            self.greeted.add(number)
            self.met["banner"] += 1
            return f"Welcome to {self.name}!\n" + json.dumps({"state": "ready"})
        times = {"submitted": job.starts - 1.0, "started": job.starts, "ended": job.ends}
        return json.dumps({"state": "ready", "losses": [2.0, 1.9], **times})

    def make_update(self, number: int, request: dict[str, Any], update: Path) -> None:
        """A step of the way to this facility's own optimum, as its training would end there."""
        base = self.folder / "bases" / round_name(number - 1)
        weights = load_file(base / "master" / "model.safetensors")
        noise = torch.Generator().manual_seed(self.draw(number, "noise").getrandbits(60))
        factor = 1000.0 if self.suffers(number, "huge") else 0.3
        goal = optimum(self.name, number)
        trained = {
            name: value
            + factor * (goal[name] - value + 0.1 * torch.randn(value.shape, generator=noise))
            for name, value in weights.items()
        }
        work = self.folder / "work"
        work.mkdir(parents=True, exist_ok=True)
        save_file(trained, work / "model.safetensors")
        tokens = STEPS * BATCH * SEQUENCE_TOKENS
        about = {name: request[name] for name in ("campaign", "round", "facility")}
        about |= {"image": "none", "configuration": "simulated", "data": self.name, "loss": 1.9}
        about |= {"steps": STEPS, "tokens": tokens * (10**6 if self.claims(number) else 1)}
        update.parent.mkdir(parents=True, exist_ok=True)
        nonce = f"{self.draw(number, 'nonce').getrandbits(128):032x}"
        with mock.patch("secrets.token_hex", lambda size: nonce):
            make_delta(base, work, None, request["codec"], update, work / "residual", about)
        for what in DAMAGED:
            self.met[what] += self.suffers(number, what)
        if self.suffers(number, "bit flipped"):
            path = next(update.glob("*.safetensors"))
            content = bytearray(path.read_bytes())
            content[-7] ^= 16
            path.write_bytes(content)

    def claims(self, number: int) -> bool:
        return self.suffers(number, "claims too much")

    def receive(self, source: Path, target: str) -> None:
        """Models as they come; a base is whole when its manifest is."""
        self.busy += TRANSFER_SECONDS
        self.refuse_if_down()
        if source.name.startswith(".manifest"):
            number = int(Path(target).name.removeprefix("round-"))
            # what apply-delta makes of it is bit for bit the coordinator's, as tests hold
            base = self.folder / "bases" / round_name(number)
            base.parent.mkdir(parents=True, exist_ok=True)
            if not base.exists():
                base.symlink_to(source.parent / "global")
            self.have = max(self.have, number)

    def give(self, source: str, target: Path, names: Sequence[str]) -> None:
        self.busy += TRANSFER_SECONDS
        self.refuse_if_down()
        number = int(Path(source).parent.name.removeprefix("round-"))
        if self.suffers(number, "transfer cut") and number not in self.cut:
            self.cut.add(number)
            self.met["transfer cut"] += 1
            raise Unreachable(f"{self.name}: rsync stopped: connection reset", "it goes on later")
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            if (Path(source) / name).is_file():
                shutil.copy(Path(source) / name, target / name)


def optimum(name: str, number: int) -> dict[str, torch.Tensor]:
    """The weights that a facility's text would lead to: there is more to learn in every round."""
    draws = torch.Generator().manual_seed(random.Random(name).getrandbits(60))
    return {
        "layer.weight": number + 0.3 * torch.randn(16, 64, generator=draws),
        "layer.bias": number + 0.3 * torch.randn(64, generator=draws),
    }


def campaign_of(folder: Path, rounds: int, facilities: int) -> Campaign:
    sites = [{"name": f"site{n}", "folder": str(folder / f"site{n}")} for n in range(facilities)]
    values: dict[str, Any] = {
        "name": "chaos",
        "rounds": rounds,
        "sites": sites,
        "start": [],
        "steps": STEPS,
        "batch_samples": BATCH,
        "deadline_minutes": 6 * 60,
        "grace_minutes": 15,
        "poll_seconds": 10 * MINUTE,
        "last_loss": False,
        "rule": {"quorum": 3, "below_quorum": "wait", "max_staleness": 2, "cap": 0.5},
    }
    return checked_campaign(values)


def first_model(store: CampaignStore, folder: Path) -> None:
    model = folder / "untrained"
    model.mkdir(parents=True)
    save_file(
        {n: torch.zeros_like(w) for n, w in optimum("", 0).items()}, model / "model.safetensors"
    )
    (model / "config.json").write_text("{}")
    store.model(0).parent.mkdir(parents=True)
    first_global(model, store.model(0), {"round": 0})


def simulated(folder: Path, rounds: int, facility_count: int, seed: int) -> dict[str, Any]:
    """The campaign to its end; what became of everybody's work."""
    campaign = campaign_of(folder, rounds, facility_count)
    store = CampaignStore(campaign, folder / "campaigns" / "chaos")
    first_model(store, folder)
    clock = Clock()
    facilities = {
        site.name: Facility(site.name, Path(site.folder), seed, clock) for site in campaign.sites
    }
    kills = random.Random(f"{seed} kills")
    killed = 0
    with patched(facilities, clock, kills), contextlib.redirect_stdout(io.StringIO()):
        while True:
            try:
                coordinator.run(store)
                break
            except Killed:
                killed += 1
                clock.now += 10 * MINUTE  # until somebody types the line again
    return account(store, facilities, clock) | {"coordinator killed": killed}


@contextlib.contextmanager
def patched(facilities: dict[str, Facility], clock: Clock, kills: random.Random) -> Iterator[None]:
    """Clock, line and processes in place of the real ones."""

    def collect(store: CampaignStore, number: int) -> None:
        """As the engine `local` does, but one question after the other, in virtual time."""
        store.deadline(number)
        asking = [
            (clock.now, place, questions(store, number, site))
            for place, site in enumerate(store.unsettled(number))
        ]
        names = [site.name for site in store.unsettled(number)]
        heapq.heapify(asking)
        while asking:
            at, place, question = heapq.heappop(asking)
            clock.now = max(clock.now, at)
            if kills.random() < KILLED:
                raise Killed
            pause = next(question, None)
            facility = facilities[names[place]]
            seconds, facility.busy = facility.busy, 0.0
            if pause is not None:
                heapq.heappush(asking, (clock.now + seconds + pause, place, question))
        store.leave_out_late(number)

    def ask(campaign: Campaign, site: Site, words: Sequence[str], *_: Any) -> str:
        return facilities[site.name].ask(words)

    def send(campaign: Campaign, site: Site, source: Path, target: str, *_: Any, **__: Any) -> None:
        facilities[site.name].receive(source, target)

    def fetch(
        campaign: Campaign, site: Site, source: str, target: Path, names: Sequence[str], *_: Any
    ) -> None:
        facilities[site.name].give(source, target, names)

    def run_atoll(argv: Sequence[str], what: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            aggregate_command.main(list(argv[argv.index("aggregate") + 1 :]))
        return printed.getvalue()

    with contextlib.ExitStack() as stack:
        for target, name, ours in (
            (campaign_round, "ask", ask),
            (campaign_round, "send", send),
            (campaign_round, "fetch", fetch),
            (average, "run_atoll", run_atoll),
            (coordinator, "prove_campaign", lambda *_: None),
            (time, "time", clock.time),
            (time, "sleep", clock.sleep),
        ):
            stack.enter_context(mock.patch.object(target, name, ours))
        stack.enter_context(mock.patch.dict(coordinator.ENGINES, {"local": collect}))
        stack.enter_context(
            mock.patch("atoll.campaign.asked.sequence_tokens", lambda *_: SEQUENCE_TOKENS)
        )
        yield


def account(store: CampaignStore, facilities: dict[str, Facility], clock: Clock) -> dict[str, Any]:
    """Seconds of work that are in a model, of all; and whether anybody was judged wrongly."""
    rounds = range(1, store.campaign.rounds + 1)
    kept = damaged_in = honest_out = held = 0
    seconds = 0.0
    reasons: Counter[str] = Counter()
    for number in rounds:
        manifest = store.model_manifest(number)
        held += not manifest["weights"]
        refused = {**manifest["rejected"], **manifest.get("unreadable", {})}
        for site in store.campaign.sites:
            facility = facilities[site.name]
            if store.update(number, site).is_dir():
                claims = json.loads((store.update(number, site) / "manifest.json").read_text())
                asked = int(claims["round"])
                damaged = any(facility.suffers(asked, what) for what in DAMAGED)
                in_model = site.name in manifest["weights"]
                kept += in_model
                seconds += facility.jobs[asked].trained_seconds if in_model else 0.0
                damaged_in += in_model and damaged
                honest_out += site.name in refused and not damaged
            elif site.name in store.left_out(number):
                why = store.left_out(number)[site.name]
                reasons["late" if why.startswith("no update") else "failed or wrong"] += 1
    trained = sum(job.trained_seconds for f in facilities.values() for job in f.jobs.values())
    elapsed = clock.now - BEGIN
    up = sum(elapsed - facility.down_seconds(clock.now) for facility in facilities.values())
    met: Counter[str] = sum((facility.met for facility in facilities.values()), Counter())
    return {
        "digests": [store.model_manifest(number)["digest"] for number in rounds],
        "kept": seconds / trained,
        "training": trained / up,
        "facility_rounds": len(rounds) * len(facilities),
        "updates in a model": kept,
        "left out": dict(reasons),
        "rounds held": held,
        "damaged in a model": damaged_in,
        "honest and refused": honest_out,
        "met": dict(met),
        "days": elapsed / DAY,
    }


def one(arguments: tuple[int, int, int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    place = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="campaign-chaos-", dir=place) as folder:
        return simulated(Path(folder), *arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1250)
    parser.add_argument("--facilities", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="40 rounds")
    parser.add_argument("--real", action="store_true", help="between the testbed's two Slurms")
    parser.add_argument("--minutes", type=float, default=30.0, help="of --real")
    parser.add_argument("--check", action="store_true", help="fail where the target is missed")
    arguments = parser.parse_args()
    if arguments.real:
        return real(arguments.minutes, arguments.seed, arguments.check)
    rounds = 40 if arguments.quick else arguments.rounds
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, again = pool.map(one, [(rounds, arguments.facilities, arguments.seed)] * 2)
    same = first.pop("digests") == again.pop("digests")
    for name, value in first.items():
        print(f"{name:22} {value:.4g}" if isinstance(value, float) else f"{name:22} {value}")
    print(f"digests of all {rounds} models on replay: {'the same' if same else 'others'}")
    print(f"{time.monotonic() - began:.0f} s")
    count = first["facility_rounds"]
    right = same and not first["damaged in a model"] and not first["honest and refused"]
    rows = [
        results.row(
            f"work that is in a model, {count:,} facility-rounds under chaos",
            "share", [first["kept"]], "all work", [1.0], "higher", TARGET,
            seed=arguments.seed, about=first, replay_is_equal=same,
        )
    ]  # fmt: skip
    enough = results.record("campaign_chaos", rows) and right
    return int(arguments.check and not enough)


def real(minutes: float, seed: int, check: bool) -> int:
    sys.path[:0] = [str(TESTBED)]  # its Slurms, and how a campaign gets to them
    from campaign_chaos_real import run_real

    if (outcome := run_real(minutes, seed)) is None:
        return 2
    same = outcome.pop("digests") == outcome.pop("replayed")
    for name, value in outcome.items():
        print(f"{name:22} {value:.4g}" if isinstance(value, float) else f"{name:22} {value}")
    print(
        f"digests of all {outcome['rounds']} models, made again: {'the same' if same else 'others'}"
    )
    rows = [
        results.row(
            f"seconds of jobs that are in a model, {minutes:g} minutes between two Slurms",
            "share", [outcome["kept"]], "all jobs", [1.0], "higher", TARGET,
            seed=seed, about=outcome, replay_is_equal=same,
        )
    ]  # fmt: skip
    met = results.record("campaign_chaos", rows)
    right = met and same and not outcome["damaged in a model"] and not outcome["ended by itself"]
    return int(check and not right)


if __name__ == "__main__":
    sys.exit(main())
