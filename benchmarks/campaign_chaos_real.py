"""A campaign between the testbed's two Slurms under real faults: `campaign_chaos.py --real`.

Real ssh, real queues, a real image. While rounds go on, jobs are cancelled, nodes go down, ranks
are killed or stand still until the round is over, the line to all facilities hangs, updates get a
flipped bit, and the coordinator is killed and started again. Counted are the seconds of jobs
whose work is in a model, of the seconds of all jobs; and every round is aggregated once more from
the updates that were kept: its digest has to be the same.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import two_facilities
from testbed import CLUSTERS, Cluster
from testbed_site import HOW, is_ready, staged_site

from atoll.campaign.average import aggregate_words
from atoll.campaign.store import CampaignStore, checked_campaign
from atoll.campaign.transfer import atoll_here, run_atoll
from atoll.run_dir import sha256_of

EVERY_SECONDS = (45.0, 120.0)  # between two faults
DEADLINE_MINUTES = 3.0
NODE_SECONDS, LINE_SECONDS, STILL_SECONDS = 30.0, 40.0, 240.0
LAST_ROUND_SECONDS = 420.0
Undo = Callable[[], object]


@dataclass
class Scene:
    """A campaign that is under way, and what has befallen it."""

    values: dict[str, Any]
    store: CampaignStore
    door: two_facilities.Door
    log: Path
    draws: random.Random
    process: subprocess.Popen[str]
    met: Counter[str] = field(default_factory=Counter)
    flipped: set[Path] = field(default_factory=set)
    to_flip: int = 0
    undo: list[tuple[float, Undo]] = field(default_factory=list)

    def folder(self, cluster: Cluster) -> Path:
        return two_facilities.home(cluster.user) / str(self.values["sites"][0]["folder"])

    def running_jobs(self, cluster: Cluster) -> list[str]:
        argv = ["squeue", "--noheader", "--states=R", f"--user={cluster.user}", "--format=%A %N"]
        done = subprocess.run(argv, capture_output=True, text=True, env=cluster.environment)
        return done.stdout.splitlines()

    def later(self, seconds: float, undo: Undo) -> None:
        self.undo.append((time.monotonic() + seconds, undo))

    def start(self) -> None:
        with open(self.log, "a") as log:
            self.process = two_facilities.coordinator(self.values, log)


def cancel(scene: Scene, cluster: Cluster) -> bool:
    jobs = scene.running_jobs(cluster)
    if jobs:
        argv = ["scancel", scene.draws.choice(jobs).split()[0]]
        subprocess.run(argv, check=True, env=cluster.environment)
    return bool(jobs)


def node_down(scene: Scene, cluster: Cluster) -> bool:
    """Slurm ends what runs there, and takes the node back later."""
    nodes = [line.split()[1] for line in scene.running_jobs(cluster)]
    if nodes:
        update = ["scontrol", "update", f"nodename={scene.draws.choice(nodes)}"]
        down = [*update, "state=down", "reason=chaos"]
        subprocess.run(down, check=True, env=cluster.environment)
        up = [*update, "state=resume"]
        scene.later(NODE_SECONDS, lambda: subprocess.run(up, env=cluster.environment))
    return bool(nodes)


def kill_ranks(scene: Scene, cluster: Cluster) -> bool:
    return _signal_ranks(cluster, "KILL")


def stand_still(scene: Scene, cluster: Cluster) -> bool:
    """Ranks stop for longer than the round: its update comes late, or never."""
    scene.later(STILL_SECONDS, lambda: _signal_ranks(cluster, "CONT"))
    return _signal_ranks(cluster, "STOP")


def _signal_ranks(cluster: Cluster, name: str) -> bool:
    argv = ["pkill", f"-{name}", "-u", cluster.user, "-f", "atoll launch"]
    return subprocess.run(argv).returncode == 0


def hang_line(scene: Scene, cluster: Cluster) -> bool:
    """Who knocks gets no answer; what is open stays open."""
    os.kill(scene.door.server, signal.SIGSTOP)
    scene.later(LINE_SECONDS, lambda: os.kill(scene.door.server, signal.SIGCONT))
    return True


def flip_a_bit(scene: Scene, cluster: Cluster) -> bool:
    scene.to_flip += 1  # of the next update that is ready anywhere
    return False  # counted when it is done


def kill_coordinator(scene: Scene, cluster: Cluster) -> bool:
    scene.process.kill()
    scene.process.wait()
    scene.start()
    return True


FAULTS: dict[str, Callable[[Scene, Cluster], bool]] = {
    "job cancelled": cancel,
    "node down": node_down,
    "ranks killed": kill_ranks,
    "ranks stand still": stand_still,
    "line hangs": hang_line,
    "bit flipped": flip_a_bit,
    "coordinator killed": kill_coordinator,
}


def run_real(minutes: float, seed: int) -> dict[str, Any] | None:
    """What became of the jobs' seconds; None, with a line on how to get one, without a testbed."""
    if not is_ready():
        print(HOW, file=sys.stderr)
        return None
    with (
        staged_site() as site,
        two_facilities.ssh_server(site) as door,
        two_facilities.two_facilities(site, door, two_facilities.login_node_python(site)) as given,
        tempfile.TemporaryDirectory(prefix="campaign-chaos-") as folder,
    ):
        values = given | {"name": "chaos", "rounds": 10_000, "deadline_minutes": DEADLINE_MINUTES}
        values |= {"grace_minutes": 0.5, "attempts": 2, "last_loss": False}
        values["rule"] = {
            "max_norm_ratio": 100, "quorum": 1, "below_quorum": "wait", "max_staleness": 1,
        }  # fmt: skip
        log = Path(folder) / "coordinator.log"
        with open(log, "a") as output:
            first = two_facilities.coordinator(values, output)
        campaign = checked_campaign(values)
        store = CampaignStore(campaign, Path(campaign.folder) / campaign.name)
        scene = Scene(values, store, door, log, random.Random(seed), first)
        try:
            ended = meet_faults(scene, 60 * minutes)
            finish_round(scene)
        finally:
            calm(scene)
            print("\n".join(log.read_text().splitlines()[-12:]), flush=True)
        return account(scene) | {"ended by itself": ended, "minutes": minutes, "seed": seed}


