"""One job trains a run, whatever a site exports and however often it is queued."""

import pytest

ONE_NODE = ("nodes=1", "launcher=static_node", "training.steps=4")


@pytest.mark.matrix
def test_of_two_jobs_in_one_run_the_second_is_refused(site):
    """An array's tasks start together; the site hands none of the environment on."""
    words = ("facility.submit.array=1-2", "facility.submit.dependency=null")
    site.submit("twice", *ONE_NODE, *words, SBATCH_EXPORT="NONE")
    folder = site.finished("twice")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert len([line for line in lines if '"event": "train"' in line]) == 4
    jobs = (folder / "jobs.txt").read_text().splitlines()
    assert len([line for line in jobs if line.endswith(" refused")]) == 1
    assert "run twice is running already" in site.output("twice")


def test_a_job_queued_by_hand_without_its_cores_is_told_so(site):
    words = " ".join(["facility=testbed", "name=few", "facility.node.cores=4", *site.settings])
    exports = "export SBATCH_ACCOUNT=island SBATCH_PARTITION=main"
    line = f"sbatch --wait -o few.out -N 1 --ntasks-per-node=2 sbatch/train.sbatch {words}"
    site.shell(f"{exports}; {line}", check=False)
    assert "need 4" in (output := (site.clone / "few.out").read_text())
    assert "--cpus-per-task=2" in output


@pytest.mark.full
def test_a_chain_is_followed_to_its_living_end(site):
    """Where no job is requeued: the next one's id is known, and status waits for it."""
    limit = ("facility.walltime_minutes=2", "restart.notice_seconds=100", "facility.requeue=false")
    site.submit("chained", *ONE_NODE, "training.steps=4000", *limit)
    file = site.clone / "runs" / "chained" / "jobs.txt"
    site.until("chained", lambda: file.exists() and len(file.read_text().splitlines()) > 1)
    jobs = [line.split()[1] for line in file.read_text().splitlines()]
    try:
        assert f"job {jobs[-1]}" in (said := site.status("chained")), said
        assert ": queued" in said or ": running" in said
    finally:
        site.type("scancel", *jobs)
