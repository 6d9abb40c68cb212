"""A round's aggregation once more, from the updates that were kept: every file of its model."""

import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.campaign.average import aggregate_words, bases, held_words
from atoll.campaign.first_model import NoBase, merge_adapter
from atoll.campaign.store import CampaignStore
from atoll.campaign.transfer import atoll_here, run_atoll
from atoll.proof.statement import OWN
from atoll.settings.federation import Rule
from atoll.verify.export import files_in
from atoll.verify.lines import Line, differs

# of a model's manifest: what has to be the same, for whom (why may name a folder), and what is
# summed in another order on another processor
ANEW, WHOM = ("weights", "rule", "digest", "base", "codec"), ("rejected", "unreadable")
ALIKE = 1e-4  # of each number's size
MEASURED = {"norms": 0.0, "norms_before": 0.0, "cosines": ALIKE}  # so much more: of at most 1
# of whole numbers, the same on every processor
COUNTED = (
    "claims",
    "averaged_rounds",
    "changed_rounds",
    "taken",
    "refused",
    "refused_in",
    "refused_rounds",
)
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
GENERATION, ENDS = "generation_config.json", "eos_token_id"
WRITER = "transformers_version"
VERSION = re.compile(rb'("transformers_version": ")[0-9A-Za-z.+-]{1,40}"')
MOST_MORE = 1000  # bytes of a file beside weights that another version wrote
# of this Atoll alone: what a campaign names, as its image, is never run; and nothing is fetched
HERE = ["env", "HF_HUB_OFFLINE=1", *atoll_here()]


def again(store: CampaignStore, number: int, export: Path | None) -> Iterator[Line]:
    """Aggregate the kept updates once more: the same files, bit for bit.

    export: where that of the last round is; it may have been moved.
    """
    stated, updates = store.model_manifest(number), store.updates(number)
    named = {*stated["weights"], *(who for name in WHOM for who in stated.get(name, {}))}
    absent = named - {folder.parent.name for folder in updates}
    before = store.model(number - 1)
    absent |= {part for part in _read_beside(store, number) if not (before / part).is_dir()}
    if absent or not all(map(store.has_model, bases(store, number))):
        yield Line("not at hand", f"round {number}: what its aggregation read")
        return
    with tempfile.TemporaryDirectory(prefix="atoll-verify-") as scratch:
        out = Path(scratch) / "global"
        about = _refuse_enough(store, number, updates, out) if "held" in stated else {}
        if any(about.values()) and "refused_rounds" not in stated:
            yield Line("not at hand", f"round {number}: whose updates were left out of it")
            about = {}  # as an older Atoll held it
        _aggregated(store, number, [] if "held" in stated else updates, out, **about)
        yield from _refuse_other_manifest(store, number, stated, out)
        if export is not None and store.campaign.lora is not None:
            yield from _merged(store, number, out)
        gone = _compared(store, number, out, export)
    of = f"0 of {len(updates)}" if "held" in stated else len(updates)
    without = f", but its {', '.join(gone)}: not kept" if gone else ""
    yield Line("as stated", f"round {number}: aggregated again, bit for bit ({of}){without}")


def _read_beside(store: CampaignStore, number: int) -> list[str]:
    """What a round reads of the model before it, beside its weights."""
    campaign = store.campaign
    remembers = campaign.rule.update != "replace" or campaign.global_codec != "fp32"
    return ["export", *(["memory"] if remembers and number > 1 else [])]


def _merged(store: CampaignStore, number: int, out: Path) -> Iterator[Line]:
    """The base with the adapters, where it is here; one with another digest is no gap."""
    if not store.has_model(0):
        shutil.rmtree(out / "merged", ignore_errors=True)
        yield Line("not at hand", f"round {number}: the first model, which says what was merged")
        return
    try:
        merge_adapter(store, out / "master", out / "merged", HERE)
    except NoBase as error:
        shutil.rmtree(out / "merged", ignore_errors=True)
        what = f"round {number}: the base, so its merge was not made again ({error.found})"
        yield Line("not at hand", what)


def _compared(store: CampaignStore, number: int, out: Path, export: Path | None) -> list[str]:
    """Every folder of the model that was made again; the names of those that were not kept."""
    gone, own = [], store.export(number).name
    made = {path.name: path for path in sorted(out.iterdir()) if path.is_dir()}
    for path in sorted(store.model(number).iterdir()):
        if path.name not in made and path.name not in (own, "manifest.json"):
            raise differs(f"{path} is nothing that its updates make")
    for name, folder in made.items():
        there = store.model(number) / name
        if export is not None and name == own:
            there = export
        if there.is_dir():
            before = store.model(number - 1) / "export" if name == "export" else None
            _refuse_other_files(folder, there, OWN if name == own else frozenset(), before)
        else:
            gone.append(name)
    return gone


def _aggregated(
    store: CampaignStore, number: int, updates: list[Path], out: Path, **about: Any
) -> dict[str, Any]:
    words = aggregate_words(store, number, updates, out, **about)
    answer: dict[str, Any] = json.loads(run_atoll([*HERE, *words], f"round {number} again"))
    return answer


def _refuse_enough(
    store: CampaignStore, number: int, updates: list[Path], out: Path
) -> dict[str, Any]:
    """A model is held where its updates are too few to make one; whose were left out, and why."""
    if len(updates) < store.campaign.rule.quorum:
        return held_words({})
    outcome = _aggregated(store, number, updates, out)
    if "short" not in outcome:
        raise differs(
            f"{store.model(number)} was held, and its {len(updates)} updates make a model"
        )
    return held_words(outcome)


