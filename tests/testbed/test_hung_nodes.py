"""A node at fault, on the real Slurm: named, left out, and the run goes on by itself."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from atoll import run_dir
from atoll.cluster.goodput import goodput
from atoll.health.faults import faults

STEPS = 40
WORDS = ("nodes=2", "launcher=static", f"training.steps={STEPS}", "checkpoint.every_steps=5")
WATCHED = ("watch.stall_seconds=5", "preflight=false")


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss, from metrics.jsonl."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["event"] == "train"}


def ranks_on(node: str, run: str) -> list[int]:
    """The processes of a run's ranks on a virtual node."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode().split("\0")
            variables = (path / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        is_rank = words[1:4] == ["-m", "atoll", "launch"] and words[-2].endswith(f"/{run}")
        if is_rank and re.search(rf"SLURMD_NODENAME={node}\0", variables):
            pids.append(int(path.name))
    return pids


@pytest.fixture(scope="module")
def reference(site):
    """The losses of the same run without a fault."""
    site.submit("unharmed", *WORDS, *WATCHED)
    return losses(site.finished("unharmed"))


def stop_a_node(site, name: str) -> str:
    """Stop every rank of the run's second node behind its first checkpoint; the node."""
    folder = site.clone / "runs" / name
    site.until(name, (folder / "checkpoints" / "step-00000005" / "manifest.json").exists)
    job = run_dir.jobs_file(folder).read_text().split()[1]
    shown = site.type("scontrol", "show", "job", job)
    nodes = site.type("scontrol", "show", "hostnames", re.search(r"\bNodeList=(\S+)", shown)[1])
    node = nodes.split()[1]
    stopped = ranks_on(node, name)
    assert stopped
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    return node


def test_a_spare_node_takes_the_place_of_one_that_hangs(site, reference):
    site.submit("spared", *WORDS, *WATCHED, "spare_nodes=1")
    node = stop_a_node(site, "spared")
    folder = site.finished("spared")
    fault = faults(folder)[0]
    assert (fault.kind, fault.blame, fault.node) == ("stalled", "node", node), fault
    assert list(json.loads((folder / "excluded.json").read_text())["nodes"]) == [node]
    assert len((folder / "jobs.txt").read_text().splitlines()) == 1  # inside the same job
    assert losses(folder) == reference
    [start] = site.accounted("spared")
    columns = goodput(folder)  # of three nodes, of which the run had two at a time
    held = sum(seconds for name, seconds in columns.items() if name != "queue")
    assert start.nodes == 3 and held == pytest.approx(start.node_seconds, rel=0.01)
    assert columns["stalled"] > 0 and columns["idle"] >= start.node_seconds / 3


@pytest.mark.full
def test_another_job_goes_on_without_the_node_that_hangs(site, reference):
    site.submit("moved", *WORDS, *WATCHED)
    node = stop_a_node(site, "moved")
    folder = site.finished("moved")
    assert faults(folder)[0].node == node
    first, second = (line.split()[1] for line in (folder / "jobs.txt").read_text().splitlines())
    assert first != second
    shown = site.type("scontrol", "show", "job", second)
    assert f"ExcNodeList={node}" in shown
    assert losses(folder) == reference
