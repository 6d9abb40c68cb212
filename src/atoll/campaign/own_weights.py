"""A facility's own weights, from one round to the next, where the model travels in fragments.

They stay in the export of its last run. A round begins with them and with the fragments that have
changed since, as the global model's manifest says: late work changes others than the round's own,
and a round that is held none. With the global model whole where the facility has trained nothing
yet, and with nothing of its own where it was away for longer than all fragments take. Which run
it is, is written into the round's journal before its job, so a round done again begins the same.
"""

import json
import shutil
from collections.abc import Collection
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
        merge, add = changed_fragments(base, record, request, before.is_dir())
        away = request["global_round"] - record["global_round"] > request["fragments"]
        argv = [*container_side(folder, request["overrides"]), "merge-global"]
        argv += [str(base), record["own"], str(out), "--merge", *map(str, merge)]
        argv += ["--add", *map(str, add), *(["--before", str(before)] if add else [])]
        argv += ["--fragments", str(request["fragments"])]
        argv += ["--fragment-pattern", request["fragment_pattern"]]
        argv += ["--whole", *map(str, refused_fragments(base, record, request))]
        argv += ["--alpha", repr(0.0 if away else request["merge_alpha"])]
        run_atoll(argv, "the weights that the round begins with")
    for old in range(round_number(here) - 1):  # that of the round before may be at work
        shutil.rmtree(folder / "starts" / round_name(old), ignore_errors=True)
    return out / "export"


def changed_fragments(
    base: Path, record: dict[str, Any], request: dict[str, Any], has_before: bool
) -> tuple[list[int], list[int]]:
    """The fragments that changed after the round whose model was taken before.

    record: the round of the facility's own weights, and the one whose model they had taken. Those
    fragments are taken that were averaged in their turn, or whose late work was the facility's own;
    of others that late work changed the change is added to what was learned and is not sent yet.
    Where the model before is gone they are taken, too. An older Atoll's model does not say what
    changed: it is then those whose turn was.
    """
    manifest, before = _read(base), record["global_round"]
    later = range(before + 1, request["global_round"] + 1)
    turns = {str((number - 1) % request["fragments"]): number for number in later}
    averaged, changed = (
        {n for n, number in manifest.get(name, turns).items() if number > before}
        for name in ("averaged_rounds", "changed_rounds")
    )
    own = {n for n in changed if _taken(manifest, n, request) >= record["round"]}
    taken = averaged | own if has_before else changed
    return sorted(map(int, taken)), sorted(map(int, changed - taken))


def refused_fragments(base: Path, record: dict[str, Any], request: dict[str, Any]) -> list[int]:
    """Those of which an update of the facility's was refused since, also where a turn was held.

    They are taken whole: what is left of its own would be sent again, and be longer. The
    round that refused it counts: late work is of an earlier one.
    """
    manifest, before = _read(base), record["global_round"]
    how = "refused_in" if "refused_in" in manifest else "refused"  # of an older Atoll: whose it was
    named = manifest.get(how, {})
    return sorted(int(n) for n in named if _taken(manifest, n, request, how) > before)


def residual_round(base: Path, request: dict[str, Any], rounds: Collection[int]) -> int | None:
    """Of which of these rounds the residual is added to an update: the last that came to anything.

    rounds: earlier ones of the same fragment that have one. What an encoding left out of an update
    that was refused, or of a turn that was held, is not: all of that is learned anew, or still in
    the facility's weights. Nor is an older one than that of the last taken, should it be gone: it
    is in that round's update. With rounds that overlap it may not be known yet whether late work
    came to anything: it is taken to. Without, who is asked for a round has no work under way.
    """
    manifest, fragment = _read(base), str(request["fragment"])
    if "taken" not in manifest:  # of an older Atoll, or the first
        return max(rounds, default=None)
    last = _taken(manifest, fragment, request)
    rule = manifest.get("rule", {})
    patience = rule.get("max_staleness", 0) if rule.get("overlap_rounds") else 0
    known = max(request["global_round"] - patience, _taken(manifest, fragment, request, "refused"))
    return max((n for n in rounds if n == last or n > max(known, last)), default=None)


def needless_residuals(
    base: Path, request: dict[str, Any], rounds: Collection[int], previous: int | None
) -> list[int]:
    """Of `rounds`, as above, those whose residual no update will be added to any more.

    previous: the round whose residual this update is added to. It may yet be refused, and then that
    of the last taken counts again; the one before stays too, should a round be done again.
    """
    last = _taken(_read(base), str(request["fragment"]), request)
    return sorted(n for n in rounds if n < min(previous or 0, last))[:-1]


def _taken(
    manifest: dict[str, Any], fragment: str, request: dict[str, Any], how: str = "taken"
) -> int:
    """The last round of this facility's whose update is in a fragment; 0: there is none.

    how: taken; or refused, and refused_in, the round that refused it.
    """
    return int(manifest.get(how, {}).get(fragment, {}).get(request["facility"], 0))


def _read(base: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((base / "manifest.json").read_text())
    return manifest


def _own(folder: Path, here: Path) -> dict[str, Any]:
    """The export of the newest round before this one, and the global model it had taken."""
    journal = Journal(here)
    if record := journal.last("own weights"):
        return record
    number, run = next(trained_rounds(folder, round_number(here)), (0, None))
    if run is None:
        return journal.append("own weights", own=None, global_round=None, round=None)
    asked = Journal(folder / "rounds" / round_name(number)).last("asked")["request"]
    export = run_dir.export(run) / ("adapter" if asked["frozen"] else "")
    return journal.append(
        "own weights", own=str(export), global_round=asked["global_round"], round=number
    )