def _refuse_other_manifest(
    store: CampaignStore, number: int, stated: dict[str, Any], out: Path
) -> Iterator[Line]:
    """The same weights of facilities, by the same rule, and the same master.

    What was measured, an older Atoll did not write, or of its one fragment alone; but none is older
    than that of the round before.
    """
    known_before = store.model_manifest(number - 1)
    again = json.loads((out / "manifest.json").read_text())
    rule = Rule.model_validate(stated["rule"]).model_dump()  # it may have had fewer words
    stated = stated | {"rule": rule}
    if isinstance(before := stated.get("norms_before"), list):
        stated["norms_before"] = {"0": before}
    for one in (again, stated):  # may change in a campaign's life, and makes no other model
        one["rule"].pop("below_quorum")
    same = {name: again.get(name) == stated.get(name) for name in ANEW}
    same |= {name: again.get(name, {}).keys() == stated.get(name, {}).keys() for name in WHOM}
    for name in (*MEASURED, *COUNTED):
        if name in stated:
            same[name] = _is_same(name, again.get(name), stated[name])
        elif name in known_before:
            same[name] = False
        else:
            yield Line(
                "not at hand", f"round {number}: its {name}, which its manifest does not have"
            )
    for name in (name for name, is_same in same.items() if not is_same):
        raise differs(
            f"{store.model(number)}: the updates of round {number} make another model: "
            f"{name} is {again.get(name)}, {stated.get(name, 'nothing')} was stated"
        )


def _is_same(name: str, made: Any, stated: Any) -> bool:
    return _alike(made, stated, MEASURED[name]) if name in MEASURED else bool(made == stated)


def _alike(made: Any, stated: Any, room: float) -> bool:
    """The same but for the last digits of numbers, whatever they are in."""
    if isinstance(made, dict) and isinstance(stated, dict):
        same_names = made.keys() == stated.keys()
        return same_names and all(_alike(made[name], stated[name], room) for name in made)
    if isinstance(made, list) and isinstance(stated, list):
        same_length = len(made) == len(stated)
        return same_length and all(_alike(*pair, room) for pair in zip(made, stated, strict=True))
    if isinstance(made, float) and isinstance(stated, float):
        return math.isclose(made, stated, rel_tol=ALIKE, abs_tol=room) or str(made) == str(stated)
    return bool(made == stated)


def _refuse_other_files(
    made: Path, stated: Path, beside: Set[str], before: Path | None = None
) -> None:
    """The files of a folder that was made again, and no other; but what a proof writes there.

    before: of an export, that of the round before, which an older Atoll took more from.
    """
    ours, others = (
        {path.relative_to(folder).as_posix() for path in files_in(folder)} - beside
        for folder in (made, stated)
    )
    for name in sorted(ours | others):
        if name not in ours:
            raise differs(f"{stated / name} is nothing that its updates make")
        if not _is_of_other_version(made / name, stated / name, before and before / name):
            same_bytes(made / name, stated / name)


def _is_of_other_version(made: Path, stated: Path, before: Path | None) -> bool:
    """Whether what stands beside weights differs by the programs alone that wrote it.

    In what was merged, transformers says its own version, and an older Atoll did not say where an
    answer ends. What is from the round before it took as it was, but for the configuration's
    `dtype`.
    """
    if made.name == GENERATION and before is None:
        return _says_less_of_ends(stated, made)
    if made.name not in (CONFIG, INDEX) or not stated.is_file():
        return False
    if stated.stat().st_size > made.stat().st_size + MOST_MORE:
        return False
    if before is None:
        ours = made.read_bytes()
        writer = str(json.loads(ours).get(WRITER)).encode()
        return VERSION.sub(rb"\g<1>" + writer + b'"', stated.read_bytes(), 1) == ours
    if not before.is_file():
        return False
    older = before.read_bytes()
    if made.name == CONFIG:
        own = {"dtype": json.loads(made.read_bytes())["dtype"]}
        older = json.dumps(json.loads(older) | own, indent=1).encode()
    return stated.read_bytes() == older


def _says_less_of_ends(stated: Path, made: Path) -> bool:
    """The same but for tokens that end an answer, of which it has no other."""
    theirs: dict[str, Any] = {}
    if stated.is_file():
        if stated.stat().st_size > made.stat().st_size + MOST_MORE:
            return False
        with suppress(ValueError, RecursionError):
            theirs = json.loads(stated.read_bytes())
    ours = json.loads(made.read_bytes())
    if not isinstance(theirs, dict):
        return False
    ends = [_ends_of(content) for content in (theirs, ours)]
    rest = [{k: v for k, v in x.items() if k != ENDS} for x in (theirs, ours)]
    return rest[0] == rest[1] and all(end in ends[1] for end in ends[0])


def _ends_of(content: dict[str, Any]) -> list[Any]:
    ends = content.get(ENDS, [])
    return ends if isinstance(ends, list) else [ends]


def same_bytes(made: Path, stated: Path) -> None:
    """Raise `UserError` unless two files have the same content."""
    if not stated.is_file():
        raise differs(f"{stated} is missing, or no plain file")
    with open(made, "rb") as ours, open(stated, "rb") as other:
        while piece := ours.read(4 << 20):
            if piece != other.read(len(piece)):
                raise differs(f"{stated} is not what its updates make")
        if other.read(1):
            raise differs(f"{stated} is not what its updates make")
