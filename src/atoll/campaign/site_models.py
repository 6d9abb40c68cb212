"""The global models at a facility: each made from the one before and the delta that came."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.asked import BUNDLE
from atoll.campaign.first_model import frozen_digest
from atoll.campaign.inner_state import trained_rounds
from atoll.campaign.journal import Journal, round_name
from atoll.campaign.transfer import run_atoll
from atoll.cluster.hub_names import hub_cache
from atoll.cluster.modules import atoll_outside_jobs
from atoll.config.compose import compose, path_word, settings_of
from atoll.errors import UserError, printable
from atoll.settings import Run
from atoll.settings.exchange import BESIDE_WEIGHTS, WEIGHTS

OF_RSYNC = re.compile(r"\.(.+)\.[A-Za-z0-9]{6}")  # a file that is on its way


def make_bases(
    folder: Path, number: int, overrides: Sequence[str], asked: int | None = None
) -> int:
    """The number of the newest global model that is here, up to the one this round needs; -1: none.

    number: one more than that. asked: the round, later where rounds overlap.
    Deltas that have arrived are added, one after the other; who joins gets one model whole.
    """
    have = _newest(folder, number)
    wholes = [n for n in range(number) if (_incoming(folder, n) / "master").is_dir()]
    if have < 0 and wholes:
        have = wholes[-1] - 1
    for before in range(have + 1, number):
        came = _incoming(folder, before)
        if not (came / "manifest.json").is_file():
            break
        _remove_cut_off(came)
        refuse_other_kinds(came)
        _apply_delta(folder, before, came, overrides)
        have = before
    own = own_global_round(folder, asked or number)
    for old in range(have - 1):  # the one before the newest stays, should a round be done again
        if old == own:  # what changed since is told from it
            continue
        shutil.rmtree(folder / "bases" / round_name(old), ignore_errors=True)
        shutil.rmtree(_incoming(folder, old), ignore_errors=True)
    if _newest(folder, number) >= 0:
        return have
    for manifest in folder.glob("incoming/*/manifest.json"):  # of what is sent anew it says nothing
        manifest.unlink()
    return -1


def own_global_round(folder: Path, number: int) -> int | None:
    """The global model that the newest run before this round had taken, if it keeps own weights."""
    for before, _ in trained_rounds(folder, number):
        asked = Journal(folder / "rounds" / round_name(before)).last("asked")["request"]
        has_own = asked.get("fragments", 1) > 1 or asked.get("merge_alpha")
        return int(asked["global_round"]) if has_own else None
    return None


def _incoming(folder: Path, number: int) -> Path:
    return folder / "incoming" / round_name(number)


def refuse_wrong_base(base: Path, request: dict[str, Any]) -> None:
    digest = json.loads((base / "manifest.json").read_text())["digest"]
    if digest != request["base"]:
        raise UserError(
            f"the global model here is {digest[:12]}, the coordinator's is {request['base'][:12]}",
            f"delete {base.parent} and its incoming/: the model is sent again",
        )


def model_words(folder: Path, request: dict[str, Any], begin: Path) -> list[str]:
    """Of a run: the weights it begins with; of adapters, these and the base that is here."""
    if not request["frozen"]:
        return [path_word("model.source", begin)]
    start = [path_word("++model.lora.start", begin), "export.merged=false"]
    named = [value for name, value, _ in settings_of(request["overrides"]) if f"{name}=" == BUNDLE]
    places = [folder / "base", *(Path(value).absolute() / "model" for value in named[-1:])]
    here = next((place for place in places if place.is_dir()), None)
    if here is not None and here.is_symlink():  # of a snapshot in a cache, its files are links too
        here = here.resolve()
    own = [] if here is None else ["model=from_path", path_word("model.source", here)]
    return [*own, *start]


def refuse_other_frozen(folder: Path, request: dict[str, Any], lines: list[str]) -> None:
    """Raise `UserError` unless the base here has the weights that the campaign's adapters are for.

    It is read once: later its settings, and of a folder the files' sizes and times, tell.
    """
    composition, known = compose(lines), folder / "base.json"
    model = composition.run.model
    source = Path(model.source or "")
    files = sorted(source.glob("*")) if model.source and source.is_dir() else []
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    settings = model.model_dump(mode="json", exclude={"lora", "quantisation"})
    key = run_dir.digest([settings, composition.run.seed, facts, *_revision(composition.run)])
    record = json.loads(known.read_text()) if known.is_file() else {}
    if record.get("of") != key:
        run_dir.write_whole(folder / "base.yaml", composition.as_yaml())
        argv = [*container_of(composition.run, folder), "adapter"]
        answer = run_atoll([*argv, str(folder / "base.yaml")], "the base's digest")
        record = {"of": key, "digest": frozen_digest(answer)}
        run_dir.write_whole(known, json.dumps(record))
    if record["digest"] != request["frozen"]:
        raise UserError(
            f"the base {model.source or model.name} here is {record['digest'][:12]}, the "
            f"campaign's is {request['frozen'][:12]}",
            f"put the campaign's model into {folder / 'base'}, or name it in the settings",
        )


def _revision(run: Run) -> list[str]:
    """The commit that a name of the hub has in the cache here, as a branch may move; else none."""
    cache, source = hub_cache(run, os.environ), run.model.source or ""
    place = cache / f"models--{source.replace('/', '--')}" / "refs"
    branch = place / (run.model.revision or "main")
    return [branch.read_text().strip()] if source and branch.is_file() else []


def container_side(folder: Path, overrides: Sequence[str]) -> list[str]:
    """Atoll where there is torch: in the image that the runs of `overrides` use, or here."""
    own = [path_word("folders.runs", folder / "runs"), path_word("model.source", folder)]
    return container_of(compose([*overrides, *own, "name=site"]).run, folder)


def container_of(run: Run, folder: Path) -> list[str]:
    """The same, in the image of this run; all of the campaign's folder is there."""
    bound = run.model_copy(update={"folders": run.folders.model_copy(update={"prepared": folder})})
    return atoll_outside_jobs(bound)


def _remove_cut_off(came: Path) -> None:
    """Remove what an rsync that was killed here left of a model's files, under names of its own."""
    for path in came.rglob(".*"):
        name = OF_RSYNC.fullmatch(path.name)
        is_kind = name is not None and Path(name[1]).suffix in (WEIGHTS, *BESIDE_WEIGHTS)
        if is_kind and path.is_file() and not path.is_symlink():
            path.unlink()


def refuse_other_kinds(came: Path) -> None:
    """Raise `UserError` unless all that came are plain files as a model folder has them."""
    for path in sorted(came.rglob("*")):
        is_kind = path.suffix in (WEIGHTS, *BESIDE_WEIGHTS) and path.is_file()
        if path.is_symlink() or not (is_kind or path.is_dir()):
            raise UserError(
                f"{printable(str(path), 300)} came, which is no part of a model",
                f"delete {came}: the model is sent again, and no other kind of file is taken",
            )


def _newest(folder: Path, number: int) -> int:
    numbers = [
        before
        for before in range(number)
        if (folder / "bases" / round_name(before) / "manifest.json").is_file()
    ]
    return numbers[-1] if numbers else -1


def _apply_delta(folder: Path, before: int, came: Path, overrides: Sequence[str]) -> None:
    base = folder / "bases" / round_name(before)
    argv = [*container_side(folder, overrides), "apply-delta", str(came), str(base)]
    if not (came / "master").is_dir():
        argv += ["--base", str(folder / "bases" / round_name(before - 1))]
    run_atoll(argv, f"the global model of round {before}")
