"""What a campaign's model was made from: each round's signed updates, journal and model."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.journal import round_name
from atoll.campaign.lasting_settings import OF_SITES, changed_settings
from atoll.campaign.signing import is_known, refuse_unsigned
from atoll.campaign.store import CampaignStore, load_store, settings_file
from atoll.errors import UserError
from atoll.proof.made_with import TOKENIZER, in_words, made_with, tokenizer_of
from atoll.proof.statement import NAME, UNREADABLE, is_file, logs_of, materials_of
from atoll.settings.exchange import manifest_file, read_manifest, signature_file
from atoll.verify.again import again, same_bytes
from atoll.verify.export import files_in
from atoll.verify.first_model import refuse_more_than_first
from atoll.verify.lines import Line, differs, refuse_changed, resources

ROUND = re.compile(r"round-[0-9]{3,}")
OF_MODEL = re.compile(r"campaign/round-([0-9]{3,})/global/manifest\.json")


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
    store = _stated(statement, folder)
    _refuse_other_settings(store)
    allowed, counted = signers or _allowed(store), dict[str, int]()
    for number in numbers if only_round is None else [only_round - 1, only_round]:
        if not store.has_model(number):
            yield Line("not at hand", f"round {number}: its model")
            continue
        if number and only_round in (None, number):
            came = taken(store, number, _stated_bytes(statement, store, number))
            yield from _updates(store, number, came, allowed, _tokenizer(statement), counted)
        if number == 0:
            refuse_more_than_first(store.model(0), _names(statement))
        yield _model(store, number)
        if deep and number and only_round in (None, number):
            yield from again(store, number, export if number == numbers[-1] else None)


def rounds(statement: dict[str, Any]) -> list[int]:
    """The rounds whose models are stated: all of them, the first model's 0 among them."""
    names = map(OF_MODEL.fullmatch, (f"campaign/{name}" for name in _names(statement)))
    numbers = (int(name[1]) for name in names if name and name[1] == f"{int(name[1]):03d}")
    stated = sorted(numbers)
    if len(stated) < 2 or stated != list(range(len(stated))):
        said = ", ".join(map(str, stated)) or "none"
        raise differs(f"{NAME} states the models of rounds {said}: not of each, from 0 to its own")
    return stated


def _refuse_other_round(export: Path, folder: Path, last: int) -> None:
    """An export in a round's place is that of the last round that its statement tells of.

    Of a link, where it leads, too; a copy by another name is in no round's place.
    """
    for place, inside in ((export, folder), (export.resolve(), folder.resolve())):
        own = place.relative_to(inside).parts[0] if place.is_relative_to(inside) else ""
        if ROUND.fullmatch(own) and own != round_name(last):
            raise differs(f"{export / NAME} tells of the rounds up to {last}, not of its own")


def _names(statement: dict[str, Any]) -> set[str]:
    """Of the campaign's files that are stated with their digest, below its folder."""
    place = "campaign/"
    named = (entry["name"] for entry in materials_of(statement) if is_file(entry))
    return {name.removeprefix(place) for name in named if name.startswith(place)}


def _stated(statement: dict[str, Any], folder: Path) -> CampaignStore:
    """The campaign with the settings that are stated: its own may have changed as it went on."""
    names = _names(statement)
    last = settings_file(folder / round_name(rounds(statement)[-1]))
    for file in (last, settings_file(folder)):
        if file.relative_to(folder).as_posix() not in names:
            continue
        if not file.is_file():
            raise differs(f"{file} is missing, and so are the settings of what made this model")
        return load_store(folder, file)
    raise differs(f"{NAME} states no settings of a campaign")


def _refuse_other_settings(store: CampaignStore) -> None:
    """What the campaign has now may be other than stated only in what may change in its life.

    And in how facilities are reached: what each did stands in the rounds.
    """
    now = load_store(store.folder).campaign.model_dump(mode="json")
    for name, stated, other in changed_settings(store.campaign.model_dump(mode="json"), now):
        if name.startswith(OF_SITES):
            continue
        raise differs(f"{settings_file(store.folder)} has {name}={other}, {stated} was stated")


def own_signers(statement: dict[str, Any], folder: Path | None, identity: str) -> Path | None:
    """The campaign's own allowed signers, where they have somebody of this name."""
    if folder is None:
        return None
    try:
        allowed = _allowed(_stated(statement, folder))
    except (UserError, *UNREADABLE):  # it is not as stated: that is named when files are compared
        return None
    return allowed if allowed is not None and is_known(identity, allowed) else None


def _allowed(store: CampaignStore) -> Path | None:
    named = store.campaign.allowed_signers
    try:
        path = None if named is None else Path(named).expanduser()
        return path if path is not None and path.is_file() else None
    except (OSError, RuntimeError):  # of a person who is not here, or no name of a file
        return None


