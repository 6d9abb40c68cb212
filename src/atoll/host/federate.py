"""`atoll federate federation=NAME`: several facilities train one model, round after round.

campaigns/NAME/
  campaign.json              the settings, which stay
  round-000/global/          the model to begin with
  round-001/FACILITY/        job.json (what the facility said last), update/ or rejected.json
  round-001/global/          the next model, whole when its manifest is there
  events.jsonl               what happened when, for the report
What is done is read from which files are whole. Killed at any moment and started again, a campaign
goes on where it was: a facility is asked the same question, and does nothing twice.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pydantic import ValidationError

from atoll import run_dir
from atoll.errors import UserError
from atoll.host.compose import campaign_values, split_options
from atoll.host.signing import refuse_unsigned
from atoll.host.site import round_name
from atoll.host.transfer import Unreachable, ask, atoll_here, fetch, send
from atoll.settings.federation import Campaign, Site

USAGE = """usage: atoll federate [--status] [--dry-run] federation=NAME KEY=VALUE …

Rounds of training at the facilities of a federation, averaged on this machine. The same line
typed again goes on where it stopped.
--status     where the campaign stands, round by round
--dry-run    print the settings, and do nothing"""


@dataclass(frozen=True)
class Held:
    """A campaign and its folder on this machine."""

    campaign: Campaign
    folder: Path

    def round(self, number: int) -> Path:
        return self.folder / round_name(number)

    def model(self, number: int) -> Path:
        return self.round(number) / "global"

    def at(self, number: int, site: Site) -> Path:
        return self.round(number) / site.name


def main(argv: list[str]) -> int:
    """Begin a campaign, or go on with it."""
    options, overrides = split_options(argv, {"--status", "--dry-run", "--help", "-h"})
    if options & {"--help", "-h"}:
        print(USAGE)
        return 0
    campaign = checked_campaign(campaign_values(overrides))
    held = Held(campaign, Path(campaign.folder).absolute() / campaign.name)
    if "--dry-run" in options:
        print(OmegaConf.to_yaml(campaign.model_dump(mode="json")), end="")
        return 0
    if "--status" in options:
        print("\n".join(standing(held)))
        return 0
    _keep_settings(held)
    return ENGINES[campaign.engine](held)


def checked_campaign(values: dict[str, Any]) -> Campaign:
    """Plain values to settings; `UserError` names the first that is wrong."""
    try:
        return Campaign.model_validate(values)
    except ValidationError as error:
        one = error.errors()[0]
        name = ".".join(map(str, one["loc"]))
        raise UserError(
            f"campaign setting {name}: {one['msg']} ({one['input']!r})",
            "atoll federate --dry-run federation=NAME prints all of them",
        ) from None


def local(held: Held) -> int:
    """Round after round, by this process."""
    campaign = held.campaign
    begin(held)
    for number in range(1, campaign.rounds + 1):
        if not is_whole(held.model(number)):
            gather(held, number)
            average(held, number)
        print(told(held, number), flush=True)
        if _reached_target(held, number):
            print(f"the target loss {campaign.target_loss} is reached", flush=True)
            break
    print(f"the model: {held.model(number) / 'export'}")
    return 0


def begin(held: Held) -> None:
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
    _call([*atoll_here(), "rebase", str(runs / "start" / "export"), str(out), "--first"], "round 0")
    note(held, "began", 0)


def gather(held: Held, number: int) -> None:
    """Ask every facility, again and again, until it has sent its update or the time is over."""
    campaign, started = held.campaign, _started(held, number)
    waiting = [site for site in campaign.sites if not _is_settled(held, number, site)]
    while waiting:
        before = [_last_said(held, number, site) for site in waiting]
        for site in waiting:
            go_on(held, number, site)
        after = [_last_said(held, number, site) for site in waiting]
        waiting = [site for site in waiting if not _is_settled(held, number, site)]
        if waiting and time.time() - started > campaign.deadline_minutes * 60:
            for site in waiting:
                why = f"no update after {campaign.deadline_minutes:g} minutes"
                _leave_out(held, number, site, f"{why}: {_last_said(held, number, site)}")
            return
        if waiting and before == after:
            time.sleep(campaign.poll_seconds)


def go_on(held: Held, number: int, site: Site) -> None:
    """One question to one facility, and what its answer asks for."""
    try:
        said = _asked(held, number, site)
        while said["state"] == "needs":
            _send_models(held, number, site, said["have"])
            said = _asked(held, number, site)
        if said["state"] == "ready":
            _take(held, number, site)
        elif said["state"] == "failed":
            _leave_out(held, number, site, said["why"])
    except Unreachable as error:
        _remember(held, number, site, {"state": "unreachable", "why": error.found})
    except UserError as error:
        _count_failure(held, number, site, error.found)


def _asked(held: Held, number: int, site: Site) -> dict[str, Any]:
    words = ["site", site.folder, str(number), "--request", json.dumps(request(held, number, site))]
    said: dict[str, Any] = json.loads(ask(held.campaign, site, words))
    _remember(held, number, site, said)
    return said


def request(held: Held, number: int, site: Site) -> dict[str, Any]:
    """What a facility is asked in a round: the same words every time."""
    campaign = held.campaign
    lines = [
        *campaign.train,
        *site.overrides,
        "model=from_path",
        f"training.steps={campaign.steps}",
        "training.epochs=null",
        f"training.global_batch_samples={campaign.batch_samples}",
        f"training.samples_before={(number - 1) * campaign.steps * campaign.batch_samples}",
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


def _send_models(held: Held, number: int, site: Site, have: int) -> None:
    """The first model whole, then differences; the manifest last, which says it is whole."""
    for before in range(have + 1, number):
        model, target = held.model(before), f"{site.folder}/incoming/{round_name(before)}"
        began, size = time.time(), 0
        for part in ("master", "export") if before == 0 else ("delta",):
            send(held.campaign, site, model / part, f"{target}/{part}")
            size += sum(path.stat().st_size for path in (model / part).iterdir())
        _send_manifest(held, site, model, target)
        facts = {"facility": site.name, "bytes": size, "seconds": time.time() - began}
        note(held, "sent", number, **facts)


def _send_manifest(held: Held, site: Site, model: Path, target: str) -> None:
    staged = model.with_name(".manifest-alone")
    staged.mkdir(exist_ok=True)
    shutil.copy(model / "manifest.json", staged / "manifest.json")
    send(held.campaign, site, staged, target)


def _take(held: Held, number: int, site: Site) -> None:
    """Fetch an update and check it; what is wrong in it is fetched again, then left out."""
    here = held.at(number, site)
    partial, began = here / ".update.partial", time.time()
    fetch(held.campaign, site, f"{site.folder}/rounds/{round_name(number)}/update", partial)
    size = sum(path.stat().st_size for path in partial.iterdir() if path.is_file())
    try:
        check_update(held, number, site, partial)
    except UserError as error:
        shutil.rmtree(partial)
        _count_failure(held, number, site, error.found)
        return
    partial.rename(here / "update")
    run_dir.sync_folder(here)
    facts = {"facility": site.name, "bytes": size, "seconds": time.time() - began}
    note(held, "received", number, **facts)


def check_update(held: Held, number: int, site: Site, folder: Path) -> None:
    """Signed by the facility, made for this round of this campaign, and never seen before.

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
    asked = request(held, number, site)
    for name in ("campaign", "round", "facility", "base"):
        if found[name] != asked[name]:
            raise UserError(
                f"the update of {site.name} says {name}={found[name]}, this round is {asked[name]}",
                "train the model of this round",
            )
    if found["nonce"] in _nonces(held, number, site):
        raise UserError(f"the update of {site.name} was sent before", "train again")


