"""Whole runs on a real Slurm of four nodes, in a real container."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from threading import Thread

import pytest
from testbed_site import USER

LIMIT = ("launcher=static_node", "facility.walltime_minutes=2", "restart.notice_seconds=60")


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss, as the run wrote them down."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r["loss"] for r in records if r["event"] == "train"}


@pytest.fixture(scope="module")
def size(request) -> tuple[str, ...]:
    """All four nodes in make test-full, else two, so that two runs have room beside each other."""
    nodes = 4 if request.config.getoption("--full") else 2
    return (f"nodes={nodes}", "training.steps=6")


@pytest.fixture(scope="module")
def limited(site, size) -> Thread:
    """A run whose ranks stand still from its start until Slurm's notice, as for a file system.

    Not from its first step: on a fast machine all six are over in less than a second. On a slow one
    the notice comes before the first is over, and they may be about to end.
    """
    site.submit("limited", *size, *LIMIT)
    folder = site.clone / "runs" / "limited"
    lines, notice, restarts = (folder / n for n in ("metrics.jsonl", "stop", "restarts.jsonl"))

    def stand_still() -> None:
        site.until("limited", lines.exists)
        signal_ranks("STOP", folder)
        try:
            site.until("limited", lambda: notice.exists() or restarts.exists())
        finally:
            signal_ranks("CONT", folder)

    thread = Thread(target=stand_still)
    thread.start()
    return thread


def signal_ranks(name: str, folder: Path) -> None:
    pattern = f"^[^ ]*python3 -m atoll launch .*{folder}"
    subprocess.run(["pkill", f"-{name}", "-u", USER, "-f", pattern])


@pytest.fixture(scope="module")
def reference(request, site, size) -> dict[int, float]:
    if "nodes=2" in size:  # there is room for both, so this one trains while that one waits
        request.getfixturevalue("limited")
    sample = ("generation.prompt=def", "generation.max_new_tokens=4")
    tried = ("preflight=true", "watch.preflight_share=0.01")
    site.submit("static", *size, "launcher=static", *sample, *tried)
    return losses(site.finished("static"))


def test_nodes_train_together_in_the_container(site, size, reference):
    folder = site.clone / "runs" / "static"
    assert sorted(reference) == [1, 2, 3, 4, 5, 6]
    assert (folder / "export" / "model.safetensors.index.json").exists()
    site.until("static", (folder / "sample.txt").exists)
    records = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    start = records[0]
    events = [record["event"] for record in records[:3]]
    assert events == ["start", "prediction", "preflight"]
    assert start["ranks"] == (8 if "nodes=4" in size else 4)
    assert re.search(r"finished, 6 steps, loss 6\.\d+, perplexity \d+", site.status("static"))


@pytest.mark.matrix(always=lambda launcher: launcher == "static_node")
@pytest.mark.parametrize("launcher", ["static_node", "torchrun", "mpiexec"])
def test_every_launcher_gives_the_same_losses(launcher, site, size, reference):
    site.submit(launcher, *size, f"launcher={launcher}")
    assert losses(site.finished(launcher)) == reference


def test_pbs_s_commands_give_the_same_losses(site, size, reference):
    site.submit("pbs", *size, "facility=testbed_pbs")
    assert losses(site.finished("pbs")) == reference
    assert (site.clone / "runs" / "pbs" / "jobs.txt").read_text().startswith("pbs ")


def test_a_run_goes_on_after_its_time_limit_with_the_same_losses(site, reference, limited):
    limited.join()
    assert losses(site.finished("limited")) == reference
    file = site.clone / "runs" / "limited" / "restarts.jsonl"
    restarts = [json.loads(text) for text in file.read_text().splitlines()]
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
