"""After ranks that failed: again, without which nodes, or the end. Decided from what is known."""

import errno
import json

import pytest
import yaml
from composing import composed, here, tree

from atoll import run_dir
from atoll.health import go_on
from atoll.health.exclusions import excluded
from atoll.health.faults import Fault, add_fault, faults
from atoll.health.go_on import Start, decide
from atoll.health.node_record import NodeRecord, write
from atoll.health.restarts import restarts
from atoll.settings import dumped
from atoll.settings.machine import Restart

__all__ = ["composed", "here", "tree"]

NODE = Fault("stalled", "node", "stopped", node="n2", rank=3)
SLOW = Fault("slow", "node", "1.5 x the median", node="n4")
CODE = Fault("died", "code", "ValueError", node="n1", rank=0)
NAN = Fault("non_finite", "data", "loss is nan", node="n1")
UNKNOWN = Fault("stalled", "unknown", "nobody knows", node="n1")
UNFIT = Fault("unfit", "node", "0.1 of the median", node="n3")
MOVED = {"step": 20, "began": 10, "kind": "died"}
STUCK = {"step": 20, "began": 20, "kind": "died"}
UNFIT_BEFORE = {"step": 20, "began": 20, "kind": "unfit"}
TIME = {"step": 20}  # as the ranks write it when their time is over

CASES = [
    # faults of this start, steps before and after it, restarts so far -> again, excluded
    ([], (10, 20), [], False, []),
    ([NODE], (10, 20), [], True, ["n2"]),
    ([NODE], (0, 0), [], True, ["n2"]),
    ([NODE, NODE], (0, 0), [], True, ["n2"]),
    ([SLOW, NODE], (10, 20), [], True, ["n4", "n2"]),
    ([Fault("died", "node", "no name")], (10, 20), [], True, []),
    ([UNKNOWN], (10, 20), [], True, []),
    ([UNKNOWN], (20, 20), [], True, []),
    # an exception of Python may pass, if there was something to keep; data does not
    ([CODE], (10, 20), [], True, []),
    ([CODE], (20, 20), [], False, []),
    ([CODE], (0, 0), [], False, []),
    ([NAN], (10, 20), [], False, []),
    ([SLOW, NAN], (10, 20), [], False, []),
    # going back as often as it may did not help
    ([Fault("non_finite", "code", "the loss is nan")], (10, 20), [], False, []),
    ([Fault("spike", "code", "the loss is 9")], (10, 20), [], False, []),
    # a slow rank ended nothing: a full disk did, or what no fault tells
    ([SLOW], (10, 20), [], False, []),
    ([SLOW, SLOW], (20, 20), [MOVED], False, []),
    ([NODE, SLOW], (10, 20), [], True, ["n2", "n4"]),
    # twice in a row without a step saved
    ([NODE], (20, 20), [STUCK], False, []),
    ([NODE], (20, 20), [MOVED], True, ["n2"]),
    ([NODE], (20, 30), [STUCK], True, ["n2"]),
    ([UNKNOWN], (20, 20), [MOVED, STUCK], False, []),
    ([NODE], (20, 20), [TIME], True, ["n2"]),
    ([NODE], (20, 20), [STUCK, TIME], True, ["n2"]),
    ([NODE], (30, 20), [STUCK], False, []),  # the newest was damaged, and set aside
    # a node that was unfit before the first step was never a try
    ([UNFIT], (20, 20), [STUCK], True, ["n3"]),
    ([NODE], (20, 20), [UNFIT_BEFORE], True, ["n2"]),
    ([NODE], (20, 20), [STUCK, UNFIT_BEFORE], False, []),
    # as often as it may
    ([NODE], (10, 20), [MOVED] * 2, True, ["n2"]),
    ([NODE], (10, 20), [MOVED] * 3, False, []),
    ([UNFIT], (10, 20), [MOVED] * 3, False, []),
    ([NODE], (10, 20), [TIME] * 3, False, []),
]


@pytest.mark.parametrize(("these", "steps", "earlier", "again", "nodes"), CASES)
def test_what_follows(these, steps, earlier, again, nodes):
    decision = decide(Restart(max_restarts=3), Start(*steps, these), earlier)
    assert (decision.again, list(decision.nodes)) == (again, nodes)
    assert decision.why or not these


def test_nothing_is_left_out_where_that_is_not_wanted():
    decision = decide(Restart(exclude=False), Start(10, 20, [NODE]), [])
    assert (decision.again, decision.nodes) == (True, {})


@pytest.mark.parametrize("blame", ["code", "data", "unknown"])
def test_only_a_node_is_ever_left_out(blame):
    fault = Fault("died", blame, "x", node="n2")
    assert decide(Restart(), Start(10, 20, [fault, CODE]), []).nodes == {}


@pytest.mark.parametrize(
    ("wanted", "allocated", "bad", "chosen"),
    [
        (2, "n1 n2 n3", "n2", "n1 n3"),
        (2, "n1 n2 n3", "", "n1 n2"),
        (2, "n1 n2 n3", "n1 n2", ""),
        (2, "n1 n2", "n2", ""),
        (2, "n1 n2", "", "n1 n2"),
        (1, "n1.site n2.site", "n1", "n2.site"),
        (2, "n1.site n2.site n3.site", "n2.other", "n1.site n3.site"),
    ],
)
def test_the_nodes_of_the_next_start_inside_the_job(wanted, allocated, bad, chosen):
    assert go_on.healthy(wanted, allocated.split(), bad.split()) == chosen.split()