def meet_faults(scene: Scene, seconds: float) -> int:
    """Fault after fault until the time is over; how often the coordinator ended by itself."""
    end, next_fault, ended = time.monotonic() + seconds, time.monotonic() + 60.0, 0
    kinds: list[str] = []
    while (now := time.monotonic()) < end:
        undo_what_is_due(scene, now)
        flip_what_is_ready(scene)
        if scene.process.poll() is not None:
            ended += 1
            scene.start()
        if now > next_fault:
            kinds = kinds or scene.draws.sample(list(FAULTS), len(FAULTS))
            kind, cluster = kinds.pop(), scene.draws.choice(CLUSTERS)
            happened = FAULTS[kind](scene, cluster)
            scene.met[kind] += happened
            print(f"{cluster.name}: {kind}{'' if happened else ', nothing there'}", flush=True)
            next_fault = now + scene.draws.uniform(*EVERY_SECONDS)
        time.sleep(0.1)
    return ended


def undo_what_is_due(scene: Scene, now: float) -> None:
    for each in [each for each in scene.undo if each[0] <= now]:
        scene.undo.remove(each)
        each[1]()


def flip_what_is_ready(scene: Scene) -> None:
    """In an update that a facility has made, before anybody has fetched it."""
    for cluster in CLUSTERS if scene.to_flip else []:
        for update in scene.folder(cluster).glob("rounds/*/update"):
            number = int(update.parent.name.removeprefix("round-"))
            site = scene.store.site(cluster.name)
            if update in scene.flipped or scene.store.update(number, site).exists():
                continue
            path = next(update.glob("*.safetensors"))
            content = bytearray(path.read_bytes())
            content[-7] ^= 16
            path.write_bytes(content)
            scene.flipped.add(update)
            scene.to_flip -= 1
            scene.met["bit flipped"] += 1
            return


