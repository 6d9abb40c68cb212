"""A round's aggregation once more, from the updates that were kept: every file of its model."""

import json
import tempfile
from pathlib import Path
from typing import Any

from atoll.campaign.average import aggregate_words, bases
from atoll.campaign.first_model import merge_adapter
from atoll.campaign.store import CampaignStore
from atoll.campaign.transfer import atoll_here, run_atoll
from atoll.proof.statement import OWN
from atoll.settings.federation import Rule
from atoll.verify.export import files_in
from atoll.verify.lines import Line, differs

ANEW = ("weights", "rejected", "rule", "digest")  # of a model's manifest


def again(store: CampaignStore, number: int, export: Path | None) -> Line:
    """Aggregate the kept updates once more: the same files, bit for bit.

    export: where that of the last round is; it may have been moved.
    """
    stated, updates = store.model_manifest(number), store.updates(number)
    absent = set(stated["weights"]) - {folder.parent.name for folder in updates}
    if absent or not all(map(store.has_model, bases(store, number))):
        return Line("not at hand", f"round {number}: what its aggregation read")
    with tempfile.TemporaryDirectory(prefix="atoll-verify-") as scratch:
        out = Path(scratch) / "global"
        if "held" in stated:
            _refuse_enough(store, number, updates, out)
        folders = [] if "held" in stated else updates
        _aggregated(store, number, folders, out)
        _refuse_other_manifest(store, number, stated, out)
        if export is not None and store.campaign.lora is not None:
            merge_adapter(store, out / "master", out / "merged")
        gone = []
        for made in sorted(path for path in out.iterdir() if path.is_dir()):
            there = store.model(number) / made.name
            if export is not None and made.name == store.export(number).name:
                there = export
            if there.is_dir():
                _refuse_other_files(made, there)
            else:
                gone.append(made.name)
    of = f"0 of {len(updates)}" if "held" in stated else len(updates)
    without = f", but its {', '.join(gone)}: not kept" if gone else ""
    return Line("as stated", f"round {number}: aggregated again, bit for bit ({of}){without}")


def _aggregated(
    store: CampaignStore, number: int, updates: list[Path], out: Path
) -> dict[str, Any]:
    words = aggregate_words(store, number, updates, out)
    answer: dict[str, Any] = json.loads(run_atoll([*atoll_here(), *words], f"round {number} again"))
    return answer


def _refuse_enough(store: CampaignStore, number: int, updates: list[Path], out: Path) -> None:
    """A model is held where its updates are too few to make one."""
    if len(updates) < store.campaign.rule.quorum:
        return
    if "short" not in _aggregated(store, number, updates, out):
        raise differs(
            f"{store.model(number)} was held, and its {len(updates)} updates make a model"
        )


def _refuse_other_manifest(
    store: CampaignStore, number: int, stated: dict[str, Any], out: Path
) -> None:
    """The same weights of facilities, by the same rule, and the same master."""
    again = json.loads((out / "manifest.json").read_text())
    rule = Rule.model_validate(stated["rule"]).model_dump()  # it may have had fewer words
    stated = stated | {"rule": rule}
    for one in (again, stated):  # may change in a campaign's life, and makes no other model
        one["rule"].pop("below_quorum")
    for name in ANEW:
        if again.get(name) != stated.get(name):
            raise differs(
                f"{store.model(number)}: the updates of round {number} make another model: "
                f"{name} is {again.get(name)}, {stated.get(name)} was stated"
            )


def _refuse_other_files(made: Path, stated: Path) -> None:
    """The files of a folder that was made again, and no other; but what proofs write there."""
    ours, others = (
        {path.relative_to(folder).as_posix() for path in files_in(folder)} - OWN
        for folder in (made, stated)
    )
    for name in sorted(ours | others):
        if name not in ours:
            raise differs(f"{stated / name} is nothing that its updates make")
        same_bytes(made / name, stated / name)


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