def _tokenizer(statement: dict[str, Any]) -> str:
    """The sha256 of the export's tokenizer, as stated; empty where it has none."""
    digests = {entry["name"]: entry["digest"]["sha256"] for entry in statement["subject"]}
    return str(digests.get(TOKENIZER, ""))


def _stated_bytes(statement: dict[str, Any], store: CampaignStore, number: int) -> int:
    """How much of a round's journal is stated; what follows is anybody's."""
    name = f"campaign/{store.journal(number).path.relative_to(store.folder).as_posix()}"
    stated = [entry for entry in logs_of(statement) if entry["name"] == name]
    return int(stated[0]["annotations"]["bytes"]) if stated else 0


def _updates(
    store: CampaignStore,
    number: int,
    taken_ones: set[str],
    signers: Path | None,
    tokenizer: str,
    counted: dict[str, int],
) -> Iterator[Line]:
    """The files of a round's updates, as their manifests have them.

    taken_ones: whose update came, as stated. counted: the round of each update before, by its
    nonce; those of this one are added.
    """
    manifest = store.model_manifest(number)
    left_out = {**manifest["rejected"], **manifest.get("unreadable", {})}
    kept = {folder.parent.name: folder for folder in store.updates(number)}
    came = taken_ones | kept.keys()
    if "held" in manifest:
        yield _held(store, number, came, came - kept.keys())
    elif unused := came - manifest["weights"].keys() - left_out.keys():
        who = ", ".join(sorted(unused))
        raise differs(f"{store.model(number)} was made without {who}, whose update was taken")
    for facility in sorted(left_out.keys() - kept.keys()):
        why = f"the update of {facility}, which was left out ({left_out[facility]})"
        yield Line("not at hand", f"round {number}: {why}")
    for facility in sorted(manifest["weights"].keys() - kept.keys()):
        yield Line("not at hand", f"round {number}: the update of {facility}")
    for facility, update in kept.items():
        if facility in left_out:  # nothing of it is in the model
            yield Line("not at hand", f"round {number}: {facility} was left out")
            continue
        yield from _update(update, number, facility, signers)
        _refuse_other_request(store, number, update, counted)
        if (read_with := tokenizer_of(update)) and read_with != tokenizer:
            what = f"{facility} says that it read with another {TOKENIZER} than this export's"
            yield Line("not at hand", f"round {number}: {what}")


def _held(store: CampaignStore, number: int, came: set[str], gone: set[str]) -> Line:
    """A round of no update; whether it had to be is told by those that came, if they are there."""
    if gone and len(came) >= store.campaign.rule.quorum:
        who = f"{', '.join(sorted(gone))} sent updates, which are gone"
        return Line("not at hand", f"round {number}: whether it had to be held: {who}")
    why = store.model_manifest(number)["held"]
    return Line("as stated", f"round {number}: held, of no update: {why}")


def _refuse_other_request(
    store: CampaignStore, number: int, update: Path, counted: dict[str, int]
) -> None:
    """An update of this campaign, facility and round, or late within bounds; counted once."""
    said, campaign, path = read_manifest(update), store.campaign, manifest_file(update)
    stated = {
        "campaign": campaign.name,
        "facility": update.parent.name,
        "encoding": campaign.codec,
        "round": min(max(said.round, number - campaign.rule.max_staleness), number),
    }
    for name, value in stated.items():
        if getattr(said, name) != value:
            raise differs(f"{path} is of {name} {getattr(said, name)}, this is {value}")
    began_with = store.global_round(said.round)
    if store.has_model(began_with) and said.base != store.model_manifest(began_with)["digest"]:
        raise differs(f"{path} began with another model than that of round {began_with}")
    if said.nonce in counted:
        raise differs(f"{path} was counted in round {counted[said.nonce]} already")
    counted[said.nonce] = number


def taken(store: CampaignStore, number: int, stated_bytes: int) -> set[str]:
    """The facilities whose update came and stayed, as the stated part of a journal tells."""
    last = {
        record["facility"]: record["event"]
        for record in run_dir.records(store.journal(number).path, stated_bytes)
        if record["event"] in ("received", "wrong", "left out", "afresh")
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
    """The files of a round's model, as its manifest has them; the first export has the same.

    The digest that updates begin with is that of these files.
    """
    master, manifest = store.model(number) / "master", store.model_manifest(number)
    if (digest := run_dir.digest(manifest["master"], 64)) != manifest["digest"]:
        path = store.model(number) / "manifest.json"
        raise differs(f"{path} says digest {manifest['digest']}, its files make {digest}")
    for name, sha256 in manifest["master"].items():
        refuse_changed(master / name, None, sha256)
    if number == 0 and (store.model(0) / "export").is_dir():
        for path in sorted(master.glob("*.safetensors")):
            same_bytes(path, store.model(0) / "export" / path.name)
    return Line("as stated", f"round {number}: its model")
