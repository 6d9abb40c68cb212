"""One round of a campaign, step by step: send, ask, take, average.

`atoll round FOLDER NUMBER send|take|average [FACILITY]` does one step of the campaign in FOLDER,
for the engines that start each step by itself. A step that is done already does nothing.
"""

import argparse
import fcntl
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign import store as state
from atoll.campaign.signing import refuse_unsigned
from atoll.campaign.site import round_name
from atoll.campaign.store import CampaignStore, asked_round, is_whole, model_digest, note
from atoll.campaign.transfer import Unreachable, ask, atoll_here, fetch, send
from atoll.errors import UserError
from atoll.settings.federation import Site


def main(argv: list[str]) -> int:
    """One step of one round."""
    parser = argparse.ArgumentParser(prog="atoll round", description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("number", type=int)
    parser.add_argument("step", choices=["send", "take", "average"])
    parser.add_argument("facility", nargs="?")
    parser.add_argument("--said", type=Path, help="JSON that `atoll site` printed there")
    arguments = parser.parse_args(argv)
    held, number = state.kept(arguments.folder), arguments.number
    if arguments.step == "average":
        if len(updates(held, number)) >= held.campaign.rule.quorum:
            average(held, number)
        return 0  # below the quorum it is the coordinator that says so, and holds the round
    site = held.site(arguments.facility)
    if arguments.step == "send":
        bring_models(held, number, site, "--receive")
        return 0
    use_answer(held, number, site, json.loads(arguments.said.read_text()))
    return 0


def begin(held: CampaignStore) -> None:
    """The model of round 0: the export of a run that takes no step."""
    if is_whole(held.model(0)):
        return
    runs = held.folder / "runs"
    own = [
        "name=start",
        f"folders.runs={runs}",
        f"folders.prepared={held.folder / 'prepared'}",
        "training.steps=0",
        "training.epochs=null",
        "export.untrained=true",
        "export.dtype=float32",
    ]
    _call([*atoll_here(), "submit", *held.campaign.start, *own], "the first model", show=True)
    out = held.model(0)
    _call(
        [*atoll_here(), "apply-delta", str(runs / "start" / "export"), str(out), "--first"],
        "round 0",
    )
    note(held, "began", 0)


def go_on(held: CampaignStore, number: int, site: Site) -> None:
    """One question to one facility, and what its answer asks for."""
    try:
        use_answer(held, number, site, bring_models(held, number, site))
    except Unreachable as error:
        state.remember(held, number, site, {"state": "unreachable", "why": error.found})
    except UserError as error:
        state.count_failure(held, number, site, error.found)


def bring_models(held: CampaignStore, number: int, site: Site, *flags: str) -> dict[str, Any]:
    """Ask, and send the model that the facility is to begin with if it needs it; its answer."""
    had = None
    while (said := _asked(held, number, site, *flags))["state"] == "needs":
        if said["have"] == had:
            raise UserError(
                f"{site.name} has no global model newer than round {had}, though it was sent",
                f"look into {site.folder}/incoming and {site.folder}/bases there",
            )
        had = said["have"]
        _send_models(held, number, site, had)
    return said


def use_answer(held: CampaignStore, number: int, site: Site, said: dict[str, Any]) -> None:
    """Take what is ready; go on without a facility that has failed."""
    state.remember(held, number, site, said)
    if said["state"] == "ready":
        _take(held, number, site)
    elif said["state"] == "refused":
        state.count_failure(held, number, site, said["why"])
    elif said["state"] == "failed" and asked_round(held, number, site) < number:
        state.forget_late(held, number, site, said["why"])
    elif said["state"] == "failed":
        state.leave_out(held, number, site, said["why"])


def _asked(held: CampaignStore, number: int, site: Site, *flags: str) -> dict[str, Any]:
    asked = asked_round(held, number, site)
    words = ["site", site.folder, str(asked), "--request", json.dumps(request(held, asked, site))]
    said: dict[str, Any] = json.loads(ask(held.campaign, site, [*words, *flags]))
    return said


def request(held: CampaignStore, number: int, site: Site) -> dict[str, Any]:
    """What a facility is asked in a round: the same words every time."""
    campaign = held.campaign
    lines = [
        *campaign.train,
        *site.overrides,
        "model=from_path",
        f"training.steps={campaign.steps}",
        "training.epochs=null",
        f"training.global_batch_samples={campaign.batch_samples}",
        f"training.consumed_samples={(number - 1) * campaign.steps * campaign.batch_samples}",
    ]
    return {
        "campaign": campaign.name,
        "round": number,
        "facility": site.name,
        "base": model_digest(held, number - 1),
        "codec": campaign.codec,
        "attempts": campaign.attempts,
        "signing_key": site.signing_key,
        "overrides": lines,
    }


def _send_models(held: CampaignStore, number: int, site: Site, have: int) -> None:
    """The first model whole, then differences; the manifest last, which says it is whole."""
    for before in range(have + 1, asked_round(held, number, site)):
        model, target = held.model(before), f"{site.folder}/incoming/{round_name(before)}"
        began, size = time.time(), 0
        for part in ("master", "export") if before == 0 else ("delta",):
            send(held.campaign, site, model / part, f"{target}/{part}")
            size += sum(path.stat().st_size for path in (model / part).iterdir())
        _send_manifest(held, site, model, target)
        facts = {"facility": site.name, "bytes": size, "seconds": time.time() - began}
        note(held, "sent", number, **facts)


def _send_manifest(held: CampaignStore, site: Site, model: Path, target: str) -> None:
    staged = model.with_name(f".manifest-for-{site.name}")
    staged.mkdir(exist_ok=True)
    shutil.copy(model / "manifest.json", staged / "manifest.json")
    send(held.campaign, site, staged, target)


def _take(held: CampaignStore, number: int, site: Site) -> None:
    """Fetch an update and check it; what is wrong in it is fetched again, then left out."""
    here, asked = held.at(number, site), asked_round(held, number, site)
    with alone(here):
        if state.is_settled(held, number, site):
            return
        partial, began = here / ".update.partial", time.time()
        fetch(held.campaign, site, f"{site.folder}/rounds/{round_name(asked)}/update", partial)
        size = sum(path.stat().st_size for path in partial.iterdir() if path.is_file())
        try:
            check_update(held, number, site, partial)
        except UserError as error:
            shutil.rmtree(partial)
            state.count_failure(held, number, site, error.found)
            return
        partial.rename(here / "update")
        run_dir.sync_folder(here)
    facts = {"facility": site.name, "bytes": size, "seconds": time.time() - began}
    note(held, "received", number, **facts)


def check_update(held: CampaignStore, number: int, site: Site, folder: Path) -> None:
    """Signed by the facility, made for what this round asked of it, and never seen before.

    Its files are checked where they are read, by `atoll aggregate`.
    """
    manifest = folder / "manifest.json"
    if held.campaign.allowed_signers is not None:
        refuse_unsigned(manifest, Path(held.campaign.allowed_signers).expanduser(), site.name)
    try:
        told = json.loads(manifest.read_text())
        found = {name: told[name] for name in ("campaign", "round", "facility", "base", "nonce")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{manifest} is no manifest: {error}", "send the update again") from None
    asked = request(held, asked_round(held, number, site), site)
    for name in ("campaign", "round", "facility", "base"):
        if found[name] != asked[name]:
            raise UserError(
                f"the update of {site.name} says {name}={found[name]}, this round is {asked[name]}",
                "train the model of this round",
            )
    if found["nonce"] in state.nonces(held, number, site):
        raise UserError(f"the update of {site.name} was sent before", "train again")


def average(held: CampaignStore, number: int) -> None:
    """Give the updates to `atoll aggregate`, which writes the next model whole or not at all."""
    campaign, rule = held.campaign, held.campaign.rule
    with alone(held.round(number)):
        if is_whole(held.model(number)):
            return
        there = updates(held, number)
        _refuse_below_quorum(held, number, len(there))
        began = time.time()
        argv = [*atoll_here(), "aggregate", *map(str, there)]
        argv += ["--base", str(held.model(number - 1))]
        argv += ["--out", str(held.model(number)), "--codec", campaign.global_codec]
        argv += ["--rule", rule.model_dump_json(), "--about", json.dumps({"round": number})]
        for before in range(number - 2, max(-1, number - 2 - rule.max_staleness), -1):
            argv += ["--older", model_digest(held, before)]
        said = json.loads(_call(argv, f"round {number}"))
    note(held, "averaged", number, seconds=time.time() - began, **said)


def updates(held: CampaignStore, number: int) -> list[Path]:
    """Those that were taken, in the order of the campaign's facilities."""
    folders = [held.at(number, site) / "update" for site in held.campaign.sites]
    return [folder for folder in folders if folder.is_dir()]


def _refuse_below_quorum(held: CampaignStore, number: int, there: int) -> None:
    sites, quorum = held.campaign.sites, held.campaign.rule.quorum
    if there < quorum:
        why = "; ".join(sorted(state.left_out(held, number).values()))
        state.forget_left_out(held, number)
        raise UserError(
            f"round {number}: {there} of {len(sites)} facilities sent an update, the quorum "
            f"is {quorum} ({why})",
            "fix what --status names and type the same line again: nobody trains twice",
        )


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time; the lock ends with the process that holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _call(argv: list[str], what: str, show: bool = False) -> str:
    done = subprocess.run(argv, stdout=None if show else subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(f"{what} ended with exit code {done.returncode}", "see the lines above")
    return done.stdout or ""
