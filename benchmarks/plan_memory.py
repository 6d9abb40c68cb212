"""The planner's memory against what runs used: peak of a process's resident memory on processors.

    python benchmarks/plan_memory.py [--only CASE] [--rounds 1] [--table] [--check]

Each case is a run of four steps in processes of its own, in turns; `planned` is `atoll plan`'s
closed form, `measured` the highest peak of its ranks behind the last step but one, before anything
is saved: it has all moments. Whole runs go on to their end. glibc's heap keeps freed blocks of some
megabytes; it is told to return them, so that what is measured is what is needed. Runs with a plain
heap are not told so: there the plan has what the heap keeps. The rows go to
results/plan_memory.jsonl, and with --table from there into docs/planner.md and its figure.
memory_cases.py says what is run.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from memory_cases import (
    CASES,
    COMMON,
    FITTED,
    FORECAST,
    PLAIN,
    PLAIN_FITTED,
    PLAIN_FORECAST,
    SCORED,
    STEPS,
    STEPS_PLAIN,
    WHOLE,
)
from results import FOLDER, machine, versions

from atoll.config.compose import compose, known_shape
from atoll.plan.memory import Memory, memory_of
from atoll.report.drawing import Curves, Series
from atoll.report.html import standalone

LIMITS = {"median": 0.03, "worst": 0.10}
DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, FIGURE = DOCS / "planner.md", DOCS / "images" / "plan_memory.svg"
KINDS = {
    "fitted": FITTED,
    "forecast": FORECAST,
    "whole runs": WHOLE,
    "plain heap": PLAIN_FITTED,
    "plain heap, forecast": PLAIN_FORECAST,
}
BEGIN, END = "<!-- plan_memory: made by make bench-plan_memory -->", "<!-- plan_memory: end -->"


def measured_gib(overrides: list[str], folder: Path, name: str) -> float:
    """The highest peak of the ranks behind the last step but one, where the run is ended.

    Of a whole run behind all.
    """
    command = [sys.executable, "-m", "atoll", "submit", *overrides]
    returns_blocks = {} if name in PLAIN else {"MALLOC_MMAP_THRESHOLD_": "65536"}
    log = folder / "log.txt"
    with open(log, "w") as file:
        started = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | returns_blocks,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        if name in WHOLE:
            return _to_its_end(started, folder)
        steps = STEPS_PLAIN if name in PLAIN else STEPS
        return _behind_step(steps - 1, started, folder)
    except RuntimeError:
        raise SystemExit(f"{' '.join(overrides)}\n{log.read_text()[-3000:]}") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def _behind_step(number: int, started: "subprocess.Popen[bytes]", folder: Path) -> float:
    while True:
        ended = started.poll() is not None
        for file in folder.glob("runs/*/metrics.jsonl"):
            records = [
                json.loads(line)
                for line in file.read_text().splitlines(keepends=True)
                if line.endswith("\n")
            ]
            steps = [r for r in records if r["event"] == "train"]
            if len(steps) >= number:
                return float(steps[number - 1]["memory_gib"])
        if ended:
            raise RuntimeError(f"the run ended before its step {number}")
        time.sleep(0.1)


def _to_its_end(started: "subprocess.Popen[bytes]", folder: Path) -> float:
    """The most that any process of the run has had resident; each keeps its own highest."""
    highest, submit = 0.0, psutil.Process(started.pid)
    while started.poll() is None:
        for process in submit.children(recursive=True):
            highest = max(highest, _highest_gib(process.pid))
        time.sleep(0.02)
    if started.returncode or not list(folder.glob("runs/*/result.json")):
        raise RuntimeError("the run failed")
    return highest


def _highest_gib(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended
        return 0.0
    lines = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(lines[0].split()[1]) / 2**20 if lines else 0.0


@contextmanager
def text_to_learn() -> Iterator[Path]:
    """A folder with this package's sources as text, and its tokens, prepared once for all cases."""
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(__file__).resolve().parents[1] / "src" / "atoll"
        text = "\n\n".join(path.read_text() for path in sorted(sources.rglob("*.py")))
        (Path(folder) / "text.txt").write_text(text)
        (Path(folder) / "pairs.jsonl").write_text("".join(pairs(text)))
        write_task(Path(folder) / "tasks", text.splitlines())
        yield Path(folder)


