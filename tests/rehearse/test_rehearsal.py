"""Which job a rehearsal asks for, and what it makes of an answer."""

from pathlib import Path

import pytest

from atoll.rehearse import command, rehearsal
from atoll.rehearse.rows import DIFFERS, UNKNOWN
from atoll.rehearse.stage import Stage


def test_the_whole_job_has_the_least_nodes_and_an_account() -> None:
    run = rehearsal.whole_run(["facility=polaris"])
    assert run.nodes == run.facility.limits.queues["prod"].min_nodes == 10
    assert run.facility.account == "rehearsal"
    assert rehearsal.whole_run(["facility=polaris", "nodes=20"]).nodes == 20


def test_a_line_that_is_refused_is_the_only_row(tmp_path: Path) -> None:
    [row] = rehearsal.rehearsed(["facility=leonardo", "nodes=4000"], tmp_path)
    assert (row.state, row.subject) == (DIFFERS, "line")
    assert "at most 64 nodes" in row.words


def test_a_facility_that_atoll_refuses_is_unknown(tmp_path: Path) -> None:
    [row] = rehearsal.rehearsed(["facility=aurora"], tmp_path)
    assert (row.state, row.subject) == (UNKNOWN, "support")


def test_machines_behind_ssh_are_unknown(tmp_path: Path) -> None:
    [row] = rehearsal.rehearsed(["facility=ssh_hosts"], tmp_path)
    assert (row.state, row.subject) == (UNKNOWN, "job")


def test_the_small_job_keeps_the_facility_and_drops_the_size(tmp_path: Path) -> None:
    typed = ["facility=lumi", "experiment=llama2_7b_it", "nodes=64", "sharding=hybrid_shard"]
    run = rehearsal.whole_run(["facility=lumi"])
    this = rehearsal.Rehearsal(run, typed, Stage(tmp_path), {})
    words = rehearsal.small_words(this, None)
    assert words[:3] == ["experiment=llama2_7b_it_smoke", "facility=lumi", "sharding=hybrid_shard"]
    assert "nodes=2" in words and "nodes=64" not in words
    [binds] = [word for word in words if word.startswith("facility.binds=")]
    assert f"{tmp_path}/facility/opt/cray:/opt/cray" in binds


def test_rows_say_what_cannot_be_known() -> None:
    subjects = {
        row.subject for row in rehearsal.unknowable(rehearsal.whole_run(["facility=frontier"]))
    }
    assert subjects == {"devices", "image", "fabric", "binding"}


def test_a_failed_job_is_told_by_its_first_complaint_and_last_line() -> None:
    output = "starting\n/bin/bash: atoll: FATAL: no image\nmore\nthe end\n"
    assert "FATAL: no image" in rehearsal._reason(output)


def test_without_a_testbed_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MARIADB_SOCKET", Path("/nowhere"))
    with pytest.raises(command.UserError, match=r"this machine|of its own"):
        command.check_testbed()
