"""What a campaign's model was made from: each round's signed updates, journal and model."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.campaign.journal import round_name
from atoll.campaign.signing import is_known, refuse_unsigned
from atoll.campaign.store import CampaignStore, load_store, settings_file
from atoll.errors import UserError
from atoll.proof.made_with import TOKENIZER, in_words, made_with, tokenizer_of
from atoll.proof.statement import NAME, UNREADABLE, logs_of, materials_of
from atoll.settings.exchange import manifest_file, read_manifest, signature_file
from atoll.verify.again import again, same_bytes
from atoll.verify.export import files_in
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
    numbers = rounds(statement)
    yield from resources([*materials_of(statement), *logs_of(statement)], {"campaign": folder})
    if folder is None:
        return
    _refuse_other_round(export, folder, numbers[-1])
    store = load_store(folder)
    allowed = signers or _allowed(store)
    for number in numbers if only_round is None else [only_round - 1, only_round]:
        if not store.has_model(number):
            yield Line("not at hand", f"round {number}: its model")
            continue
        if number and only_round in (None, number):
            yield from _updates(store, number, allowed, _tokenizer(statement))
        yield _model(store, number)
        if deep and number and only_round in (None, number):
            yield again(store, number, export if number == numbers[-1] else None)


def rounds(statement: dict[str, Any]) -> list[int]:
    """The rounds whose models are stated: all of them, the first model's 0 among them."""
    names = (OF_MODEL.fullmatch(entry["name"]) for entry in materials_of(statement))
    stated = sorted(int(name[1]) for name in names if name)
    if len(stated) < 2 or stated != list(range(len(stated))):
        said = ", ".join(map(str, stated)) or "none"
        raise differs(f"{NAME} states the models of rounds {said}: not of each, from 0 to its own")
    return stated


def _refuse_other_round(export: Path, folder: Path, last: int) -> None:
    """An export in its place is that of the last round that its statement tells of."""
    own = export.relative_to(folder).parts[0] if export.is_relative_to(folder) else round_name(last)
    if own != round_name(last):
        raise differs(f"{export / NAME} tells of the rounds up to {last}, not of its own")


def own_signers(folder: Path | None, identity: str) -> Path | None:
    """The campaign's own allowed signers, where they have somebody of this name."""
    if folder is None or not settings_file(folder).is_file():
        return None
    try:
        allowed = _allowed(load_store(folder))
    except (UserError, *UNREADABLE):  # it is not as stated: that is named when files are compared
        return None
    return allowed if allowed is not None and is_known(identity, allowed) else None


def _allowed(store: CampaignStore) -> Path | None:
    named = store.campaign.allowed_signers
    path = None if named is None else Path(named).expanduser()
    return path if path is not None and path.is_file() else None


def _tokenizer(statement: dict[str, Any]) -> str:
    """The sha256 of the export's tokenizer, as stated; empty where it has none."""
    digests = {entry["name"]: entry["digest"]["sha256"] for entry in statement["subject"]}
    return str(digests.get(TOKENIZER, ""))


def _updates(
    store: CampaignStore, number: int, signers: Path | None, tokenizer: str
) -> Iterator[Line]:
    """The files of a round's updates, as their manifests have them."""
    manifest = store.model_manifest(number)
    left_out = {**manifest["rejected"], **manifest.get("unreadable", {})}
    kept = {folder.parent.name: folder for folder in store.updates(number)}
    if "held" in manifest:
        yield Line("as stated", f"round {number}: held, of no update: {manifest['held']}")
    elif (
        unused := (taken(store, number) | kept.keys())
        - manifest["weights"].keys()
        - left_out.keys()
    ):
        who = ", ".join(sorted(unused))
        raise differs(f"{store.model(number)} was made without {who}, whose update was taken")
    if not kept and manifest["weights"]:
        yield Line("not at hand", f"round {number}: its updates")
    for facility, update in kept.items():
        if facility in left_out:  # nothing of it is in the model
            yield Line("not at hand", f"round {number}: {facility} was left out")
            continue
        yield from _update(update, number, facility, signers)
        if (read_with := tokenizer_of(update)) and read_with != tokenizer:
            what = f"{facility} says that it read with another {TOKENIZER} than this export's"
            yield Line("not at hand", f"round {number}: {what}")


def taken(store: CampaignStore, number: int) -> set[str]:
    """The facilities whose update came and stayed, as the round's journal tells."""
    last = {
        record["facility"]: record["event"]
        for record in store.journal(number).records("received", "wrong", "left out")
    }
    return {facility for facility, event in last.items() if event == "received"}


def _update(update: Path, number: int, facility: str, signers: Path | None) -> Iterator[Line]:
    """One facility's: who signed it, its files and no others, and what it says of its run."""
    if signers is not None:
        refuse_unsigned(manifest_file(update), signers, facility)
    manifest = read_manifest(update)
    for name, facts in manifest.all_files.items():
        refuse_changed(update / name, facts.bytes, facts.sha256)
    known = {*manifest.all_files, manifest_file(update).name, signature_file(update).name}
    for path in files_in(update):
        if path.relative_to(update).as_posix() not in known:
            raise differs(f"{path} is not in the update's manifest")
    how = "nobody's key is known" if signers is None else "signed, as allowed"
    yield Line("as stated", f"round {number}: the update of {facility} ({how})")
    said = in_words(made_with(update)) or "nothing"
    yield Line("not at hand", f"round {number}: {facility} says of its run: {said}")


def _model(store: CampaignStore, number: int) -> Line:
    """The files of a round's model, as its manifest has them; the first export has the same."""
    master = store.model(number) / "master"
    for name, sha256 in store.model_manifest(number)["master"].items():
        refuse_changed(master / name, None, sha256)
    if number == 0 and (store.model(0) / "export").is_dir():
        for path in sorted(master.glob("*.safetensors")):
            same_bytes(path, store.model(0) / "export" / path.name)
    return Line("as stated", f"round {number}: its model")
