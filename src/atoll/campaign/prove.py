"""The statement of a campaign's model: its settings, and of each round updates, model and journal.

Written by the coordinator when the campaign ends; the proof of each round is in what is kept of it.
"""

import json
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.journal import round_name
from atoll.campaign.signing import OF_MODELS, sign
from atoll.campaign.store import CampaignStore, settings_file
from atoll.proof.card import Rows, card
from atoll.proof.prove import prove
from atoll.proof.statement import NAME, Made, Resource, existing, grown, resource
from atoll.settings.exchange import read_manifest
from atoll.settings.federation import Campaign

Job = dict[str, Any]  # of settings/exchange.py's JobRecord, with facility and round


def prove_campaign(store: CampaignStore, last: int) -> None:
    """Write provenance.json into the export of round `last`, signed where there is a key."""
    export, folder = store.export(last), store.folder
    names = [settings_file(folder).name, f"{round_name(0)}/run.yaml"]
    for number in range(last + 1):
        names.append(f"{round_name(number)}/global/manifest.json")
        for path in store.updates(number):
            update = path.relative_to(folder).as_posix()
            names += [f"{update}/manifest.json", f"{update}/manifest.json.sig"]
    materials = [resource("campaign", folder, name) for name in existing(folder, names)]
    began = store.journal(1).records()[:1]
    jobs = _jobs(store, last)
    made = Made(
        "campaign",
        store.campaign.name,
        materials,
        _journals(store, last),
        float(began[0]["time"]) if began else None,
        _accounting(folder, jobs),
        jobs,
        _untold(store, jobs),
    )
    prove(export, made, _card(store, last, jobs), {})
    if key := store.campaign.signing_key:
        sign(export / NAME, Path(key).expanduser(), OF_MODELS)


def _journals(store: CampaignStore, last: int) -> list[Resource]:
    names = [f"{round_name(number)}/journal.jsonl" for number in range(1, last + 1)]
    names.append(f"{round_name(last)}/losses/journal.jsonl")
    return [grown("campaign", store.folder, name) for name in existing(store.folder, names)]


def _jobs(store: CampaignStore, last: int) -> list[Job]:
    """What facilities told of the jobs behind their updates, as they stood when these were made."""
    return [
        {"facility": site.name, "round": number, **job}
        for number in range(1, last + 1)
        for site in store.campaign.sites
        for job in store.state(number, site).answer.get("jobs") or []
    ]


def _accounting(folder: Path, jobs: list[Job]) -> Resource | None:
    if not jobs:
        return None
    file = run_dir.accounting_file(folder)
    content = {"format_version": 1, "from": "facilities", "jobs": jobs}
    run_dir.write_whole(file, json.dumps(content, indent=1) + "\n")
    return resource("campaign", folder, file.name)


def _untold(store: CampaignStore, jobs: list[Job]) -> list[Resource]:
    """The gap, with the names of the facilities."""
    told = {job["facility"] for job in jobs}
    names = [site.name for site in store.campaign.sites if site.name not in told]
    why = f"nothing was told by {', '.join(names)}: no Slurm, or no accounting"
    return [{"name": "accounting", "annotations": {"jobs": why}}] if names else []


def _card(store: CampaignStore, last: int, jobs: list[Job]) -> str:
    """What the campaign knows; of its data and hardware each facility's own runs do."""
    campaign, sites, lora = store.campaign, store.campaign.sites, store.campaign.lora
    manifests = [read_manifest(folder) for n in range(1, last + 1) for folder in store.updates(n)]
    parts: dict[str, Rows] = {
        "Model": [
            ("Begun from", "the model of round 0"),
            ("Numbers", campaign.rule.dtype),
            *([("LoRA, merged into the weights", f"rank {lora.rank}")] if lora else []),
        ],
        "Training data": [
            (site.name, ", ".join(sorted({m.data for m in manifests if m.facility == site.name})))
            for site in sites
        ],
        "Training": [
            ("Rounds", last),
            ("Facilities", ", ".join(site.name for site in sites)),
            ("Steps of a facility in a round", _steps(campaign)),
            ("Tokens, as facilities count", f"{sum(m.tokens for m in manifests):,}"),
            ("Weighed, combined, updated", _rule(campaign)),
            ("Encoding of updates, of the model", f"{campaign.codec}, {campaign.global_codec}"),
        ],
        "Evaluation on held-out text": [("Loss, mean over facilities", _loss(store, last))],
        "Hardware and energy": [
            ("Images", ", ".join(sorted({m.image for m in manifests}))),
            ("Node-hours, as schedulers count", _node_hours(jobs)),
            ("Energy, kWh", _kilowatt_hours(jobs)),
        ],
    }
    return card(campaign.name, parts, {"library_name": "transformers", "tags": ["atoll"]})


def _node_hours(jobs: list[Job]) -> str | None:
    known = [job for job in jobs if job["nodes"] and job["elapsed_seconds"] is not None]
    spent = sum(job["nodes"] * job["elapsed_seconds"] for job in known) / 3600
    return f"{spent:.3g} of {len(known)} jobs" if known else None


def _kilowatt_hours(jobs: list[Job]) -> str | None:
    known = [job["energy_joules"] for job in jobs if job["energy_joules"]]
    return f"{sum(known) / 3.6e6:.3g} of {len(known)} of {len(jobs)} jobs" if known else None


def _rule(campaign: Campaign) -> str:
    return f"{campaign.rule.weigh}, {campaign.rule.combine}, {campaign.rule.update}"


def _steps(campaign: Campaign) -> str:
    mean = ", in the mean of the facilities" if campaign.steps_by == "queue" else ""
    return f"{campaign.steps}{mean}"


def _loss(store: CampaignStore, last: int) -> str | None:
    """Of the model itself where they were asked for it, else of their own of the last round."""
    if (loss := store.global_loss(last)) is not None:
        return f"{loss:.4g}"
    losses = store.mean_losses(last)
    return None if losses is None else f"{losses[-1]:.4g} (of their own models of round {last})"
