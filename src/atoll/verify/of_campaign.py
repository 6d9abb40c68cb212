"""What a campaign's model was made from: signed updates, and each round's aggregation anew."""

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.campaign.average import aggregate_words
from atoll.campaign.first_model import merge_adapter
from atoll.campaign.signing import refuse_unsigned
from atoll.campaign.store import CampaignStore, load_store
from atoll.campaign.transfer import atoll_here, run_atoll
from atoll.proof.made_with import in_words, made_with
from atoll.proof.statement import logs_of, materials_of
from atoll.settings.exchange import manifest_file, read_manifest
from atoll.settings.federation import Rule
from atoll.verify.lines import Line, differs, refuse_changed, resources

OF_MODEL = re.compile(r"campaign/round-(\d{3,})/global/manifest\.json")


def made_it(
    statement: dict[str, Any],
    folder: Path | None,
    export: Path,
    signers: Path | None,
    deep: bool,
    only_round: int | None = None,
) -> Iterator[Line]:
    """Everything at hand; `deep`: the aggregation of every kept round is done again.

    only_round: of this round alone.
    """
    yield from resources([*materials_of(statement), *logs_of(statement)], {"campaign": folder})
    if folder is None:
        return
    store = load_store(folder)
    allowed = signers or _allowed(store)
    numbers = rounds(statement)
    for number in numbers if only_round is None else [only_round - 1, only_round]:
        if number and only_round in (None, number):
            yield from _updates(store, number, allowed)
        yield _model(store, number)
        if deep and number and only_round in (None, number):
            yield _again(store, number, export if number == numbers[-1] else None)


def rounds(statement: dict[str, Any]) -> list[int]:
    """The rounds whose models are stated, the first model's 0 among them."""
    names = (OF_MODEL.fullmatch(entry["name"]) for entry in materials_of(statement))
    return sorted(int(name[1]) for name in names if name)


def _allowed(store: CampaignStore) -> Path | None:
    named = store.campaign.allowed_signers
    path = None if named is None else Path(named).expanduser()
    return path if path is not None and path.is_file() else None


def _updates(store: CampaignStore, number: int, signers: Path | None) -> Iterator[Line]:
    """The files of a round's updates, as their manifests have them."""
    if not store.updates(number) and store.model_manifest(number)["weights"]:
        yield Line("not at hand", f"round {number}: its updates")
    manifest = store.model_manifest(number)
    left_out = {**manifest["rejected"], **manifest.get("unreadable", {})}
    for update in store.updates(number):
        facility = update.parent.name
        if facility in left_out:  # nothing of it is in the model
            yield Line("not at hand", f"round {number}: {facility} was left out")
            continue
        if signers is not None:
            refuse_unsigned(manifest_file(update), signers, facility)
        for name, facts in read_manifest(update).all_files.items():
            refuse_changed(update / name, facts.bytes, facts.sha256)
        how = "nobody's key is known" if signers is None else "signed, as allowed"
        yield Line("as stated", f"round {number}: the update of {facility} ({how})")
        said = in_words(made_with(update)) or "nothing"
        yield Line("not at hand", f"round {number}: {facility} says of its run: {said}")


def _model(store: CampaignStore, number: int) -> Line:
    """The files of a round's model, as its manifest has them."""
    master = store.model(number) / "master"
    for name, sha256 in store.model_manifest(number)["master"].items():
        refuse_changed(master / name, None, sha256)
    return Line("as stated", f"round {number}: its model")


def _again(store: CampaignStore, number: int, export: Path | None) -> Line:
    """Aggregate the kept updates once more: the same weights, bit for bit, and the same export."""
    stated = store.model_manifest(number)
    stated["rule"] = Rule.model_validate(stated["rule"]).model_dump()  # it may have had fewer words
    updates = store.updates(number)
    absent = set(stated["weights"]) - {folder.parent.name for folder in updates}
    if absent or not store.has_model(number - 1):
        return Line("not at hand", f"round {number}: what its aggregation read")
    with tempfile.TemporaryDirectory(prefix="atoll-verify-") as scratch:
        out = Path(scratch) / "global"
        folders = [] if "held" in stated else updates
        words = aggregate_words(store, number, folders, out)
        run_atoll([*atoll_here(), *words], f"round {number} again")
        again = json.loads((out / "manifest.json").read_text())
        for one in (again, stated):  # may change in a campaign's life, and makes no other model
            one["rule"].pop("below_quorum")
        for name in ("weights", "rejected", "rule", "digest"):
            if again.get(name) != stated.get(name):
                raise differs(
                    f"{store.model(number)}: the updates of round {number} make another model: "
                    f"{name} is {again.get(name)}, {stated.get(name)} was stated"
                )
        made = out / "export"
        if export and store.campaign.lora is not None:
            made = out / "merged"
            merge_adapter(store, out / "master", made)
        for path in sorted(made.glob("*.safetensors")) if export else []:
            same_bytes(path, (export or out) / path.name)
    return Line("as stated", f"round {number}: aggregated again, bit for bit ({len(updates)})")


def same_bytes(made: Path, stated: Path) -> None:
    """Raise `UserError` unless two files have the same content."""
    with open(made, "rb") as ours, open(stated, "rb") as other:
        while piece := ours.read(4 << 20):
            if piece != other.read(len(piece)):
                raise differs(f"{stated} is not what its updates make")
        if other.read(1):
            raise differs(f"{stated} is not what its updates make")
