"""`checkpoint.every_steps=auto`: the interval follows from what a save and a step take."""

from itertools import pairwise

import small_run

from atoll import run_dir
from atoll.plan.checkpoint_interval import interval_steps


def test_ranks_save_at_the_interval_that_the_first_measured(ranks, tmp_path):
    small_run.write_text(tmp_path)
    run = small_run.settings(
        tmp_path, 2, checkpoint__every_steps="auto", training__steps=16, generation__prompt=None
    )
    folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=2)
    first, *_ = found = small_run.records(folder, "checkpoint_interval")
    saved = [line["step"] for line in small_run.records(folder, "checkpoint")]
    assert first["step"] == 10 and saved[0] == 10 and saved[-1] == 16
    assert first["steps"] == interval_steps(
        first["blocked_seconds"],
        first["save_seconds"],
        first["step_seconds"],
        first["seconds_between_failures"],
    )
    between = pairwise(found)
    assert all(after["step"] == min(16, at["step"] + at["steps"]) for at, after in between)
    assert run_dir.checkpoint(folder, 16).is_dir()
