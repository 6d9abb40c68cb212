"""What became of each node-second: the columns add up to what the jobs held."""

import json
import time
from dataclasses import replace

import pytest
import small_run
import torch

from atoll import run_dir
from atoll.cluster import goodput as module
from atoll.cluster.goodput import JobStart, effective, goodput, ranks_starts, spent
from atoll.health.faults import Fault, add_fault
from atoll.sharding.process_group import World
from atoll.train.train import train

ALONE = World(0, 1, torch.device("cpu"))


def line(event, at, step, **seconds):
    return {"event": event, "time": at, "step": step, "seconds": seconds}


def held(columns):
    return sum(seconds for name, seconds in columns.items() if name != "queue")


# A job of 10 to 100 whose ranks begin at 20, log at 30 and 60, and are killed; step 4 was saved.
KILLED = [
    line("start", 20, 0, start=8),
    line("steps", 30, 4, start=8, input=1, compute=7, optimizer=1, communication=1),
    line("steps", 60, 8, start=8, input=4, compute=30, optimizer=3, communication=3),
]
# It is started again at 120 and ends at 150.
AGAIN = [
    line("start", 125, 4, start=4),
    line("steps", 145, 8, start=4, compute=18, checkpoint=2),
    line("end", 148, 8, start=4, compute=18, checkpoint=2, evaluation=2, export=1),
]
JOBS = [JobStart(0, 10, 100, 2), JobStart(101, 120, 150, 2)]


def test_columns_add_up_to_what_the_jobs_held():
    columns = spent(JOBS, ranks_starts([*KILLED, *AGAIN]), [], 2)
    assert held(columns) == pytest.approx(sum(job.node_seconds for job in JOBS))
    per_node = {name: seconds / 2 for name, seconds in columns.items()}
    assert per_node == {
        "queue": 10 + 19,
        "start": 10 + 5,
        "input": 1,
        "compute": 8 + 18,
        "communication": 1,
        "checkpoint": 2 + 1,  # the export is written like one
        "evaluation": 2,
        "stalled": 0,
        "lost": 30 + 40,  # steps 5 to 8 were done again, and what was under way
        "idle": 2,
    }
    assert effective(columns) == pytest.approx((1 + 26 + 1) / 120)


def test_nobody_moved_until_the_fault_was_judged():
    fault = Fault("stalled", "node", "stopped", time=90.0)
    columns = spent(JOBS[:1], ranks_starts(KILLED), [fault], 2)
    assert (columns["stalled"], columns["idle"], columns["lost"]) == (60, 20, 0)
    dead = replace(fault, kind="died")
    columns = spent(JOBS[:1], ranks_starts(KILLED), [dead], 2)
    assert (columns["stalled"], columns["idle"], columns["lost"]) == (0, 20, 60)


# without accounting each start of the ranks is a job: 12 to 60, and 121 to 148
@pytest.mark.parametrize(("jobs", "started"), [(JOBS, 10 + 20), ([], 12 + 61), (JOBS[:1], 10)])
def test_a_run_lasts_from_its_first_job_to_its_last_line(tmp_path, monkeypatch, jobs, started):
    """The start of its ranks, the text and the export are in it, as they are in the columns."""
    for each in [{**KILLED[0], "time": 20}, *KILLED[1:], *AGAIN]:
        run_dir.append_record(run_dir.ledger_file(tmp_path), each)
    monkeypatch.setattr(module, "job_starts", lambda folder: jobs)
    assert module.span(tmp_path) == (started, 148.0)
    assert module.span(tmp_path / "of no ranks") == (None, None)


def test_spare_nodes_are_idle():
    columns = spent(JOBS[1:], ranks_starts(AGAIN), [], 1)
    assert held(columns) == pytest.approx(60)
    assert columns["idle"] == 30 + 2


def test_a_scheduler_counts_whole_seconds_and_the_columns_add_up_to_them():
    short = JobStart(101, 120.9, 148.0, 2)  # its ranks' last line has the time 148.6
    late = [*AGAIN[:-1], {**AGAIN[-1], "time": 148.6}]
    late[-1]["seconds"] = {**late[-1]["seconds"], "export": 1.6}
    columns = spent([short], ranks_starts(late), [], 2)
    assert held(columns) == pytest.approx(short.node_seconds)
    assert columns["checkpoint"] / 2 == pytest.approx(2 + 1.6)
    assert columns["start"] / 2 == pytest.approx(125 - 120.9 - 0.6)


