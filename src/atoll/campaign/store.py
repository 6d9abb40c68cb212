"""A campaign as its files tell it: settings, which round stands where, who said what.

campaigns/NAME/
  campaign.json              the settings, which stay
  round-000/global/          the model to begin with
  round-001/FACILITY/        job.json (what the facility said last), update/ or rejected.json
  round-001/global/          the next model, whole when its manifest is there
  events.jsonl               what happened when, for the report
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from atoll import run_dir
from atoll.campaign.site import round_name
from atoll.errors import UserError
from atoll.settings.federation import Campaign, Site

# What may change in a campaign's life: its length, our patience, and how it is carried out.
FREE = {"rounds", "deadline_minutes", "poll_seconds", "attempts", "target_loss", "ssh_options"}
FREE |= {"engine"}


@dataclass(frozen=True)
class CampaignStore:
    """A campaign and its folder on this machine."""

    campaign: Campaign
    folder: Path

    def round(self, number: int) -> Path:
        return self.folder / round_name(number)

    def model(self, number: int) -> Path:
        return self.round(number) / "global"

    def at(self, number: int, site: Site) -> Path:
        return self.round(number) / site.name

    def site(self, name: str) -> Site:
        return next(site for site in self.campaign.sites if site.name == name)


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


def settings_file(folder: Path) -> Path:
    return folder / "campaign.json"


def kept(folder: Path) -> CampaignStore:
    """The campaign in a folder, by the settings it keeps."""
    try:
        values = json.loads(settings_file(folder).read_text())
    except OSError:
        raise UserError(f"no campaign in {folder}", "give the folder of one") from None
    return CampaignStore(checked_campaign(values), folder.absolute())


def keep_settings(held: CampaignStore) -> None:
    """A campaign keeps its settings for life; only those in FREE may change."""
    path = settings_file(held.folder)
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


def is_whole(model: Path) -> bool:
    return (model / "manifest.json").is_file()


def global_manifest(held: CampaignStore, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((held.model(number) / "manifest.json").read_text())
    return found


def model_digest(held: CampaignStore, number: int) -> str:
    return str(global_manifest(held, number)["digest"])


def note(held: CampaignStore, event: str, number: int, **facts: Any) -> None:
    """One line of events.jsonl."""
    record = {"event": event, "round": number, "time": round(time.time(), 3), **facts}
    with open(held.folder / "events.jsonl", "a") as file:
        file.write(json.dumps(record) + "\n")


def started(held: CampaignStore, number: int) -> float:
    """When the round began, whoever began it: the deadline counts from there."""
    path = held.round(number) / "began.json"
    if not path.is_file():
        run_dir.write_whole(path, json.dumps({"time": time.time()}))
        note(held, "round", number)
    return float(json.loads(path.read_text())["time"])


def deadline(held: CampaignStore, number: int) -> float:
    return started(held, number) + held.campaign.deadline_minutes * 60


def unsettled(held: CampaignStore, number: int) -> list[Site]:
    """The facilities that have neither sent an update nor been left out."""
    return [site for site in held.campaign.sites if not is_settled(held, number, site)]


def is_settled(held: CampaignStore, number: int, site: Site) -> bool:
    here = held.at(number, site)
    return (here / "update").is_dir() or (here / "rejected.json").is_file()


def said_last(held: CampaignStore, number: int, site: Site) -> dict[str, Any]:
    path = held.at(number, site) / "job.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def last_words(held: CampaignStore, number: int, site: Site) -> str:
    said = said_last(held, number, site) or {"state": "not asked yet"}
    return ": ".join(str(said[name]) for name in ("state", "why") if said.get(name))


def remember(held: CampaignStore, number: int, site: Site, said: dict[str, Any]) -> None:
    """Keep what a facility said; a new state is an event."""
    before = said_last(held, number, site)
    if before.get("state") != said["state"]:
        note(held, "said", number, facility=site.name, state=said["state"], why=said.get("why", ""))
    text = json.dumps({"failures": before.get("failures", 0)} | said, indent=1)
    run_dir.write_whole(held.at(number, site) / "job.json", text)


def count_failure(held: CampaignStore, number: int, site: Site, why: str) -> None:
    """A facility that says no, or sends what is wrong, is asked a few times, then left out."""
    before = said_last(held, number, site)
    failures = before.get("failures", 0) + 1
    said = {"state": "wrong", "why": why, "failures": failures}
    run_dir.write_whole(held.at(number, site) / "job.json", json.dumps(before | said, indent=1))
    note(held, "wrong", number, facility=site.name, why=why)
    if failures >= held.campaign.attempts:
        leave_out(held, number, site, why)


def leave_out(held: CampaignStore, number: int, site: Site, why: str, late: bool = False) -> None:
    """Go on without a facility; what it is late with may still come, as stale work."""
    facts = {"why": why, "late": late, "asked": asked_round(held, number, site)}
    text = json.dumps(facts | {"time": time.time()}, indent=1)
    run_dir.write_whole(held.at(number, site) / "rejected.json", text)
    note(held, "left out", number, facility=site.name, why=why)


def leave_out_late(held: CampaignStore, number: int) -> None:
    for site in unsettled(held, number):
        why = f"no update after {held.campaign.deadline_minutes:g} minutes"
        leave_out(held, number, site, f"{why}: {last_words(held, number, site)}", late=True)


def asked_round(held: CampaignStore, number: int, site: Site) -> int:
    """The round whose work a facility is at: an earlier one, where it was late and still may be."""
    path = held.at(number - 1, site) / "rejected.json"
    if not path.is_file() or (held.at(number, site) / "fresh.json").is_file():
        return number
    before = json.loads(path.read_text())
    stale = number - before.get("asked", number)
    allowed = before.get("late") and stale <= held.campaign.rule.max_staleness
    return int(before["asked"]) if allowed else number


def forget_late(held: CampaignStore, number: int, site: Site, why: str) -> None:
    """The work of an earlier round came to nothing: this round's own is asked for."""
    run_dir.write_whole(held.at(number, site) / "fresh.json", json.dumps({"why": why}))
    note(held, "wrong", number, facility=site.name, why=why)


