"""Whole runs on a real Slurm of four nodes, in a real container."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from testbed_site import USER

FOUR_NODES = ("nodes=4", "training.steps=6")


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss, as the run wrote them down."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r["loss"] for r in records if r["event"] == "train"}


@pytest.fixture(scope="module")
def reference(site) -> dict[int, float]:
    sample = ("generation.prompt=def", "generation.max_new_tokens=4")
    site.submit("static", *FOUR_NODES, "launcher=static", *sample)
    return losses(site.finished("static"))


def test_four_nodes_train_in_the_container(site, reference):
    folder = site.clone / "runs" / "static"
    assert sorted(reference) == [1, 2, 3, 4, 5, 6]
    assert (folder / "export" / "model.safetensors.index.json").exists()
    site.until("static", (folder / "sample.txt").exists)
    start = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert start["ranks"] == 8
    assert re.search(r"finished, 6 steps, loss 6\.\d+, perplexity \d+", site.status("static"))


@pytest.mark.parametrize("launcher", ["static_node", "torchrun", "mpiexec"])
def test_every_launcher_gives_the_same_losses(launcher, site, reference):
    site.submit(launcher, *FOUR_NODES, f"launcher={launcher}")
    assert losses(site.finished(launcher)) == reference


def test_pbs_s_commands_give_the_same_losses(site, reference):
    site.submit("pbs", *FOUR_NODES, "facility=testbed_pbs")
    assert losses(site.finished("pbs")) == reference
    assert (site.clone / "runs" / "pbs" / "jobs.txt").read_text().startswith("pbs ")


def signal_ranks(name: str) -> None:
    subprocess.run(["pkill", f"-{name}", "-u", USER, "-f", "^[^ ]*python3 -m atoll launch"])


def test_a_run_goes_on_after_its_time_limit_with_the_same_losses(site, reference):
    """Its ranks stand still from the first step on, as for a file system, until Slurm's notice.

    On a slow machine that comes before the first step is over, and they may be about to end.
    """
    limit = ("facility.walltime_minutes=2", "restart.notice_seconds=60")
    site.submit("limited", *FOUR_NODES, "launcher=static_node", *limit)
    folder = site.clone / "runs" / "limited"
    lines, notice, restarts_file = (
        folder / name for name in ("metrics.jsonl", "stop", "restarts.jsonl")
    )
    site.until("limited", lambda: lines.exists() and 1 in losses(folder))
    signal_ranks("STOP")
    site.until("limited", lambda: notice.exists() or restarts_file.exists())
    signal_ranks("CONT")
    assert losses(site.finished("limited")) == reference
    restarts = [json.loads(text) for text in restarts_file.read_text().splitlines()]
    assert 0 < restarts[0]["step"] < 6
    assert "the run goes on in the next one" in site.output("limited")


def test_a_job_queued_with_sbatch_itself(site):
    exports = site.shell(
        f"apptainer -q exec --env PYTHONPATH={site.clone}/src {site.image} "
        "python3 -m atoll submit --sbatch-env facility=testbed"
    )
    assert "export SBATCH_ACCOUNT=island\n" in exports
    nasty = "generation.prompt='$(touch pwned); touch pwned'"
    words = shlex.join(
        ["facility=testbed", "name=direct", "training.steps=2", *site.settings, nasty]
    )
    line = f"sbatch -N 2 --ntasks-per-node=2 sbatch/train.sbatch {words}"
    said = site.shell(f"{exports}\nexport HF_TOKEN=hf_very_secret\n{line}")
    assert "Submitted batch job" in said
    folder = site.finished("direct")
    assert len(losses(folder)) == 2
    assert not list(site.clone.rglob("pwned"))
    texts = [p.read_bytes() for p in folder.rglob("*") if p.is_file()]
    texts += [p.read_bytes() for p in site.clone.glob("slurm-*.out")]
    assert texts
    assert not [text for text in texts if b"hf_very_secret" in text]