def pairs(text: str) -> Iterator[str]:
    """Two answers to one prompt, a line; as long as a sample of 512 tokens takes, or nearly."""
    for begin in range(0, 60 * 1000, 1000):
        chosen, rejected = text[begin : begin + 500], text[begin + 500 : begin + 1000]
        yield json.dumps({"prompt": "Go on.", "chosen": chosen, "rejected": rejected}) + "\n"


def write_task(folder: Path, lines: list[str]) -> None:
    """A task of the harness with its data: which of two lines goes on, of a sample's length."""
    folder.mkdir()
    asked = [
        {"question": "\n".join(lines[n : n + 8]), "choices": lines[n + 8 : n + 10], "answer": 0}
        for n in range(0, 160, 10)
    ]
    (folder / "lines.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
    task = {
        **{"task": "lines", "dataset_path": "json", "test_split": "test"},
        "dataset_kwargs": {"data_files": {"test": str(folder / "lines.jsonl")}},
        **{"output_type": "multiple_choice", "doc_to_text": "{{question}}"},
        **{"doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"},
        "metric_list": [{"metric": "acc"}],
    }
    (folder / "lines.yaml").write_text(json.dumps(task))  # which is YAML


def words_of(name: str) -> list[str]:
    """What the run of a case is composed from, but for its text."""
    words = CASES[name]
    # two microbatches a step wherever one sample is a microbatch
    batch = next(w for w in reversed(words) if w.startswith("training.microbatch_samples="))
    samples, ranks = int(batch.partition("=")[2]), 1 if "ranks_per_node=1" in words else 2
    ranks = 4 if "ranks_per_node=4" in words else ranks
    pipeline = any("pipeline" in word for word in words)
    divided = pipeline or any(w.startswith(("sharding.tensor", "sharding.context")) for w in words)
    passes = 2 if samples == 1 or pipeline else 1
    size = samples * (ranks // 2 if divided else ranks) * passes
    text = [] if "task=preference" in words else ["data=text_files", "data.document=paragraph"]
    return [*COMMON, *text, *words, f"training.global_batch_samples={size}"]


def planned_of(name: str) -> Memory:
    run = compose([*words_of(name), "data.files=[text.txt]"]).run
    return memory_of(run, known_shape(run))


def row(name: str, folder: Path) -> dict[str, Any]:
    """One turn of a case."""
    planned, words = planned_of(name), words_of(name)
    file = "pairs.jsonl" if "task=preference" in words else "text.txt"
    overrides = [*words, f"data.files=[{folder}/{file}]", f"folders.prepared={folder}/prepared"]
    overrides += [f"evaluation.tasks_folder={folder}/tasks"] if SCORED in words else []
    with tempfile.TemporaryDirectory() as cwd:
        used = measured_gib(overrides, Path(cwd), name)
    terms = {k: round(v / 2**30, 4) for k, v in vars(planned).items()}
    return {
        "case": name,
        "planned_gib": planned_gib(name, planned),
        "measured_gib": used,
        "terms": terms,
    }


def planned_gib(name: str, planned: Memory) -> float:
    """Of a step, of all that a whole run does, or of a step with what the heap keeps."""
    if name in PLAIN:
        return (planned.peak + planned.heap) / 2**30
    return planned.needed / 2**30 if name in WHOLE else planned.peak_gib


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail beyond the limits")
    parser.add_argument("--only", default="", help="cases whose name holds this, or that|that")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each case")
    parser.add_argument("--terms", action="store_true", help="print every term too")
    parser.add_argument("--table", action="store_true", help="only write the page's table")
    arguments = parser.parse_args()
    if not arguments.table:
        measure(arguments.only, arguments.rounds, arguments.terms)
    errors = write_table()
    return int(arguments.check and not within(errors))


def measure(only: str, rounds: int, terms: bool) -> None:
    """All cases in turns, each kept as it is measured."""
    print(f"{'':30}{'planned':>10}{'measured':>10}{'error':>8}   GiB of one rank")
    about = {"benchmark": "plan_memory", "machine": machine(), "versions": versions()}
    with text_to_learn() as folder:
        for turn in range(rounds):
            for name in list(CASES)[:: 1 if turn % 2 == 0 else -1]:
                if not any(part in name for part in only.split("|")):
                    continue
                measured = row(name, folder)
                print(shown(measured), flush=True)
                if terms:
                    print(measured["terms"])
                date = {"date": time.strftime("%Y-%m-%d", time.gmtime())}
                with open(FOLDER / "plan_memory.jsonl", "a") as file:
                    file.write(json.dumps(about | date | measured) + "\n")


def shown(row: dict[str, Any]) -> str:
    error = row["planned_gib"] / row["measured_gib"] - 1
    return f"{row['case']:30}{row['planned_gib']:10.3f}{row['measured_gib']:10.3f}{error:8.1%}"


def newest() -> dict[str, dict[str, Any]]:
    """Case -> its newest row, its measure the median of all turns."""
    kept: dict[str, list[dict[str, Any]]] = {}
    for line in (FOLDER / "plan_memory.jsonl").read_text().splitlines():
        each = json.loads(line)
        kept.setdefault(each["case"], []).append(each)
    rows = {}
    for name in CASES:
        if name in kept:
            last = kept[name][-1]
            median = statistics.median(r["measured_gib"] for r in kept[name])
            # the formula as it is now: what a run took stays true
            planned = planned_gib(name, planned_of(name))
            rows[name] = last | {"measured_gib": median, "planned_gib": planned}
    return rows


def error_of(row: dict[str, Any]) -> float:
    return float(row["planned_gib"] / row["measured_gib"] - 1)


def write_table() -> list[float]:
    """Put the newest rows into the page, and draw them; their errors, the largest last."""
    rows = newest()
    sizes = sorted(abs(error_of(row)) for row in rows.values())
    last = max(rows.values(), key=lambda row: str(row["date"]))
    about = (
        f"{len(rows)} cases, GiB of the fullest rank, {last['date']}, torch "
        f"{last['versions']['torch']}: median error {statistics.median(sizes):.1%}, worst "
        f"{sizes[-1]:.1%}."
    )
    lines = [about, ""]
    for kind, cases in KINDS.items():
        lines += _part(kind, [rows[name] for name in cases if name in rows])
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text("\n".join([before + BEGIN, *lines, END + rest.split(END)[1]]))
    FIGURE.write_text(standalone(_figure(rows)))
    return sizes


def _part(kind: str, rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return [f"{kind}: not measured yet.", ""]
    sizes = [abs(error_of(row)) for row in rows]
    lines = [
        f"{kind}: {len(rows)} cases, median {statistics.median(sizes):.1%}, "
        f"worst {max(sizes):.1%}.",
        "",
    ]
    lines += ["| case | planned | measured | error |", "|---|---|---|---|"]
    lines += [
        f"| {row['case']} | {row['planned_gib']:.3f} | {row['measured_gib']:.3f} "
        f"| {error_of(row):+.1%} |"
        for row in rows
    ]
    return [*lines, ""]


def _figure(rows: dict[str, dict[str, Any]]) -> Curves:
    """Measured over planned, a point for each case; the line is where both are the same."""
    series = []
    for place, (kind, cases) in enumerate(KINDS.items()):
        points = [(rows[n]["planned_gib"], rows[n]["measured_gib"]) for n in cases if n in rows]
        series.append(Series(kind, place, sorted(points), "points"))
    ends = [size for each in series for point in each.points for size in point]
    line = [(min(ends), min(ends)), (max(ends), max(ends))]
    series.append(Series("as planned", len(series), line, "dashed"))
    return Curves("Planned and measured memory of a rank", "planned GiB", "measured GiB", series)


def within(errors: list[float]) -> bool:
    return statistics.median(errors) <= LIMITS["median"] and errors[-1] <= LIMITS["worst"]


if __name__ == "__main__":
    sys.exit(main())