@pytest.fixture
def folder(composed):
    run = composed("facility=testbed", "nodes=2", "spare_nodes=1", "name=x").run
    folder = run_dir.folder(run)
    run_dir.write_whole(run_dir.settings_file(folder), yaml.safe_dump(dumped(run)))
    return folder


def asked(folder, capsys, *words: str, nodes: str = "n1,n2,n3", began: int = 0, known: int = 0):
    line = [f"--began={began}", f"--known-faults={known}", f"--nodes={nodes}", "--job=41"]
    assert go_on.main([str(folder), *line, *words]) == 0
    captured = capsys.readouterr()
    [answer] = [text for text in captured.out.splitlines() if text.startswith("@atoll ")]
    return answer.split()[1:], captured.err


def test_a_spare_takes_the_place_of_a_node(folder, capsys):
    add_fault(folder, NODE)
    answer, errors = asked(folder, capsys)
    assert answer == ["again", "n1,n3"]
    assert "n2" in errors and "excluded.json" in errors and "goes on on n1,n3" in errors
    assert excluded(folder)["n2"].evidence == "rank 3 on n2: stopped"
    [entry] = restarts(folder)
    assert (entry["step"], entry["began"], entry["job"]) == (0, 0, "41")
    assert (entry["kind"], entry["excluded"], entry["inside"]) == ("stalled", ["n2"], True)


def test_a_fault_behind_one_that_was_cut_short_counts(folder, capsys):
    """As a full disk cuts a line: the shell counts lines, and so it is one of them."""
    run_dir.faults_file(folder).write_bytes(b'{"kind": "died", "bla')
    add_fault(folder, NODE)
    assert asked(folder, capsys, known=1)[0] == ["again", "n1,n3"]


def test_without_a_spare_left_another_job_goes_on(folder, capsys):
    add_fault(folder, NODE)
    answer, errors = asked(folder, capsys, nodes="n1,n2")
    assert answer == ["again", "-"]
    assert "another job" in errors


def test_where_the_time_is_nearly_over_another_job_goes_on(folder, capsys):
    add_fault(folder, UNKNOWN)
    assert asked(folder, capsys, "--time-is-over")[0] == ["again", "-"]


def test_an_old_fault_is_not_blamed_again(folder, capsys):
    add_fault(folder, NODE)
    assert asked(folder, capsys, known=1)[0] == ["end", "-"]
    assert restarts(folder) == []


def test_what_slurm_says_is_a_fault_of_its_own(folder, capsys):
    answer, _ = asked(folder, capsys, "--down=n2=down*")
    assert answer == ["again", "n1,n3"]
    [fault] = faults(folder)
    assert (fault.kind, fault.blame, fault.node, fault.job) == ("died", "node", "n2", "41")
    assert "down*" in fault.evidence


def test_a_spare_that_is_down_is_no_fault_and_takes_no_place(folder, capsys):
    records = run_dir.node_records(folder)
    write(records / "9-0-29500", NodeRecord(0, "n3"))
    for number, node in enumerate(("n1.site", "n2.site")):
        write(records / "10-2-29500", NodeRecord(number, node))
    add_fault(folder, NODE)
    answer, _ = asked(folder, capsys, "--down=n3=down*", nodes="n1,n2,n3,n4")
    assert answer == ["again", "n1,n4"]
    assert [fault.node for fault in faults(folder)] == ["n2"]


def test_what_slurm_says_of_a_node_counts_more_than_an_exception_of_its_peers(folder, capsys):
    add_fault(folder, CODE)
    assert asked(folder, capsys, "--down=n2=down*")[0] == ["again", "n1,n3"]
    assert [fault.node for fault in faults(folder)] == ["n1", "n2"]


def test_a_name_that_the_job_has_not_is_no_reason_for_an_exclusion(folder, capsys):
    """sbatch --exclude refuses names that it does not know."""
    add_fault(folder, Fault("stalled", "node", "stopped", node="elsewhere"))
    answer, _ = asked(folder, capsys)
    assert answer == ["again", "n1,n2"]
    assert excluded(folder) == {}


def test_a_full_name_is_slurm_s_own_in_the_file(folder, capsys):
    add_fault(folder, Fault("stalled", "node", "stopped", node="n2.site.org"))
    assert asked(folder, capsys)[0] == ["again", "n1,n3"]


def test_a_file_with_a_slip_is_left_as_it_is_and_the_run_goes_on(folder, capsys):
    run_dir.excluded_file(folder).write_text("{")
    add_fault(folder, NODE)
    answer, errors = asked(folder, capsys)
    assert answer == ["again", "n1,n3"]
    assert "excluded.json" in errors
    assert run_dir.excluded_file(folder).read_text() == "{"


def test_a_full_disk_ends_the_run_in_a_line(folder, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "restarts.jsonl")

    monkeypatch.setattr(go_on, "add_restart", full)
    add_fault(folder, NODE)
    answer, errors = asked(folder, capsys)
    assert answer == ["end", "-"]
    assert errors.splitlines()[-1] == "atoll: restarts.jsonl: No space left on device; the run ends"


def test_the_step_of_the_newest_checkpoint_is_the_progress(folder, capsys):
    for step in (10, 20):
        run_dir.write_whole(run_dir.checkpoint(folder, step) / "manifest.json", "{}")
    (run_dir.checkpoints(folder) / "step-00000030.corrupted").mkdir()
    run_dir.checkpoint(folder, 40).mkdir()  # not whole
    add_fault(folder, CODE)
    assert asked(folder, capsys, began=10)[0] == ["again", "n1,n2"]
    assert json.loads(run_dir.restarts_file(folder).read_text())["step"] == 20