def average(held: Held, number: int) -> None:
    """Give the updates to `atoll aggregate`, which writes the next model whole or not at all."""
    campaign = held.campaign
    folders = [held.at(number, site) / "update" for site in campaign.sites]
    there = [str(folder) for folder in folders if folder.is_dir()]
    if len(there) < campaign.rule.quorum:
        why = "; ".join(sorted(left_out(held, number).values()))
        _forget_left_out(held, number)
        raise UserError(
            f"round {number}: {len(there)} of {len(folders)} facilities sent an update, the quorum "
            f"is {campaign.rule.quorum} ({why})",
            "mend what --status names and type the same line again: nobody trains twice",
        )
    began = time.time()
    argv = [*atoll_here(), "aggregate", *there, "--base", str(held.model(number - 1))]
    argv += ["--out", str(held.model(number)), "--codec", campaign.global_codec]
    argv += ["--rule", campaign.rule.model_dump_json(), "--about", json.dumps({"round": number})]
    said = json.loads(_call(argv, f"round {number}"))
    note(held, "averaged", number, seconds=time.time() - began, **said)


def is_whole(model: Path) -> bool:
    return (model / "manifest.json").is_file()


def model_digest(held: Held, number: int) -> str:
    return str(json.loads((held.model(number) / "manifest.json").read_text())["digest"])


def standing(held: Held) -> list[str]:
    """A line for each round that has begun, and one for each facility of the last."""
    lines = [f"{held.campaign.name}: {held.campaign.rounds} rounds in {held.folder}"]
    last = 0
    for number in range(1, held.campaign.rounds + 1):
        if held.round(number).is_dir():
            lines.append(told(held, number))
            last = number
    if last and not is_whole(held.model(last)):
        for site in held.campaign.sites:
            lines.append(f"  {site.name}: {_last_said(held, last, site)}")
    return lines


def told(held: Held, number: int) -> str:
    """Where one round stands."""
    if not is_whole(held.model(number)):
        return f"round {number}: under way"
    manifest = json.loads((held.model(number) / "manifest.json").read_text())
    before, after = losses(held, number)
    weights = ", ".join(f"{name} {share:.2f}" for name, share in manifest["weights"].items())
    gone = {**left_out(held, number), **manifest["rejected"], **manifest.get("unreadable", {})}
    without = "".join(f"; without {name}: {why}" for name, why in sorted(gone.items()))
    middle = f"loss {before:.4f}, after training {after:.4f}" if before else "no losses"
    return f"round {number}: {middle} (mean over facilities); weights {weights}{without}"


