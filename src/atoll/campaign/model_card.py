"""The model card of a campaign's export."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from atoll.campaign.asked import composed_here
from atoll.campaign.store import CampaignStore
from atoll.errors import UserError
from atoll.proof.card import Rows, card, hub_name
from atoll.proof.made_with import in_words, made_with
from atoll.proof.statement import instant
from atoll.settings import Run, load_run
from atoll.settings.exchange import read_manifest
from atoll.settings.federation import Campaign

OF_RUNS: dict[str, Callable[[Run], Any]] = {
    "Task": lambda run: run.task.name,
    "Tokens of a sample": lambda run: run.data.sequence_tokens,
    "Optimizer": lambda run: run.optimizer.name,
    "Highest learning rate": lambda run: run.optimizer.learning_rate,
    "Computed in": lambda run: run.precision.compute,
    "Seed": lambda run: run.seed,
}
METADATA = "__metadata__"  # beside the tensors in a header of safetensors
Job = dict[str, Any]  # of settings/exchange.py's JobRecord, with facility and round


def campaign_card(store: CampaignStore, last: int, jobs: list[Job]) -> str:
    """What the campaign knows, and what facilities say of the runs behind their updates."""
    campaign, sites = store.campaign, store.facilities(last)
    updates = [folder for n in range(1, last + 1) for folder in _in_the_model(store, n)]
    manifests = [read_manifest(folder) for folder in updates]
    counted = sum(len(store.model_manifest(n)["weights"]) for n in range(1, last + 1))
    is_whole, parameters = len(updates) == counted, _parameters(store.export(last))
    tokens = sum(m.tokens for m in manifests)
    passes = _passes(store)
    times = [record["time"] for n in range(1, last + 1) for record in store.journal(n).records()]
    parts: dict[str, Rows] = {
        "Model": _model(store, last, parameters),
        "Training data": [
            (site.name, ", ".join(sorted({m.data for m in manifests if m.facility == site.name})))
            for site in sites
        ],
        "Training": [
            ("Began", instant(times[0]) if times else None),
            ("Hours, with pauses", f"{(max(times) - min(times)) / 3600:.3g}" if times else None),
            ("Rounds", last),
            ("Facilities", ", ".join(site.name for site in sites)),
            ("Steps of a facility in a round", _steps(campaign)),
            ("Samples of a step", campaign.batch_samples),
            *_asked_of_runs(store),
            ("Tokens, as facilities count", f"{tokens:,}" if is_whole else None),
            (
                f"Operations, FLOPs, {passes or 'some'} for each parameter and token",
                f"{passes * parameters * tokens:.3g}" if is_whole and passes else None,
            ),
            ("Weighed, combined, updated", _rule(campaign)),
            ("Encoding of updates, of the model", f"{campaign.codec}, {campaign.global_codec}"),
        ],
        "Evaluation on held-out text": [("Loss, mean over facilities", _loss(store, last))],
        "Hardware and energy": [
            ("Images", ", ".join(sorted({m.image for m in manifests}))),
            ("Node-hours, as schedulers count", _node_hours(jobs)),
            ("Energy, kWh", _kilowatt_hours(jobs)),
        ],
        "Made with, as facilities say": _made_with(updates),
    }
    return card(campaign.name, parts, {"library_name": "transformers", "tags": ["atoll"]})


def _in_the_model(store: CampaignStore, number: int) -> list[Path]:
    """The updates of a round that weigh anything in its model."""
    weights = store.model_manifest(number)["weights"]
    return [folder for folder in store.updates(number) if folder.parent.name in weights]


def _model(store: CampaignStore, last: int, parameters: int) -> Rows:
    config = json.loads((store.export(last) / "config.json").read_text())
    yield "Architecture", config.get("model_type")
    yield "Positions", config.get("max_position_embeddings")
    yield "Parameters", f"{parameters:,}"
    yield "Begun from", _begun_from(store)
    yield "Input and output", _output(store)
    yield "Numbers", store.campaign.rule.dtype
    if (lora := store.campaign.lora) is not None:
        yield "LoRA, merged into the weights", f"rank {lora.rank}"


def _first_run(store: CampaignStore) -> Run | None:
    try:
        return load_run(store.round(0) / "run.yaml")
    except UserError:
        return None


def _output(store: CampaignStore) -> str | None:
    run = _first_run(store)
    if run is None:
        return None
    return "text; text or labels" if run.data.classes else "text; text"


def _begun_from(store: CampaignStore) -> str | None:
    """What the first model's run says: a name of the hub, or random weights."""
    run = _first_run(store)
    if run is None:
        return None
    if run.model.source is None:
        return f"random weights of seed {run.seed}"
    return hub_name(run.model.source) or "a local folder"


def _asked_of_runs(store: CampaignStore) -> Rows:
    """What facilities' runs are asked for, as the clone here knows it; all that differ."""
    runs = [composed_here(store.campaign, site) for site in store.campaign.sites]
    for label, of in OF_RUNS.items():
        values = [str(of(run)) if run is not None else "" for run in runs]
        yield label, ", ".join(dict.fromkeys(values)) if all(values) else None


def _passes(store: CampaignStore) -> int | None:
    """Operations of a token for each parameter: beside adapters the rest has no gradients."""
    if store.campaign.lora is not None:
        return 4
    runs = [composed_here(store.campaign, site) for site in store.campaign.sites]
    found = {6 if run.model.lora is None else 4 for run in runs if run is not None}
    return found.pop() if len(found) == 1 and None not in runs else None


def _parameters(export: Path) -> int:
    """Numbers in an export's tensors, by the headers of its files: a tied head is written once."""
    count = 0
    for path in sorted(export.glob("*.safetensors")):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        count += sum(math.prod(x["shape"]) for name, x in header.items() if name != METADATA)
    return count


def _made_with(updates: Sequence[Path]) -> Rows:
    """Of each facility the images, commits and libraries of all its runs, each once."""
    for facility in sorted({folder.parent.name for folder in updates}):
        own = [folder for folder in updates if folder.parent.name == facility]
        said = dict.fromkeys(in_words(made_with(folder)) for folder in own)
        yield facility, "; ".join(filter(None, said))


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
