"""The statement of a campaign's model: its settings, and of each round updates, model and journal.

Written by the coordinator when the campaign ends; the proof of each round is in what is kept of it.
"""

from pathlib import Path

from atoll.campaign.journal import round_name
from atoll.campaign.signing import OF_MODELS, sign
from atoll.campaign.store import CampaignStore, settings_file
from atoll.proof.statement import NAME, Resource, existing, grown, resource, write_statement


def prove_campaign(store: CampaignStore, last: int) -> Path:
    """Write provenance.json into the export of round `last`; the export."""
    export, folder = store.model(last) / "export", store.folder
    names = [settings_file(folder).name, f"{round_name(0)}/run.yaml"]
    for number in range(last + 1):
        names.append(f"{round_name(number)}/global/manifest.json")
        for site in store.campaign.sites if number else []:
            update = store.update(number, site).relative_to(folder).as_posix()
            names += [f"{update}/manifest.json", f"{update}/manifest.json.sig"]
    materials = [resource("campaign", folder, name) for name in existing(folder, names)]
    write_statement(export, "campaign", store.campaign.name, materials, _journals(store, last))
    if key := store.campaign.signing_key:
        sign(export / NAME, Path(key).expanduser(), OF_MODELS)
    return export


def _journals(store: CampaignStore, last: int) -> list[Resource]:
    names = [f"{round_name(number)}/journal.jsonl" for number in range(1, last + 1)]
    return [grown("campaign", store.folder, name) for name in existing(store.folder, names)]
