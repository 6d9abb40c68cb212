"""A campaign as its files tell it: settings, and where each round and each facility in it stands.

campaigns/NAME/
  campaign.json              the settings, which stay
  nonces.jsonl               of every update that was taken: none is taken twice
  round-000/global/          the model to begin with
  round-001/journal.jsonl    what happened, line by line (journal.py)
  round-001/FACILITY/update/ what a facility sent
  round-001/global/          the next model, whole when its manifest is there
  round-002/losses/          of the last round: journal.jsonl, what its model's held-out loss is
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.journal import Journal, round_name
from atoll.campaign.site_state import SiteState, has_taken_work
from atoll.errors import UserError, first_line
from atoll.settings.federation import Campaign, Site, checked_settings

NONCES = "nonces.jsonl"
MAX_SETTINGS_BYTES = 1 << 22
CLOCK_SECONDS = 60.0  # so far ahead is a clock that was wrong


@dataclass(frozen=True)
class CampaignStore:
    """A campaign and its folder on this machine."""

    campaign: Campaign
    folder: Path

    def round(self, number: int) -> Path:
        return self.folder / round_name(number)

    def journal(self, number: int) -> Journal:
        return Journal(self.round(number))

    def model(self, number: int) -> Path:
        return self.round(number) / "global"

    def export(self, number: int) -> Path:
        """The Hugging Face folder of a campaign that ends with this round."""
        return self.model(number) / ("export" if self.campaign.lora is None else "merged")

    def has_model(self, number: int) -> bool:
        return (self.model(number) / "manifest.json").is_file()

    def model_manifest(self, number: int) -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads((self.model(number) / "manifest.json").read_text())
        return manifest

    def global_round(self, number: int) -> int:
        """The round whose model a facility begins a round with: it may go on before the newest."""
        return max(0, number - 1 - self.campaign.rule.overlap_rounds)

    def update(self, number: int, site: Site) -> Path:
        return self.round(number) / site.name / "update"

    def updates(self, number: int) -> list[Path]:
        """Those that were taken, also of a facility that has left the campaign since."""
        return sorted(folder for folder in self.round(number).glob("*/update") if folder.is_dir())

    def site(self, name: str) -> Site:
        return next(site for site in self.campaign.sites if site.name == name)

    def begun_rounds(self) -> list[int]:
        return [n for n in range(1, self.campaign.rounds + 1) if self.round(n).is_dir()]

    def deadline(self, number: int) -> float:
        """The round's clock starts when this is asked first, and again when it is reopened.

        And where rounds overlap when the round before is averaged: until then it may be that
        nobody else could begin.
        """
        last = self.journal(number).records("began", "reopened")[-1:]
        is_ahead = last and last[0]["time"] > time.time() + CLOCK_SECONDS  # it was set right since
        if not last or is_ahead or last[0]["event"] == "reopened":
            last = [self.journal(number).append("began", early=not self.has_model(number - 1))]
        elif last[0].get("early") and self.has_model(number - 1):
            last = [self.journal(number).append("began", early=False)]
        return float(last[0]["time"]) + self.campaign.deadline_minutes * 60

    def steps(self, number: int, site: Site) -> int:
        """How many a facility is asked for in a round."""
        if self.campaign.steps_by == "fixed":
            return self.campaign.steps
        chosen = self.journal(number).last("steps").get("steps", {})
        return int(chosen.get(site.name, self.campaign.steps))

    def steps_before(self, number: int, site: Site) -> int:
        """How many it took for the updates that came before this round: where its data goes on.

        As it was when the round was asked first: a job is at it, whatever is let go meanwhile.
        """
        if noted := self._asked_for(number, number, site):
            return int(noted[0]["steps_before"])
        records = [r for r in run_dir.records(self.folder / NONCES) if r["facility"] == site.name]
        taken = (r for r in records if r["round"] < number and self._came(r["round"], site.name))
        came = {r["nonce"]: r["round"] for r in taken}
        for each in set(came.values()):
            for gone in self.journal(each).records("afresh"):
                came.pop(gone.get("nonce", ""), None)
        if self.campaign.steps_by == "fixed":
            return len(came) * self.campaign.steps
        return sum(self.steps(self.asked_round(each, site), site) for each in came.values())

    def state(self, number: int, site: Site) -> SiteState:
        """Where a facility stands in a round."""
        state = SiteState(self.update(number, site).is_dir())
        for record in self.journal(number).records():
            if record.get("facility", site.name) == site.name:
                state.add(record["event"], _facts(record))
        return state

    def has_worked(self, facility: str) -> bool:
        """Whether it has taken any work of this campaign: a model on its way to it is none."""
        return any(
            record["facility"] == facility
            and (record["event"] == "received" or has_taken_work(record))
            and not record.get("sent_to")
            for folder in self.folder.glob("round-*")
            for record in Journal(folder).records("answered", "received")
        )

    def unsettled(self, number: int) -> list[Site]:
        """The facilities that have neither sent an update nor been left out."""
        return [site for site in self.campaign.sites if not self.state(number, site).settled]

    def left_out(self, number: int) -> dict[str, str]:
        """Facility -> why the round went on without it."""
        states = {site.name: self.state(number, site) for site in self.campaign.sites}
        return {name: str(s.left_out["why"]) for name, s in states.items() if s.left_out}

    def without(self, number: int) -> dict[str, str]:
        """Facility -> why the round's model holds nothing of it, wherever that was found out."""
        manifest = self.model_manifest(number)
        return {**self.left_out(number), **manifest["rejected"], **manifest.get("unreadable", {})}

    def asked_round(self, number: int, site: Site) -> int:
        """The round whose work a facility is at: an earlier one, where it is late and may be."""
        state = self.state(number, site)
        if state.afresh or state.asked is not None:
            return number if state.afresh else int(state.asked or number)
        late = self.state(number - 1, site).left_out
        if late is None or not late["late"]:
            return number
        asked = int(late["asked"])
        return asked if number - asked <= self.campaign.rule.max_staleness else number

    def note_asked(self, number: int, site: Site) -> None:
        """Keep, once, what a facility is asked for in a round: nothing that comes may change it."""
        asked = self.asked_round(number, site)
        if not self._asked_for(number, asked, site):
            before = self.steps_before(asked, site)
            facts = {"facility": site.name, "round": asked, "steps_before": before}
            self.journal(number).append("asked", **facts)

    def _asked_for(self, number: int, asked: int, site: Site) -> list[dict[str, Any]]:
        """The notes of a round that say so; an older Atoll made none."""
        notes = self.journal(number).records("asked")
        return [r for r in notes if r["facility"] == site.name and r["round"] == asked]

    def remember_nonce(self, number: int, site: Site, nonce: str) -> None:
        """Of an update that is about to be taken: one that a kill cut off may come again."""
        record = {"round": number, "facility": site.name, "nonce": nonce}
        run_dir.append_record(self.folder / NONCES, record, is_durable=True)

    def is_known(self, nonce: str, number: int, site: Site) -> bool:
        """Whether an update of this nonce was taken, but for this facility and round.

        One that a kill cut off never came: it may come in a later round, as late work.
        """
        records = [r for r in run_dir.records(self.folder / NONCES) if r["nonce"] == nonce]
        others = {(r["round"], r["facility"]) for r in records} - {(number, site.name)}
        return any(self._came(*other) for other in others)

    def _came(self, number: int, facility: str) -> bool:
        received = self.journal(number).records("received")
        is_here = (self.round(number) / facility / "update").is_dir()
        return is_here or any(record["facility"] == facility for record in received)

    def mean_losses(self, number: int) -> tuple[float, float] | None:
        """Held-out, the mean over facilities: of the model they began with, and of their own."""
        losses = self.losses(number)
        if not losses:
            return None
        return sum(x[0] for x in losses) / len(losses), sum(x[-1] for x in losses) / len(losses)

    def loss_journal(self, number: int) -> Journal:
        """What facilities measured of the model of the last round (last_loss.py)."""
        return Journal(self.round(number) / "losses")

    def global_loss(self, number: int) -> float | None:
        """Held-out, the mean over facilities, of the model that a round ends with.

        As those of the next round find it, where all begin with it; of the last round, as they were
        asked for it.
        """
        losses, rule = self.mean_losses(number + 1), self.campaign.rule
        if losses and not rule.keeps_own_weights:
            return losses[0]
        measured = [r["loss"] for r in self.loss_journal(number).records("measured")]
        return sum(measured) / len(measured) if measured else None

    def losses(self, number: int) -> list[list[float]]:
        """What the facilities say that are in the model; before there is one, whose update came.

        Each: held-out, of the round's model, …, of its own; late work began with another.
        """
        if self.has_model(number):
            taken = self.in_model(number)
        else:
            taken = [site for site in self.campaign.sites if self.update(number, site).is_dir()]
        in_time = [site for site in taken if self.asked_round(number, site) == number]
        answers = [self.state(number, site).answer for site in in_time]
        return [answer["losses"] for answer in answers if answer.get("losses")]

    def in_model(self, number: int) -> list[Site]:
        """The facilities whose updates are in a round's model, in their order.

        Of one that has left the campaign nothing but the name is known any more.
        """
        sites = {site.name: site for site in self.campaign.sites}
        names = self.model_manifest(number)["weights"]
        return [sites.get(name) or Site(name=name, folder=name) for name in names]

    def facilities(self, last: int) -> list[Site]:
        """Those of the campaign, and those that have left it and are in a model until then."""
        made = [site for n in range(1, last + 1) if self.has_model(n) for site in self.in_model(n)]
        return list({site.name: site for site in [*self.campaign.sites, *made]}.values())

    def record_answer(self, number: int, site: Site, answer: dict[str, Any]) -> None:
        """Keep what a facility said, where it is not what it said before.

        But its jobs, and while it works its times, which are others in each answer: those come with
        its update.
        """
        left = {"jobs"} if answer["state"] == "ready" else {"jobs", "node_seconds"}
        facts = {name: value for name, value in _facts(answer).items() if name not in left}
        if facts != self.state(number, site).answer:
            self.journal(number).append("answered", **facts, facility=site.name)

    def keep_jobs(self, number: int, site: Site, jobs: list[dict[str, Any]]) -> None:
        """What a facility told of the jobs behind an update that is about to be taken."""
        self.journal(number).append("jobs", facility=site.name, jobs=jobs)

    def jobs(self, number: int, site: Site) -> list[dict[str, Any]]:
        told = self.journal(number).records("jobs")
        return next((r["jobs"] for r in reversed(told) if r["facility"] == site.name), [])

    def count_failure(self, number: int, site: Site, why: str) -> None:
        """A facility that says no, or sends what is wrong, is asked a few times, then left out.

        Its job may be at work all the same: what comes of it is late.
        """
        self.journal(number).append("wrong", facility=site.name, state="wrong", why=why)
        state = self.state(number, site)
        if state.failures >= self.campaign.attempts:
            is_late = state.has_job or (not state.has_worked and self._is_late(number, site))
            self.leave_out(number, site, why, late=is_late)

    def _is_late(self, number: int, site: Site) -> bool:
        """Whether it is asked for the work of an earlier round."""
        return self.asked_round(number, site) < number

    def leave_out(self, number: int, site: Site, why: str, late: bool = False) -> None:
        """Go on without a facility; what it is late with may still come, as stale work."""
        asked = self.asked_round(number, site)
        facts = {"facility": site.name, "why": why, "late": late, "asked": asked}
        self.journal(number).append("left out", **facts)

    def leave_out_late(self, number: int) -> None:
        """Only what was begun may still come: of who never answered the next round is asked."""
        for site in self.unsettled(number):
            state = self.state(number, site)
            is_late = state.has_worked or self._is_late(number, site)
            why = f"no update after {self.campaign.deadline_minutes:g} minutes: {state.text}"
            self.leave_out(number, site, why, late=is_late)


