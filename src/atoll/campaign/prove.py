"""The statement of a campaign's model: its settings, and of each round updates, model and journal.

Written by the coordinator when the campaign ends; the proof of each round is in what is kept of it.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.first_model import merge_settings
from atoll.campaign.journal import round_name
from atoll.campaign.model_card import campaign_card
from atoll.campaign.signing import OF_MODELS, sign
from atoll.campaign.store import NONCES, CampaignStore, settings_file
from atoll.proof.prove import prove
from atoll.proof.statement import (
    NAME,
    SCORES,
    SIGNATURE,
    Made,
    Resource,
    existing,
    grown,
    remove_cut_off,
    resource,
    said,
)

Job = dict[str, Any]  # of settings/exchange.py's JobRecord, with facility and round


def prove_campaign(store: CampaignStore, last: int) -> None:
    """Write provenance.json into the export of round `last`, signed where there is a key."""
    export, folder = store.export(last), store.folder
    for number in range(1, last + 1):  # a round that was the last one before there were more
        _remove_cut_off_merge(store, number)
    settings = settings_file(store.round(last))  # a campaign that goes on may change its own
    run_dir.write_whole(settings, settings_file(folder).read_bytes())
    names = [settings.relative_to(folder).as_posix(), f"{round_name(0)}/run.yaml"]
    names += _first_export(store)
    for number in range(last + 1):
        names.append(f"{round_name(number)}/global/manifest.json")
        for path in store.updates(number):
            update = path.relative_to(folder).as_posix()
            beside = ("manifest.json", "manifest.json.sig", "provenance.json")
            names += [f"{update}/{name}" for name in beside]
    materials = [resource("campaign", folder, name) for name in existing(folder, names)]
    began = store.journal(1).records()[:1]
    jobs = _jobs(store, last)
    made = Made(
        "campaign",
        store.campaign.name,
        materials,
        _journals(store, last),
        float(began[0]["time"]) if began else None,
        _accounting(store, last, jobs),
        jobs,
        _untold(store, last, jobs),
    )
    (export / SIGNATURE).unlink(missing_ok=True)
    prove(export, made, campaign_card(store, last, jobs), {})
    sign_model(store, last)


def _remove_cut_off_merge(store: CampaignStore, number: int) -> None:
    """Remove what a kill left of a model's merge, or beside its proof."""
    remove_cut_off(store.export(number))
    for path in store.model(number).glob(".merged.*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def sign_model(store: CampaignStore, last: int) -> None:
    """By the campaign's key, if it has one; also where a kill came between proof and signature.

    What a kill left beside the proof goes: `atoll verify` would refuse the model for it.
    """
    export, key = store.export(last), store.campaign.signing_key
    remove_cut_off(export, f"{SIGNATURE}.*")
    merge_settings(export).unlink(missing_ok=True)
    if key is not None and not (export / SIGNATURE).is_file():
        sign(export / NAME, Path(key).expanduser(), OF_MODELS)


def _first_export(store: CampaignStore) -> list[str]:
    """What the first model has beside its weights: all later ones have it from there."""
    export = store.model(0) / "export"
    return [
        path.relative_to(store.folder).as_posix()
        for path in sorted(export.rglob("*"))
        if path.suffix != ".safetensors" and path.name != SCORES
    ]


def _journals(store: CampaignStore, last: int) -> list[Resource]:
    names = [f"{round_name(number)}/journal.jsonl" for number in range(1, last + 1)]
    names += [f"{round_name(number)}/losses/journal.jsonl" for number in range(1, last + 1)]
    names.append(NONCES)
    return [grown("campaign", store.folder, name) for name in existing(store.folder, names)]


def _jobs(store: CampaignStore, last: int) -> list[Job]:
    """What facilities told of the jobs behind their updates, as they stood when these were made."""
    return [
        {"facility": site.name, "round": number, **job}
        for number in range(1, last + 1)
        for site in store.facilities(last)
        for job in store.jobs(number, site)
    ]


def _accounting(store: CampaignStore, last: int, jobs: list[Job]) -> Resource | None:
    if not jobs:
        return None
    file = run_dir.accounting_file(store.round(last))
    content = {"format_version": 1, "from": "facilities", "jobs": jobs}
    run_dir.write_whole(file, json.dumps(content, indent=1) + "\n")
    return resource("campaign", store.folder, file.relative_to(store.folder).as_posix())


def _untold(store: CampaignStore, last: int, jobs: list[Job]) -> list[Resource]:
    """The gap, with the names of the facilities."""
    told = {job["facility"] for job in jobs}
    names = [site.name for site in store.facilities(last) if site.name not in told]
    why = f"nothing was told by {', '.join(names)}: no Slurm, or no accounting"
    return [said("accounting", jobs=why)] if names else []
