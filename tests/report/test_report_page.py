"""The report of runs: what came out first, failed runs among others, one offline page for all."""

import csv
import gzip
import json
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from atoll import run_dir
from atoll.config.compose import compose
from atoll.errors import UserError
from atoll.report import command as report
from atoll.report import figures, html
from atoll.report.run import epoch_losses, read
from atoll.report.scale import scale_of
from atoll.report.watch import server_of
from atoll.settings import dumped

RATES = {"slow": (1e-4, 4.0), "best": (1e-3, 2.0), "worst": (1e-2, 7.0)}


def write_run(name, held_out, *words, steps=40, ranks=1):
    run = compose(["facility=laptop", f"name={name}", *words]).run
    folder = run_dir.folder(run)
    run_dir.write_whole(run_dir.settings_file(folder), yaml.safe_dump(dumped(run)))
    start = {"event": "start", "ranks": ranks, "training_samples": 4096, "time": 0.0}
    lines = [start | {"parameters": 12_000_000, "steps": steps}]
    lines.append({"event": "evaluation", "step": 0, "loss": 8.0, "perplexity": 2981.0, "time": 0.0})
    for step in range(1, steps + 1):
        figures = {"tokens_per_second": 90.0 * ranks, "mfu": 0.4, "memory_gib": 1.5}
        facts = {"step": step, "tokens": 100 * step, "loss": 8 / step, "time": 60.0 * step}
        lines.append({"event": "train", "step_seconds": 2.0, **facts, **figures})
    last = {"loss": held_out, "perplexity": 2.7**held_out, "time": 60.0 * steps}
    lines.append({"event": "evaluation", "step": steps, **last})
    run_dir.metrics_file(folder).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def sweep(here):
    """Three runs of other learning rates, one that failed, and a folder that is no run."""
    for name, (rate, loss) in RATES.items():
        write_run(name, loss, f"optimizer.learning_rate={rate}")
    dead = write_run("dead", 1.0, "optimizer.learning_rate=1")
    run_dir.metrics_file(dead).unlink()
    (dead / "failure.txt").write_text("loss is nan at step 1\nlower the rate\n")
    (here / "runs" / "other").mkdir()
    return sorted(str(path) for path in (here / "runs").iterdir())


def table(name, folder):
    return list(csv.DictReader((Path(folder) / "report" / f"{name}.csv").open()))


def test_results_come_first_best_first_under_what_differs(sweep, capsys):
    assert report.main([*sweep, "--csv"]) == 0
    printed = capsys.readouterr()
    folder = Path(printed.out.split()[0]).parents[1]
    rows = table("results", folder)
    assert [(row["run"], row["folder"]) for row in rows] == [
        ("learning_rate=0.001", "best"),
        ("learning_rate=0.0001", "slow"),
        ("learning_rate=0.01", "worst"),
        ("learning_rate=1.0", "dead"),
    ]
    best, dead = rows[0], rows[-1]
    assert (best["held-out loss"], best["final loss"], best["tokens"]) == (
        "2.0000",
        "0.2000",
        "4000",
    )
    assert (best["MFU"], best["minutes"], best["node-hours"]) == ("0.4", "40.00", "0.667")
    assert dead["held-out loss"] == "" and dead["state"].startswith("failed: loss is nan")
    assert "left out: no run at" in printed.err and "other" in printed.err
    assert {row["series"] for row in table("figure-training-loss", folder)} == {
        row["run"] for row in rows[:-1]
    }
    for file in (folder / "report").glob("*.csv"):  # tidy: as many cells as names, none with a %
        lines = list(csv.reader(file.open()))
        assert len({len(line) for line in lines}) == 1
        assert not any(cell.endswith("%") for line in lines for cell in line)


def test_runs_without_any_step_are_named_with_their_reason(sweep):
    with pytest.raises(UserError, match=r"has steps to report: dead \(failed\)"):
        report.main([name for name in sweep if name.endswith(("dead", "other"))])