def losses(held: Held, number: int) -> tuple[float, float]:
    """Mean held-out loss over facilities: of the model they began with, and of their own."""
    found = []
    for site in held.campaign.sites:
        path = held.at(number, site) / "job.json"
        if (held.at(number, site) / "update").is_dir() and path.is_file():
            found.append(json.loads(path.read_text()).get("losses") or [0.0])
    if not found:
        return 0.0, 0.0
    return sum(x[0] for x in found) / len(found), sum(x[-1] for x in found) / len(found)


def left_out(held: Held, number: int) -> dict[str, str]:
    """Facility -> why it has no part in a round."""
    found = {}
    for site in held.campaign.sites:
        path = held.at(number, site) / "rejected.json"
        if path.is_file():
            found[site.name] = str(json.loads(path.read_text())["why"])
    return found


def note(held: Held, event: str, number: int, **facts: Any) -> None:
    """One line of events.jsonl."""
    record = {"event": event, "round": number, "time": round(time.time(), 3), **facts}
    with open(held.folder / "events.jsonl", "a") as file:
        file.write(json.dumps(record) + "\n")


def _reached_target(held: Held, number: int) -> bool:
    target, (before, _) = held.campaign.target_loss, losses(held, number)
    return target is not None and 0.0 < before <= target


def _keep_settings(held: Held) -> None:
    """A campaign keeps its settings for life; only their number of rounds and patience may grow."""
    path = held.folder / "campaign.json"
    now = held.campaign.model_dump(mode="json")
    if path.is_file():
        before = json.loads(path.read_text())
        for name in now:
            if name not in FREE and before.get(name) != now[name]:
                raise UserError(
                    f"campaign {held.campaign.name} was begun with {name}={before.get(name)}, now "
                    f"it is {now[name]}",
                    "give this one another name: name=NAME",
                )
    run_dir.write_whole(path, json.dumps(now, indent=1))


FREE = {"rounds", "deadline_minutes", "poll_seconds", "attempts", "target_loss", "ssh_options"}


def _started(held: Held, number: int) -> float:
    """When the round began, whoever began it: the deadline counts from there."""
    path = held.round(number) / "began.json"
    if not path.is_file():
        run_dir.write_whole(path, json.dumps({"time": time.time()}))
        note(held, "round", number)
    return float(json.loads(path.read_text())["time"])


def _is_settled(held: Held, number: int, site: Site) -> bool:
    here = held.at(number, site)
    return (here / "update").is_dir() or (here / "rejected.json").is_file()


def _remember(held: Held, number: int, site: Site, said: dict[str, Any]) -> None:
    path = held.at(number, site) / "job.json"
    before = json.loads(path.read_text()) if path.is_file() else {}
    if before.get("state") != said["state"]:
        note(held, "said", number, facility=site.name, state=said["state"], why=said.get("why", ""))
    kept = {"failures": before.get("failures", 0)}
    run_dir.write_whole(path, json.dumps(kept | said, indent=1))


def _last_said(held: Held, number: int, site: Site) -> str:
    path = held.at(number, site) / "job.json"
    said = json.loads(path.read_text()) if path.is_file() else {"state": "not asked yet"}
    return ": ".join(str(said[name]) for name in ("state", "why") if said.get(name))


def _count_failure(held: Held, number: int, site: Site, why: str) -> None:
    """A facility that says no, or sends what is wrong, is asked a few times, then left out."""
    path = held.at(number, site) / "job.json"
    before = json.loads(path.read_text()) if path.is_file() else {}
    failures = before.get("failures", 0) + 1
    said = {"state": "wrong", "why": why, "failures": failures}
    run_dir.write_whole(path, json.dumps(before | said, indent=1))
    note(held, "wrong", number, facility=site.name, why=why)
    if failures >= held.campaign.attempts:
        _leave_out(held, number, site, why)


def _leave_out(held: Held, number: int, site: Site, why: str) -> None:
    path = held.at(number, site) / "rejected.json"
    run_dir.write_whole(path, json.dumps({"why": why, "time": time.time()}, indent=1))
    note(held, "left out", number, facility=site.name, why=why)


def _forget_left_out(held: Held, number: int) -> None:
    """Below the quorum the round is held: whoever is missing is asked again the next time."""
    for site in held.campaign.sites:
        (held.at(number, site) / "rejected.json").unlink(missing_ok=True)
        job = held.at(number, site) / "job.json"
        if not (held.at(number, site) / "update").is_dir():
            job.unlink(missing_ok=True)
    (held.round(number) / "began.json").unlink(missing_ok=True)


def _nonces(held: Held, number: int, site: Site) -> Iterator[str]:
    """Of all updates that were taken so far."""
    for path in held.folder.glob("round-*/*/update/manifest.json"):
        if path.parent.parent != held.at(number, site):
            yield str(json.loads(path.read_text())["nonce"])


def _call(argv: list[str], what: str, show: bool = False) -> str:
    done = subprocess.run(argv, stdout=None if show else subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(f"{what} ended with exit code {done.returncode}", "see the lines above")
    return done.stdout or ""


ENGINES = {"local": local}
