"""The report in a real browser: every figure is drawn, and nothing is fetched."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from testbed_site import HOW

from atoll import run_dir
from atoll.config.compose import compose
from atoll.report import command as report
from atoll.settings import dumped

TITLES = (
    "Training loss",
    "Training loss over time",
    "Held-out perplexity",
    "Held-out perplexity over time",
    "Throughput",
    "Model FLOP utilisation",
    "Memory of a rank",
    "Checkpoints",
    "Scaling",
)
TABLES = ("Results", "Scaling", "Checkpoints", "Energy", "Provenance")
CELLS = ("estimated: 400 W x time", "0123abcd", "9.000", "0.050", "0.6%")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs of one and two ranks, as they would have written themselves down."""
    monkeypatch.chdir(tmp_path)
    for ranks in (1, 2):
        sharding = "ddp" if ranks > 1 else "single"
        words = [f"ranks_per_node={ranks}", f"name=ranks-{ranks}", f"sharding={sharding}"]
        run = compose(["facility=laptop", *words]).run
        folder = run_dir.folder(run)
        run_dir.write_whole(run_dir.settings_file(folder), yaml.safe_dump(dumped(run)))
        about = {"made_of": {"image": "cpu.sif", "lock": "0123abcd"}}
        start = {"event": "start", "ranks": ranks, "training_samples": 128, "time": 0.0}
        records = [start | about]
        for step in range(1, 9):
            rates = {"tokens_per_second": 90.0 * ranks, "mfu": 0.4, "memory_gib": 1.5}
            facts = {"step": step, "tokens": 100 * step, "loss": 5 / step, "time": 2.0 * step}
            records.append({"event": "train", "step_seconds": 2.0, **facts, **rates})
        for step in (4, 8):
            times = {"save_seconds": 3.0 + step, "blocked_seconds": 0.05}
            records.append({"event": "checkpoint", "step": step, **times})
        for step in (0, 8):
            found = {"step": step, "loss": 3.0, "perplexity": 20.0, "time": 2.0 * step}
            records.append({"event": "evaluation", **found})
        used = {"device_joules": 7.2e6, "device_source": "estimated: 400 W x time"}
        used |= {"package_joules": None, "package_source": None}
        records += [{"event": "energy", "step": 8, "first_step": 1, **used}]
        text = "".join(json.dumps(record) + "\n" for record in records)
        run_dir.metrics_file(folder).write_text(text)
    return tmp_path / "runs"


def test_a_browser_draws_every_figure(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip(HOW)
    assert report.main(["ranks-1", "ranks-2"]) == 0
    page = runs / "ranks-1" / "report.html"
    assert f"figures: runs/ranks-1/{page.name}" in capsys.readouterr().out
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    done = subprocess.run(
        [browser, *flags, f"--user-data-dir={runs}/browser", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        env=os.environ | {"HOME": str(runs)},
        timeout=120,
    )
    elements = re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)
    drawn = re.findall(r"<h3>([^<]*)</h3>", elements)
    assert set(TITLES) <= set(drawn), done.stderr
    lines = re.findall(r'class="line" points="([\d.]+,[\d.]+ [^"]+)"', elements)
    assert len(lines) >= 2 * (len(TITLES) - 1)  # checkpoints are points
    assert set(TABLES) <= set(re.findall("<h2>([^<]+)</h2>", elements))
    assert all(cell in elements for cell in CELLS)
    assert not re.search(r'(src|href)="(?!data:)', elements)
