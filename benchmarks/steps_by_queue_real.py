"""Steps by queue between the testbed's two Slurms, one busy with others' jobs.

`steps_by_queue.py --real` (as root, after make testbed image-cpu). Real ssh, real queues, a real
image: the same campaign with fixed steps and with steps by queue, in turns. Both facilities have
the same text. Before each of its jobs the busy facility's nodes are taken by jobs that sleep, as
long in each way. The held-out loss is what the facilities measure of each round's model.
"""

import argparse
import math
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import results
import two_facilities
from testbed import CLUSTERS, Cluster
from testbed_site import HOW, is_ready, staged_site

from atoll.campaign.store import CampaignStore, checked_campaign

WAYS = ("fixed", "queue")
BUSY = CLUSTERS[1]
SLEEP_SECONDS = (30.0, 60.0)  # of a job of others
AHEAD = 1  # of such jobs, for each node, before whoever comes
TEXT = "data-*.txt"
TARGET = 0.80


def run_real(arguments: argparse.Namespace) -> int:
    """Seconds to the loss that fixed steps reach after four fifths of their rounds."""
    if not is_ready():
        print(HOW, file=sys.stderr)
        return 1
    two_facilities.TEXTS = dict.fromkeys(two_facilities.TEXTS, TEXT)
    with staged_site() as site, two_facilities.ssh_server(site) as door:
        python = two_facilities.login_node_python(site)
        curves: dict[str, list[tuple[float, float]]] = {}
        for way in WAYS:
            with (
                two_facilities.two_facilities(site, door, python) as given,
                busy(BUSY, arguments.seeds),
            ):
                curves[way] = curve(campaign_of(given, way, arguments))
            print(f"{way}: " + ", ".join(f"{t:.0f} s {x:.4f}" for t, x in curves[way]), flush=True)
    fixed = curves["fixed"]
    target = fixed[math.ceil(0.8 * len(fixed)) - 1][1]
    seconds = {way: reached(points, target) for way, points in curves.items()}
    about = f"two Slurms, one busy, {arguments.steps} steps a round: time to a loss"
    row = results.row(
        about, "s", [seconds["queue"]], "fixed steps", [seconds["fixed"]], "lower", TARGET
    )
    return int(not results.record("steps_by_queue", [row]) and arguments.check)


def campaign_of(given: dict[str, Any], way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of one campaign of these two facilities."""
    values = given | {"name": f"steps-by-{way}", "rounds": arguments.rounds, "steps_by": way}
    values |= {"steps": arguments.steps, "deadline_minutes": 30.0}
    values["train"] = [
        *values["train"],
        "training.log_every_steps=100",
        "evaluation.max_samples=64",
    ]
    # of two that are capped at a half both weigh the same, whatever they took
    values["rule"] = {"max_norm_ratio": 100, "quorum": 2, "weigh": "tokens"}
    return values


@contextmanager
def busy(cluster: Cluster, seed: int) -> Iterator[None]:
    """Jobs of others come to a cluster, so that there is always some before whoever comes next."""
    over = threading.Event()
    keeper = threading.Thread(target=keep_busy, args=(cluster, random.Random(seed), over))
    keeper.start()
    try:
        time.sleep(2 * SLEEP_SECONDS[0])  # the queue fills
        yield
    finally:
        over.set()
        keeper.join()
        argv = ["scancel", f"--user={cluster.user}"]
        subprocess.run(argv, env=cluster.environment)


def keep_busy(cluster: Cluster, draws: random.Random, over: threading.Event) -> None:
    waiting = AHEAD * len(cluster.nodes)
    while not over.wait(1.0):
        for _ in range(waiting - pending(cluster)):
            sleep = f"sleep {draws.uniform(*SLEEP_SECONDS):.0f}"
            argv = ["sbatch", "--job-name=others", "--exclusive", "--nodes=1", "--time=2"]
            argv += [f"--uid={cluster.user}", "--chdir=/tmp", "--output=/dev/null"]
            subprocess.run([*argv, f"--wrap={sleep}"], check=True, capture_output=True,
                           env=cluster.environment)  # fmt: skip


def pending(cluster: Cluster) -> int:
    argv = ["squeue", "--noheader", "--states=PD", "--name=others", "--format=%A"]
    done = subprocess.run(argv, capture_output=True, text=True, env=cluster.environment)
    return len(done.stdout.split())


def curve(values: dict[str, Any]) -> list[tuple[float, float]]:
    """Seconds since the campaign began, and the held-out loss of the model that was there then."""
    with tempfile.TemporaryFile("w+") as log:
        begun = time.time()
        code = two_facilities.coordinator(values, log).wait()
        if code:
            log.seek(0)
            raise SystemExit(log.read()[-3000:])
    campaign = checked_campaign(values)
    store = CampaignStore(campaign, Path(campaign.folder) / campaign.name)
    points = []
    for number in range(1, campaign.rounds + 1):
        loss = store.global_loss(number)
        assert loss is not None, f"nobody measured the model of round {number}"
        made = (store.model(number) / "manifest.json").stat().st_mtime
        points.append((made - begun, loss))
    return points


def reached(points: list[tuple[float, float]], target: float) -> float:
    return next((seconds for seconds, loss in points if loss <= target), math.inf)
