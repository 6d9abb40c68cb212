"""A facility's own weights, from one round to the next, where the model travels in fragments.

They stay in the export of its last run. A round begins with them and with the fragments that have
changed since, as the global model's manifest says: late work changes others than the round's own,
and a round that is held none. With the global model whole where the facility has trained nothing
yet, and with nothing of its own where it was away for longer than all fragments take. Which run
it is, is written into the round's journal before its job, so a round done again begins the same.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.inner_state import trained_rounds
from atoll.campaign.journal import Journal, round_name, round_number
from atoll.campaign.site_models import container_side
from atoll.campaign.transfer import run_atoll


def begins_with(folder: Path, here: Path, request: dict[str, Any], base: Path) -> Path:
    """The Hugging Face folder that a round's run begins with; made if it is not there yet."""
    if request["fragments"] == 1 and not request["merge_alpha"]:
        return base / "export"
    record = _own(folder, here)
    if record["own"] is None:
        return base / "export"
    out = folder / "starts" / here.name
    if not (out / "manifest.json").is_file():
        before = folder / "bases" / round_name(record["global_round"])
        merge, add = changed_fragments(base, record["global_round"], request, before.is_dir())
        away = request["global_round"] - record["global_round"] > request["fragments"]
        argv = [*container_side(folder, request["overrides"]), "merge-global"]
        argv += [str(base), record["own"], str(out), "--merge", *map(str, merge)]
        argv += ["--add", *map(str, add), *(["--before", str(before)] if add else [])]
        argv += ["--fragments", str(request["fragments"])]
        argv += ["--fragment-pattern", request["fragment_pattern"]]
        argv += ["--alpha", repr(0.0 if away else request["merge_alpha"])]
        run_atoll(argv, "the weights that the round begins with")
    for old in range(round_number(here) - 1):  # that of the round before may be at work
        shutil.rmtree(folder / "starts" / round_name(old), ignore_errors=True)
    return out / "export"


def changed_fragments(
    base: Path, taken_round: int, request: dict[str, Any], has_before: bool
) -> tuple[list[int], list[int]]:
    """The fragments that changed after the round whose model was taken before.

    Those that are taken, as their turn was; and those that late work alone changed, whose change is
    added to what was learned since. Where the model before is gone they are taken, too. An older
    Atoll's model does not say what changed: it is then those whose turn was.
    """
    manifest = json.loads((base / "manifest.json").read_text())
    later = range(taken_round + 1, request["global_round"] + 1)
    turns = {(number - 1) % request["fragments"]: number for number in later}
    rounds = manifest.get("changed_rounds", turns)
    changed = sorted(int(fragment) for fragment, number in rounds.items() if number > taken_round)
    taken = [fragment for fragment in changed if fragment in turns or not has_before]
    return taken, [fragment for fragment in changed if fragment not in taken]


def last_turn(base: Path, fragment: int, number: int) -> int:
    """The last turn of a fragment before a round in which it was averaged, so not held.

    What encodings left out of an update is added to the next; not of one that nothing came of.
    """
    manifest = json.loads((base / "manifest.json").read_text())
    if "averaged_rounds" not in manifest:  # of an older Atoll
        return number - 1
    return int(manifest["averaged_rounds"].get(str(fragment), 0))


def _own(folder: Path, here: Path) -> dict[str, Any]:
    """The export of the newest round before this one, and the global model it had taken."""
    journal = Journal(here)
    if record := journal.last("own weights"):
        return record
    number, run = next(trained_rounds(folder, round_number(here)), (0, None))
    if run is None:
        return journal.append("own weights", own=None, global_round=None)
    asked = Journal(folder / "rounds" / round_name(number)).last("asked")["request"]
    export = run_dir.export(run) / ("adapter" if asked["frozen"] else "")
    return journal.append("own weights", own=str(export), global_round=asked["global_round"])
