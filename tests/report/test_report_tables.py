"""`atoll report` of a campaign from its files alone, and the styles of tables."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.campaign.store import checked_campaign, load_store
from atoll.config.compose import campaign_values
from atoll.errors import UserError
from atoll.report import command as report
from atoll.report.campaign import campaign_cells, rounds
from atoll.report.tables import comma_separated, markdown, text

NAMES = ["north", "east", "west"]


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    """One round that ended without west, one under way."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "campaigns" / "c"
    values = checked_campaign(
        campaign_values(["federation=demo", "name=c", "steps=15"])
    ).model_dump(mode="json")
    write(folder / "campaign.json", values)
    first = folder / "round-001"
    lines = [{"event": "began", "time": 1000.0}]
    for position, name in enumerate(NAMES):
        sent = {"facility": name, "time": 1002.0, "seconds": 1.0, "bytes": 1 << 20}
        lines.append({"event": "sent", **sent})
        if name == "west":
            late = {"facility": name, "why": "no update after 5 minutes", "late": True, "asked": 1}
            lines.append({"event": "left out", "time": 1140.0, **late})
            continue
        (first / name / "update").mkdir(parents=True)
        times = {"submitted": 1002.0, "started": 1010.0 + position, "ended": 1100.0}
        answer = {"facility": name, "state": "ready", "losses": [4.0, 3.5 - position], **times}
        answer["node_seconds"] = {"compute": 90.0, "idle": 90.0 * position}
        lines.append({"event": "answered", "time": 1105.0, **answer})
        lines.append({"event": "received", **sent, "time": 1110.0, "bytes": 5 << 20})
    manifest = {"digest": "x", "weights": {"north": 0.25, "east": 0.75}, "rejected": {}}
    write(first / "global" / "manifest.json", manifest)
    lines.append({"event": "averaged", "time": 1150.0, "seconds": 5.0})
    (first / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "round-002").mkdir()
    begun = json.dumps({"event": "began", "time": 1151.0})
    (folder / "round-002" / "journal.jsonl").write_text(begun + '\n{"cut off by a ki')
    return folder


def write(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def tidy(printed, name):
    """The rows of one of the files that --csv wrote and named."""
    [file] = [line for line in printed.splitlines() if line.endswith(f"/{name}.csv")]
    return list(csv.DictReader(io.StringIO(Path(file).read_text())))


def test_a_campaign_is_told_from_its_files(campaign, capsys):
    assert report.main(["c", "--csv"]) == 0
    printed = capsys.readouterr().out
    rows = tidy(printed, "facilities")
    assert [(row["round"], row["facility"]) for row in rows] == [
        (number, name) for number in "12" for name in NAMES
    ]
    assert list(rows[1].values())[2:] == [
        *("15", "9.0", "1.0", "89.0", "1.0", "1.00", "5.00", "4.0000", "2.5000", "0.75", "")
    ]
    assert rows[2]["remarks"] == "left out: no update after 5 minutes"
    rounds = [list(row.values()) for row in tidy(printed, "rounds")]
    assert rounds == [["1", "150.0", "5.0", ""], ["2", "", "", ""]]
    shares = tidy(printed, "goodput-node-minutes")
    assert [(row["facility"], row["compute"], row["idle"], row["effective"]) for row in shares] == [
        ("north", "1.500", "0.000", "1"),
        ("east", "1.500", "1.500", "0.5"),
        ("all facilities", "3.000", "1.500", "0.667"),
    ]


def test_who_has_left_stays_in_its_rounds(campaign, capsys):
    values = json.loads((campaign / "campaign.json").read_text())
    values["sites"] = [site for site in values["sites"] if site["name"] != "east"]
    write(campaign / "campaign.json", values)
    assert report.main(["c", "--csv"]) == 0
    rows = tidy(capsys.readouterr().out, "facilities")
    facilities = [(row["round"], row["facility"], row["weight"]) for row in rows]
    assert facilities == [
        *(("1", "north", "0.25"), ("1", "west", ""), ("1", "east", "0.75")),
        *(("2", "north", ""), ("2", "west", "")),
    ]


def test_a_loss_that_no_perplexity_has_ends_no_report(campaign):
    store = load_store(campaign)
    known = [replace(each, global_loss=1e6) for each in rounds(store)]
    assert float(campaign_cells(store, known)["held-out loss"]) == 1e6


def test_a_round_that_noted_nothing_before_a_kill_is_no_round(campaign, capsys):
    (campaign / "round-003").mkdir()
    assert report.main(["c", "--csv"]) == 0
    assert list(tidy(capsys.readouterr().out, "rounds")[-1].values()) == ["2", "", "", ""]


def test_a_campaign_that_has_not_begun(campaign):
    for journal in campaign.glob("round-*/journal.jsonl"):
        journal.unlink()
    with pytest.raises(UserError, match="campaign c has begun no round"):
        report.main(["c"])


def test_the_page_holds_figures_tables_and_settings(campaign, capsys):
    assert report.main([str(campaign)]) == 0
    assert capsys.readouterr().out.endswith(f"figures: {campaign / 'report.html'}\n")
    page = (campaign / "report.html").read_text()
    for shown in ("Timeline", "Goodput", "Held-out loss", "<h2>Facilities", "<summary>Settings"):
        assert shown in page
    assert "$" not in page.partition("<script>")[0]


def test_what_came_of_a_campaign_stands_first(campaign):
    assert report.main([str(campaign)]) == 0
    cards, _, figures = (campaign / "report.html").read_text().partition("</dl>")
    for fact in ("rounds<dd>1 of 5", "held-out loss before<dd>4.0000", "MiB sent<dd>13.00"):
        assert f"<dt>{fact}</div>" in cards
    assert "<dt>minutes<dd>2.50</div>" in cards and "<dt>left out<dd>1</div>" in cards
    assert "<dt>held-out loss<dd>" not in cards  # which nobody has measured yet
    losses = figures.partition("<title>Held-out loss</title>")[2].partition("</svg>")[0]
    assert losses.count("<circle") == 2  # a line of one point would show nothing


def test_a_row_may_lack_a_column_and_styles_agree():
    rows = [{"run": "a|b", "rate": "9,000"}, {"run": "c", "rate": "12", "loss": "1.5"}]
    assert text(rows) == "run   rate  loss\na|b  9,000\nc       12   1.5"
    assert comma_separated(rows) == "run,rate,loss\na|b,9000,\nc,12,1.5"
    assert markdown(rows).splitlines()[2:] == ["| a\\|b | 9,000 |  |", "| c | 12 | 1.5 |"]