def test_what_clocks_do_not_explain_is_not_hidden():
    twice = [AGAIN[0], *({**one, "seconds": {"compute": 20.0 * n}} for n, one in enumerate(AGAIN))]
    columns = spent(JOBS[1:], ranks_starts(twice), [], 2)
    assert held(columns) > JOBS[1].node_seconds + 2


def test_a_job_whose_ranks_never_began():
    columns = spent([JobStart(0, 5, 9, 3)], [], [], 3)
    assert (columns["queue"], columns["start"], held(columns)) == (15, 12, 12)
    assert effective(columns) == 0.0


def test_a_requeued_job_waits_from_the_end_of_its_start_before():
    jobs = [JobStart(0, 10, 20, 1), JobStart(0, 50, 60, 1)]  # one id, submitted once
    assert spent(jobs, [], [], 1)["queue"] == 10 + 30


def test_accounting_is_asked_in_seconds_and_unended_jobs_go_on(tmp_path, monkeypatch):
    rows = ["100|110|150|2", "100|160|Unknown|2", "170|Unknown|Unknown|2"]
    asked = {}

    def answer(argv, environment):
        asked.update(argv=argv, format=environment["SLURM_TIME_FORMAT"])
        return rows

    monkeypatch.setattr(module, "answer_lines", answer)
    monkeypatch.setattr(time, "time", lambda: 200.0)
    run_dir.write_whole(run_dir.jobs_file(tmp_path), "slurm 7\n")
    starts = module.job_starts(tmp_path)
    assert starts == [JobStart(100, 110, 150, 2), JobStart(100, 160, 200, 2)]
    assert asked["format"] == "%s" and "--duplicates" in asked["argv"]


def test_without_accounting_a_job_held_its_run_from_note_to_note(tmp_path):
    """The first note of an end counts; one without has its ranks' last line."""
    notes = "began 1 10.5\nbegan 2 40\nended 2 90.25\nended 2 91\nbegan 3 100\nbega"
    run_dir.write_whole(run_dir.held_file(tmp_path), notes)
    for at in (12.0, 30.0, 60.0):
        line = {"event": "steps", "time": at, "step": 1, "seconds": {}}
        run_dir.append_record(run_dir.ledger_file(tmp_path), line)
    held_by = [(job.started, job.ended, job.nodes) for job in module.noted(tmp_path, 2)]
    assert held_by == [(10.5, 30.0, 2), (40, 90.25, 2), (100, 100, 2)]
    assert module.noted(tmp_path / "none", 2) == []


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run that is killed behind step 5 of 6, a checkpoint at step 3, and started again."""
    folder = tmp_path_factory.mktemp("goodput")
    small_run.write_text(folder)
    single = small_run.sharding("single")
    run = small_run.settings(folder, 1, sharding=single, generation__prompt=None)
    made = small_run.ready(run)
    codes = iter([0, 0, 0, 0, 1])

    def killed():
        if next(codes):
            raise RuntimeError("killed")
        return 0

    with pytest.raises(RuntimeError, match="killed"):
        train(run, made, ALONE, killed)
    train(run, made, ALONE, lambda: 0)
    return made


def test_a_real_run_accounts_for_all_its_seconds(run_folder):
    lines = module.ledger(run_folder)
    events = [one["event"] for one in lines]
    assert events.count("start") == 2 and events[-1] == "end"
    assert [one["step"] for one in lines if one["event"] == "start"] == [0, 3]
    columns = goodput(run_folder)
    length = sum(job.node_seconds for job in module.by_itself(lines, 1))
    assert held(columns) == pytest.approx(length, rel=0.01)
    assert columns["lost"] > 0 and columns["compute"] > 0 and columns["checkpoint"] > 0


def test_a_half_written_line_is_left_out(run_folder):
    file = run_dir.ledger_file(run_folder)
    whole = len(module.ledger(run_folder))
    with open(file, "a") as stream:
        stream.write('{"event": "st')
    assert len(module.ledger(run_folder)) == whole
    file.write_text("".join(json.dumps(one) + "\n" for one in module.ledger(run_folder)))


def test_faults_of_a_run_reach_its_goodput(run_folder):
    failed = next(one for one in module.ledger(run_folder) if one["event"] == "end")
    assert failed["failed"] is True
    add_fault(run_folder, Fault("died", "code", "killed", time=failed["time"]))
    assert held(goodput(run_folder)) > 0
