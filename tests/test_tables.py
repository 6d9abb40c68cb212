"""Tables read the same on a screen and in a pipe, however wide they are."""

import pytest

from atoll.tables import table


def test_numbers_stand_to_the_right_and_text_to_the_left():
    rows = [["ddp", 7, "1.5", "yes"], ["full_shard", 12, "1,024", "no"]]
    assert table(["", "ranks", "MiB", "fits"], rows).splitlines() == [
        "            ranks    MiB  fits",
        "ddp             7    1.5  yes",
        "full_shard     12  1,024  no",
    ]


def test_no_names_no_head():
    assert table(["", ""], [["ok", "all"], ["wrong", "one"]]) == "ok     all\nwrong  one"


def test_a_missing_number_leaves_a_column_of_numbers():
    assert table(["a", "b"], [["10", None], ["-", "x"]]).splitlines() == [" a  b", "10", " -  x"]


def test_nothing_is_cut_coloured_or_read_as_markup(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = f"[bold]{'x' * 300}[/bold]"
    assert table(["name"], [[text], ["=5"]]).splitlines() == ["name", text, "=5"]


@pytest.mark.parametrize("rows", [[], [["a", "b"]]])
def test_a_table_may_be_short(rows):
    assert len(table(["x", "y"], rows).splitlines()) == 1 + len(rows)
