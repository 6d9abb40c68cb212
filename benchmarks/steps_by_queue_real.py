"""Steps by queue between the testbed's two Slurms: `steps_by_queue.py --real`.

Two campaigns, one after the other: fixed steps, then steps_by=queue. Real ssh, real queues, a real
image; both facilities have the same text. One Slurm is busy: jobs of others fill its nodes all the
time, and some of them always wait ahead of ours. How long each of them sleeps is drawn, in the
same order for both campaigns. Compared is the time to a loss on text that nobody trained on: what
fixed steps reach after four fifths of their rounds.
"""

import math
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import two_facilities
from testbed import CLUSTERS, Cluster
from testbed_site import HOW, ROOT, is_ready, staged_site
from transformers import AutoModelForCausalLM, AutoTokenizer

from atoll.campaign.store import CampaignStore, checked_campaign

BUSY = CLUSTERS[1]  # of two nodes
AHEAD = 3  # jobs of others that wait
SLEEP_SECONDS, SPREAD = 45.0, 0.5  # the median, and of its logarithm
NAME_OF_OTHERS = "others"
TARGET_AFTER = 0.8  # of the rounds with fixed steps
HELD_OUT = "train/*.py"
MOST_ROUNDS = 2  # times those of fixed steps, to reach their loss
Curve = list[tuple[float, float]]  # seconds since the campaign began, nats a token


def run_real(rounds: int, steps: int, seed: int) -> dict[str, Any] | None:
    """Hours to the same loss of both ways; None, with a line on what to do, without a testbed."""
    if not is_ready():
        print(HOW, file=sys.stderr)
        return None
    with (
        staged_site() as site,
        two_facilities.ssh_server(site) as door,
        two_facilities.two_facilities(site, door, two_facilities.login_node_python(site)) as given,
    ):
        for each in given["sites"]:
            each["overrides"][-1] = f"data.files=[{site.clone}/texts/*.txt]"
        values = given | {"steps": steps, "rounds": rounds, "last_loss": False}
        fixed = campaign(values | {"name": "fixed", "steps_by": "fixed"}, seed)
        target = min(loss for _, loss in fixed[: math.ceil(TARGET_AFTER * len(fixed))])
        more = {"name": "queue", "steps_by": "queue", "rounds": MOST_ROUNDS * rounds}
        queue = campaign(values | more, seed, target)
        asked = chosen_steps(values | more)
    return {
        "fixed": hours_to(fixed, target),
        "queue": hours_to(queue, target),
        "loss": target,
        "curves": {"fixed": fixed, "queue": queue},
        "steps": asked,
    }


def hours_to(curve: Curve, target: float) -> float:
    return next((seconds for seconds, loss in curve if loss <= target), math.inf) / 3600


def campaign(values: dict[str, Any], seed: int, target: float = -math.inf) -> Curve:
    """Run it beside the jobs of others, until it ends or a model reaches the target."""
    settings = checked_campaign(values)
    store = CampaignStore(settings, Path(settings.folder) / settings.name)
    curve: Curve = []
    with others(BUSY, random.Random(seed)):
        process = two_facilities.coordinator(values, subprocess.DEVNULL)
        began = 0.0
        try:
            while len(curve) < values["rounds"]:
                ended = process.poll() is not None
                began = began or (time.time() if store.has_model(0) else 0.0)
                if store.has_model(number := len(curve) + 1):
                    published = (store.model(number) / "manifest.json").stat().st_mtime
                    curve.append((published - began, held_out_loss(store.model(number) / "export")))
                    shown(values["name"], number, curve[-1])
                    if curve[-1][1] <= target:
                        break
                elif ended:
                    raise SystemExit(f"the campaign ended with {process.returncode}")
                time.sleep(0.5)
        finally:
            process.kill()
            process.wait()
            for cluster in CLUSTERS:
                cancel_all(cluster)
    return curve


def shown(name: str, number: int, point: tuple[float, float]) -> None:
    print(f"{name}, round {number}: {point[1]:.4f} nats after {point[0]:.0f} s", flush=True)


@contextmanager
def others(cluster: Cluster, draws: random.Random) -> Iterator[None]:
    """Jobs of others fill a cluster's nodes, and some wait, until the end of a `with`."""
    ended = threading.Event()

    def load() -> None:
        while not ended.wait(1.0):
            for _ in range(len(cluster.nodes) + AHEAD - len(jobs_of_others(cluster))):
                submit_sleep(cluster, SLEEP_SECONDS * math.exp(draws.gauss(0.0, SPREAD)))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        cancel_all(cluster)


def submit_sleep(cluster: Cluster, seconds: float) -> None:
    options = ["--exclusive", "--nodes=1", "--time=5", "--output=/dev/null", "--account=island"]
    argv = ["sbatch", *options, f"--job-name={NAME_OF_OTHERS}", f"--wrap=sleep {seconds:.0f}"]
    as_user(cluster, argv)


def jobs_of_others(cluster: Cluster) -> list[str]:
    argv = ["squeue", "--noheader", f"--name={NAME_OF_OTHERS}", "--format=%A"]
    return as_user(cluster, argv).split()


def cancel_all(cluster: Cluster) -> None:
    as_user(cluster, ["scancel", f"--user={cluster.user}"])


def as_user(cluster: Cluster, argv: list[str]) -> str:
    done = subprocess.run(
        ["runuser", "-u", cluster.user, "--", *argv],
        check=True,
        capture_output=True,
        text=True,
        env=cluster.environment,
        cwd="/",
    )
    return done.stdout


def held_out_loss(export: Path) -> float:
    """Nats a token of a model on text that no facility has."""
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(export)
    text = "\n".join(p.read_text() for p in sorted((ROOT / "src/atoll").glob(HELD_OUT)))
    tokens = tokenizer(text, return_tensors="pt")["input_ids"][0]
    tokens_BT = tokens[: len(tokens) // 64 * 64].view(-1, 64)[:512]
    with torch.no_grad():
        return float(model(input_ids=tokens_BT, labels=tokens_BT).loss)


def chosen_steps(values: dict[str, Any]) -> list[dict[str, int]]:
    """What each round asked of each facility."""
    settings = checked_campaign(values)
    store = CampaignStore(settings, Path(settings.folder) / settings.name)
    rounds = [number for number in store.begun_rounds() if number]
    return [dict((store.journal(n).last("steps") or {}).get("steps", {})) for n in rounds]
