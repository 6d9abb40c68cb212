"""What a facility's optimizer knows, from one round to the next: kept there, never sent.

It is the last checkpoint of the run of an earlier round, of which the moments are taken and not the
weights. Which one is written into the round's journal before its job: a round that is done again
begins with the state it began with the first time.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.journal import Journal, round_name, round_number
from atoll.config.compose import compose, path_word
from atoll.errors import UserError
from atoll.settings import Run, load_run


def inner_state_words(
    folder: Path, here: Path, request: dict[str, Any], lines: list[str]
) -> list[str]:
    """The settings that give a round's run, composed of `lines`, its moments; none: it begins anew.

    Adapters that each round draws anew have no moments: those of others say nothing of them.
    """
    journal = Journal(here)
    record = journal.last("inner state")
    if not record:
        lora = compose(lines).run.model.lora
        kept = request["inner_state"] == "kept" and (lora is None or lora.start is not None)
        newest = newest_state(folder, round_number(here)) if kept else None
        record = journal.append("inner state", checkpoint=newest and str(newest))
    if not record["checkpoint"]:
        return []
    path, run = Path(record["checkpoint"]), compose(lines).run
    if _is_of_other_ranks(path, run) or _is_of_another_optimizer(path, run):
        return []
    return [path_word("checkpoint.optimizer_load_path", path)]


def _is_of_other_ranks(checkpoint: Path, run: Run) -> bool:
    """8-bit moments do not reshard: where a facility has changed its ranks they begin anew."""
    progress = json.loads((checkpoint / "manifest.json").read_bytes()).get("progress", {})
    return bool(progress.get("step_counts")) and progress["world_size"] != run.world_size


def _is_of_another_optimizer(checkpoint: Path, run: Run) -> bool:
    """A facility that left may return with another: what it knows has other names then."""
    try:
        before = load_run(run_dir.settings_file(checkpoint.parents[1])).optimizer
    except UserError:  # of an older Atoll: they do not tell
        return False
    return (before.name, before.groups) != (run.optimizer.name, run.optimizer.groups)


def newest_state(folder: Path, number: int) -> Path | None:
    """The checkpoint behind the last step of the newest round before this one that was trained."""
    for _, run in trained_rounds(folder, number):
        if steps := run_dir.complete_checkpoints(run):
            return run_dir.checkpoint(run, steps[-1])
    return None


def prune_states(folder: Path, number: int, keep: int) -> None:
    """Remove the checkpoints of all but the newest `keep` rounds that were trained before this one.

    The model of the round before is here, so it is published; a round done again needs those before
    it. Runs without an update stay whole: they may still be at work.
    """
    kept, here = 0, folder / "rounds" / round_name(number)
    own = Journal(here).last("inner state").get("checkpoint")
    for _, run in trained_rounds(folder, number):
        if kept >= keep and not (own and run in Path(own).parents):
            shutil.rmtree(run_dir.checkpoints(run), ignore_errors=True)
        kept += bool(run_dir.complete_checkpoints(run))


def trained_rounds(folder: Path, number: int) -> Iterator[tuple[int, Path]]:
    """Number and run of the rounds before this one whose update was made, the newest first."""
    made = (folder / "rounds").glob("*/update/manifest.json")
    earlier = {round_number(manifest.parent.parent) for manifest in made} & set(range(number))
    for before in sorted(earlier, reverse=True):
        if job := Journal(folder / "rounds" / round_name(before)).last("submitted"):
            yield before, Path(job["run"])