def left_out(held: CampaignStore, number: int) -> dict[str, str]:
    """Facility -> why it has no part in a round."""
    found = {}
    for site in held.campaign.sites:
        path = held.at(number, site) / "rejected.json"
        if path.is_file():
            found[site.name] = str(json.loads(path.read_text())["why"])
    return found


def forget_left_out(held: CampaignStore, number: int) -> None:
    """Below the quorum the round is held: whoever is missing is asked again the next time."""
    for site in held.campaign.sites:
        here = held.at(number, site)
        (here / "rejected.json").unlink(missing_ok=True)
        if not (here / "update").is_dir():
            (here / "job.json").unlink(missing_ok=True)
    (held.round(number) / "began.json").unlink(missing_ok=True)


def nonces(held: CampaignStore, number: int, site: Site) -> Iterator[str]:
    """Of all updates that were taken so far."""
    for path in held.folder.glob("round-*/*/update/manifest.json"):
        if path.parent.parent != held.at(number, site):
            yield str(json.loads(path.read_text())["nonce"])


def losses(held: CampaignStore, number: int) -> dict[str, list[float]]:
    """Facility -> held-out loss of the model it began with, and of its own after training."""
    found = {}
    for site in held.campaign.sites:
        if (held.at(number, site) / "update").is_dir():
            found[site.name] = said_last(held, number, site).get("losses") or []
    return {name: values for name, values in found.items() if values}


def mean_losses(held: CampaignStore, number: int) -> tuple[float, float] | None:
    """The mean over facilities: of the model they began with, and of their own."""
    each = list(losses(held, number).values())
    if not each:
        return None
    return sum(x[0] for x in each) / len(each), sum(x[-1] for x in each) / len(each)


def standing(held: CampaignStore) -> list[str]:
    """A line for each round that has begun, and one for each facility of the last."""
    lines = [f"{held.campaign.name}: {held.campaign.rounds} rounds in {held.folder}"]
    begun = [n for n in range(1, held.campaign.rounds + 1) if held.round(n).is_dir()]
    lines += [told(held, number) for number in begun]
    if begun and not is_whole(held.model(begun[-1])):
        for site in held.campaign.sites:
            lines.append(f"  {site.name}: {last_words(held, begun[-1], site)}")
    return lines


def told(held: CampaignStore, number: int) -> str:
    """Where one round stands."""
    if not is_whole(held.model(number)):
        return f"round {number}: under way"
    manifest = global_manifest(held, number)
    weights = ", ".join(f"{name} {share:.2f}" for name, share in manifest["weights"].items())
    gone = without(held, number)
    missing = "".join(f"; without {name}: {why}" for name, why in sorted(gone.items()))
    mean = mean_losses(held, number)
    said = f"loss {mean[0]:.4f}, after training {mean[1]:.4f}" if mean else "no losses"
    return f"round {number}: {said} (mean over facilities); weights {weights}{missing}"


def without(held: CampaignStore, number: int) -> dict[str, str]:
    """Facility -> why the round's model holds nothing of it, wherever that was found out."""
    manifest = global_manifest(held, number)
    return {**left_out(held, number), **manifest["rejected"], **manifest.get("unreadable", {})}