def finish_round(scene: Scene) -> None:
    """Without faults, until the round under way has its model."""
    undo_what_is_due(scene, float("inf"))
    number = max(scene.store.begun_rounds(), default=1)
    end = time.monotonic() + LAST_ROUND_SECONDS
    while not scene.store.has_model(number) and time.monotonic() < end:
        if scene.process.poll() is not None:
            scene.start()
        time.sleep(1.0)


def calm(scene: Scene) -> None:
    """Nothing of the campaign runs on, and every node is back."""
    with suppress(ProcessLookupError):
        os.kill(scene.door.server, signal.SIGCONT)
    undo_what_is_due(scene, float("inf"))
    scene.process.kill()
    scene.process.wait()
    for cluster in CLUSTERS:
        argv = ["scancel", f"--user={cluster.user}"]
        subprocess.run(argv, env=cluster.environment)


def account(scene: Scene) -> dict[str, Any]:
    """Seconds of jobs in a model, of all; digests made again; and who was judged wrongly."""
    store, in_model = scene.store, dict[tuple[str, int], int]()
    rounds = [number for number in store.begun_rounds() if number and store.has_model(number)]
    damaged = held = 0
    for number in rounds:
        manifest = store.model_manifest(number)
        held += not manifest["weights"]
        for name in manifest["weights"]:
            update = store.update(number, store.site(name))
            about = json.loads((update / "manifest.json").read_text())
            in_model[name, int(about["round"])] = number
            # of what was fetched: the facility's own file may be flipped behind that, or made anew
            damaged += any(
                sha256_of(update / file) != facts["sha256"]
                for file, facts in about["files"].items()
            )
    seconds, kept = job_seconds(scene, in_model)
    return {
        "kept": kept / seconds if seconds else 0.0,
        "job_seconds": seconds,
        "rounds": len(rounds),
        "rounds held": held,
        "updates in a model": len(in_model),
        "left out": dict(Counter(_kind(why) for n in rounds for why in store.without(n).values())),
        "damaged in a model": damaged,
        "met": dict(scene.met),
        "digests": [store.model_manifest(number)["digest"] for number in rounds],
        "replayed": [replayed(store, number) for number in rounds],
    }


def _kind(why: str) -> str:
    return "late" if why.startswith("no update") else "failed or wrong"


def job_seconds(scene: Scene, in_model: dict[tuple[str, int], int]) -> tuple[float, float]:
    """Of all starts of all jobs, and of those that ended well and whose update is in a model."""
    everything = kept = 0.0
    for cluster in CLUSTERS:
        for path in scene.folder(cluster).glob("runs/*/jobs.txt"):
            number = int(path.parent.name.split("round-")[1].split("-")[0])
            ids = [line.split()[1] for line in path.read_text().splitlines()]
            for state, elapsed in starts(cluster, ids):
                everything += elapsed
                well = state.startswith("COMPLETED") and (cluster.name, number) in in_model
                kept += elapsed if well else 0.0
    return everything, kept


def starts(cluster: Cluster, ids: Sequence[str]) -> list[tuple[str, float]]:
    """State and seconds of each start of some jobs, as accounting has them."""
    argv = ["sacct", "--allocations", "--duplicates", "--noheader", "--parsable2"]
    argv += ["--format=State,ElapsedRaw", f"--jobs={','.join(ids)}"]
    done = subprocess.run(argv, capture_output=True, text=True, env=cluster.environment)
    pairs = [line.split("|") for line in done.stdout.splitlines()]
    return [(state, float(elapsed or 0)) for state, elapsed in pairs]


def replayed(store: CampaignStore, number: int) -> str:
    """The digest of a round's model, made again from the updates that are kept."""
    manifest = store.model_manifest(number)
    chosen = [store.update(number, store.site(name)) for name in sorted(manifest["weights"])]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "global"
        words = aggregate_words(store, number, chosen, out)
        run_atoll([*atoll_here(), *words], f"round {number}, again")
        digest: str = json.loads((out / "manifest.json").read_text())["digest"]
        return digest