def _facts(record: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in record.items() if n not in ("event", "time", "facility")}


def checked_campaign(values: dict[str, Any]) -> Campaign:
    """Plain values to settings; `UserError` names the first that is wrong."""
    hint = "fix it in hydra_conf/federation/NAME.yaml, whose first line is '# @package _global_'; "
    hint += "atoll federate --dry-run federation=demo prints every setting"
    return checked_settings(Campaign, values, "campaign setting ", hint)


def settings_file(folder: Path) -> Path:
    return folder / "campaign.json"


def load_store(folder: Path, settings: Path | None = None) -> CampaignStore:
    """The campaign in a folder, by the settings it keeps, or by another file of them."""
    values = read_settings(settings or settings_file(folder))
    if values is None:
        hint = "begin it (atoll federate federation=NAME), or type this where it was begun"
        raise UserError(f"no campaign in {folder}", hint)
    return CampaignStore(checked_campaign(values), folder.absolute())


def read_settings(path: Path) -> dict[str, Any] | None:
    """The settings that a campaign keeps; None where there are none."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ValueError("it is no plain file")
        if path.stat().st_size > MAX_SETTINGS_BYTES:
            raise ValueError(f"it has {path.stat().st_size:,} bytes")
        values = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read: {first_line(error)}",
            "get it back, or begin another campaign: name=NAME",
        ) from None
    if not isinstance(values, dict) or not {"name", "rounds", "sites"} <= values.keys():
        raise UserError(
            f"{path} has no settings of a campaign: the folder is a facility's",
            "give a campaign's, or to a campaign another place here: folder=FOLDER",
        )
    return values
