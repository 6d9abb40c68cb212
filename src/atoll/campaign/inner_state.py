"""What a facility's optimizer knows, from one round to the next: kept there, never sent.

It is the last checkpoint of the run of an earlier round, of which the moments are taken and not the
weights. Which one is written into the round's journal before its job: a round that is done again
begins with the state it began with the first time.
"""

from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.journal import Journal, round_name, round_number
from atoll.config.compose import compose, path_word


def inner_state_words(
    folder: Path, here: Path, request: dict[str, Any], lines: list[str]
) -> list[str]:
    """The settings that give a round's run, composed of `lines`, its moments; none: it begins anew.

    Adapters begin anew: each round draws them, and moments of others say nothing of them.
    """
    journal = Journal(here)
    record = journal.last("inner state")
    if not record:
        kept = request["inner_state"] == "kept" and compose(lines).run.model.lora is None
        newest = newest_state(folder, round_number(here)) if kept else None
        record = journal.append("inner state", checkpoint=newest and str(newest))
    path = record["checkpoint"]
    return [path_word("checkpoint.optimizer_load_path", Path(path))] if path else []


def newest_state(folder: Path, number: int) -> Path | None:
    """The checkpoint behind the last step of the newest round before this one that was trained."""
    made = (folder / "rounds").glob("*/update/manifest.json")
    earlier = {round_number(manifest.parent.parent) for manifest in made} & set(range(number))
    for before in sorted(earlier, reverse=True):
        job = Journal(folder / "rounds" / round_name(before)).last("submitted")
        steps = run_dir.complete_checkpoints(Path(job["run"])) if job else []
        if steps:
            return run_dir.checkpoint(Path(job["run"]), steps[-1])
    return None
