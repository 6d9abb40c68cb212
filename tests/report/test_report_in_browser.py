"""The page in a real browser, in both themes, on a telephone and on a screen.

The screenshots are kept in .build/screenshots/, to be looked at.
"""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest
from test_report_page import RATES, write_run

from atoll.report import command as report

SHOTS = Path(__file__).parents[2] / ".build" / "screenshots"
# What a person would see as a fault: a page wider than its window, texts of a figure on each other.
LOOK = """<script>addEventListener('load', () => {
  const inside = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1
    && b.top < a.bottom - 1
  const over = []
  for (const svg of document.querySelectorAll('svg')) {
    const texts = [...svg.querySelectorAll('text')].filter(t => t.getBoundingClientRect().width)
    texts.forEach((a, at) => texts.slice(at + 1).forEach(b => {
      if (inside(a.getBoundingClientRect(), b.getBoundingClientRect()))
        over.push([svg.querySelector('title').textContent, a.textContent, b.textContent])
    }))
  }
  const svg = document.querySelector('.figure svg'), box = document.querySelector('.legend input')
  svg.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}))
  const point = document.querySelector('.point').textContent
  box.click()
  const hidden = document.querySelectorAll('.series.hidden').length
  box.click()
  const seen = {width: document.documentElement.scrollWidth, over, hidden, point,
    page: getComputedStyle(document.body).backgroundColor}
  parent.document.body.dataset.seen = JSON.stringify(seen)
})</script></body>"""


@pytest.fixture(scope="module")
def browser():
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    SHOTS.mkdir(parents=True, exist_ok=True)
    return program


@pytest.mark.full
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_overflows_or_overprints(browser, here, width, theme):
    for name, (rate, loss) in RATES.items():
        write_run(name, loss, f"optimizer.learning_rate={rate}", steps=300)
    assert report.main(list(RATES)) == 0
    [page] = Path("runs").glob("*/report.html")
    looked = here / "looked.html"
    inside = escape(page.read_text().replace("</body>", LOOK))
    frame = f'style="width:{width}px;height:2400px;border:0" srcdoc="{inside}"'  # no window is 390
    looked.write_text(f"<!doctype html><body style='margin:0'><iframe {frame}></iframe>")
    scheme = {"dark": 0, "light": 1}[theme]
    flags = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *(f"--user-data-dir={here}/browser", "--window-size=1440,2400"),
        *(f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=5000"),
    ]
    shot = SHOTS / f"report-{width}-{theme}.png"
    for wanted in (["--dump-dom"], [f"--screenshot={shot}"]):
        words = [browser, *flags, *wanted, looked.as_uri()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        if wanted == ["--dump-dom"]:
            text = re.search(r'<body[^>]* data-seen="([^"]*)"', done.stdout)
            assert text is not None, done.stderr
            seen = json.loads(unescape(text[1]))
    assert seen["width"] <= width and seen["over"] == []
    assert seen["point"] == "learning_rate=0.0001: loss 8 at tokens 100"
    assert seen["hidden"] >= 6  # the first run, in every figure
    assert seen["page"] == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 28)"}[theme]
    assert shot.stat().st_size > 10_000