def test_a_long_fact_has_a_line_of_its_own(here):
    folder = write_run("one", 2.0)
    assert report.main([str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "<div class=all><dt>state<dd>not finished: step 40 is the last" in page
    assert "<h3>Goodput" not in page  # nobody wrote down where its time went
    assert ">training loss, epoch 1<" in page and ">loss 1<" not in page


def test_one_page_holds_all_offline(sweep):
    assert report.main(sweep) == 0
    [page] = Path("runs").glob("*/report.html")
    text = page.read_text()
    assert len(gzip.compress(text.encode())) < 600_000
    assert not re.search(r'(src|href)="?(https?:)?//', text) and text.count("<fieldset") == 1
    assert text.index("<h2>Results") < text.index("<svg") < text.index("<summary>Settings")
    drawn = re.findall(
        r'<svg [^>]*role="img"[^>]*><title>([^<]+)</title><desc>([^<]+)</desc>', text
    )
    assert len(drawn) == text.count("<svg ") == 7  # and none without a value
    loss = dict(drawn)["Training loss"]
    assert "learning_rate=0.001: 8 at 100, 0.2 at 4,000" in loss
    series = re.findall(r'class="series (c\d)" data-key="([^"]+)"', text)
    assert len(set(series)) == len({key for _, key in series}) == 3  # one colour everywhere
    assert "efficiency" not in text


def test_efficiency_is_of_a_scaling_series(here, capsys):
    for ranks in (1, 2):
        write_run(f"on-{ranks}", 3.0, f"ranks_per_node={ranks}", ranks=ranks)
    assert report.main(["on-1", "on-2"]) == 0
    assert "efficiency" in capsys.readouterr().out


def test_two_runs_are_compared(sweep, capsys):
    best, slow = (name for name in sweep if name.endswith(("best", "slow")))
    assert report.main([best, slow, "--compare"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert ["optimizer.learning_rate", "0.001", "0.0001"] in [line.split() for line in printed]
    assert ["held-out", "loss", "2.0000", "4.0000", "+100.0%"] in [x.split() for x in printed]
    page = next(Path("runs").glob("*/report.html")).read_text()
    marked = re.findall("<mark>([^<]*)</mark>", page)
    assert any("learning_rate: 0.001" in line for line in marked)
    assert not any("vocab" in line for line in marked)
    with pytest.raises(UserError, match="--compare is given 1 run"):
        report.main([best, "--compare"])
    with pytest.raises(UserError, match="has no steps to compare"):
        report.main([best, "runs/mistyped", "--compare"])


def test_the_speed_is_that_of_the_newest_ranks(here):
    folder = write_run("grown", 2.5)
    lines = [json.loads(x) for x in run_dir.metrics_file(folder).read_text().splitlines()]
    for line in lines:
        if line["event"] == "train" and line["step"] > 30:
            line["tokens_per_second"] = 180.0
    at = next(n for n, x in enumerate(lines) if x["event"] == "train" and x["step"] == 31)
    lines.insert(at, lines[0] | {"ranks": 2, "step": 30})
    run_dir.metrics_file(folder).write_text("".join(json.dumps(line) + "\n" for line in lines))
    grown = read(folder)
    assert (grown.devices, grown.tokens_per_second) == (2, 180.0)


def test_evaluations_between_lines_are_in_the_figures(here):
    folder = write_run("sparse", 2.5)
    lines = [json.loads(x) for x in run_dir.metrics_file(folder).read_text().splitlines()]
    kept = [x for x in lines if x["event"] != "train" or x["step"] % 10 == 0]
    kept.append({"event": "evaluation", "step": 25, "loss": 3.0, "perplexity": 20.0, "time": 0.0})
    run_dir.metrics_file(folder).write_text("".join(json.dumps(line) + "\n" for line in kept))
    found = {line["step"]: line["tokens"] for line in figures._evaluations(read(folder))}
    assert found == {0: 0, 25: 2500, 40: 4000}


def test_an_epoch_has_its_own_number(here):
    """Of four steps each, where a line comes every ten."""
    folder = write_run("short", 2.5, "training.global_batch_samples=1024")
    lines = [json.loads(x) for x in run_dir.metrics_file(folder).read_text().splitlines()]
    kept = [x for x in lines if x["event"] != "train" or x["step"] % 10 == 0]
    run_dir.metrics_file(folder).write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert list(epoch_losses(read(folder))) == [3, 5, 8, 10]


def test_a_single_run_says_what_it_was_and_shows_both_samples(here):
    folder = write_run("alone", 2.5)
    run_dir.untrained_sample_file(folder).write_text("def qx zz\n")
    run_dir.sample_file(folder).write_text("def name(self):\n")
    assert report.main(["alone"]) == 0
    text = (folder / "report.html").read_text()
    head = text[text.index("<main>") : text.index("<svg")]
    shown = ("8.0000 → 2.5000", "12M", "40 of 40", "before training", "def qx zz", "def name(self)")
    assert all(each in head for each in shown)


def test_energy_of_starts_that_were_killed_is_not_taken_for_none(here):
    folder = write_run("part", 2.5)
    known = {"device_joules": 3.6e5, "device_source": "measured: NVML", "package_joules": None}
    line = {"event": "energy", "first_step": 41, "step": 40, "time": 0.0, **known}
    before = run_dir.metrics_file(folder).read_text()
    run_dir.metrics_file(folder).write_text(before + json.dumps(line) + "\n")
    assert report.main(["part"]) == 0, "of steps that were all taken again"
    run_dir.metrics_file(folder).write_text(before)
    line["first_step"] = 31
    with run_dir.metrics_file(folder).open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert report.main(["part"]) == 0
    text = (folder / "report.html").read_text()
    assert "measured: NVML, of 10 of 40 steps" in text and "≥ 0.1" in text
    assert ">360<" in text, "joules for each of those ten steps' tokens"
    line["first_step"] = 1
    with run_dir.metrics_file(folder).open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert report.main(["part"]) == 0
    text = (folder / "report.html").read_text()
    assert "of 10 of" not in text and "≥" not in text


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(share * x for share, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_all_that_is_read_stands_out_in_both_themes():
    for theme in html.themes():
        page = luminance(theme["page"])
        for name in theme.keys() - {"page", "line"}:
            bright, dark = sorted((luminance(theme[name]), page), reverse=True)
            assert (bright + 0.05) / (dark + 0.05) >= 4.5, name


@pytest.mark.parametrize(
    ("values", "is_log", "ticks"),
    [
        ([0.0, 97.0], False, [0, 20, 40, 60, 80, 100]),
        ([3.0, 3000.0], True, [10, 100, 1000]),
        ([5.0], False, [4.4, 4.6, 4.8]),
        ([0.0, 4.0], True, [0, 1, 2, 3, 4]),
        ([1e-310, 4.0], True, [0, 1, 2, 3, 4]),
        ([5e-324], True, []),
        ([], False, [0, 0.2, 0.4]),
    ],
)
def test_ticks_are_round(values, is_log, ticks):
    scale = scale_of(values, is_log)
    assert scale.ticks()[: len(ticks)] == pytest.approx(ticks)
    assert all(0 <= scale.share(value) <= 1 for value in values)


def test_the_page_is_served_here_while_the_run_goes_on(sweep):
    def page():
        return report.report_of(["best"]).page(is_watched=True)

    with server_of(page, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with urllib.request.urlopen(f"{address}/") as answer:
            assert b"<body data-watched>" in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}/etc/passwd")
        server.shutdown()


def test_a_port_in_use_is_said_in_two_lines(here):
    write_run("alone", 2.5)
    with server_of(str, 0) as server, pytest.raises(UserError, match="cannot listen at"):
        report.main(["alone", "--watch", "--port", str(server.server_port)])
