"""Every command that a person types, in a clone that has an image and nothing else."""

import shlex
import shutil
import tempfile
from pathlib import Path

import pytest
from testbed_site import USER, queued_jobs

from atoll.cluster.container import container_prefix
from atoll.config.compose import compose

SLURM = ("facility=testbed", "nodes=1", "training.global_batch_samples=2", "model=llama_tiny")


@pytest.fixture(scope="module")
def runs():
    """Runs on a file system of their own, as a facility's scratch is."""
    folder = Path(tempfile.mkdtemp(prefix="atoll-scratch-", dir="/srv"))
    shutil.chown(folder, USER, USER)
    yield folder / "runs"
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "words",
    [
        ("compose", *SLURM),
        ("plan", *SLURM),
        ("submit", "--dry-run", *SLURM),
        ("submit", "--sbatch-env", *SLURM),
        ("submit", "--help"),
        ("evaluate", "--dry-run", *SLURM, "model.source=texts"),
    ],
)
def test_what_only_prints_queues_nothing(words, site):
    jobs = site.shell("squeue --noheader --me --format=%i").split()
    assert site.type("sbatch/atoll", *words)
    # one of another test may have ended meanwhile
    assert set(site.shell("squeue --noheader --me --format=%i").split()) <= set(jobs)
    assert not (site.clone / "runs" / "refused").exists()


def test_a_run_elsewhere_is_queued_and_told_of(site, runs):
    place = (f"folders.runs={runs}", "name=elsewhere", "facility.submit.hold=true")
    answer = site.type("sbatch/train.sbatch", *SLURM, *place)
    (job,) = queued_jobs(answer)
    folder = runs / "elsewhere"
    try:
        assert (folder / "jobs.txt").read_text() == f"slurm {job}\n"
        assert "queued, job" in site.type("sbatch/atoll", "status", str(folder))
    finally:
        site.type("scancel", job)
    assert "cancelled" in site.type("sbatch/atoll", "status", str(folder))


def test_the_doctor_asks_this_machine(site, runs):
    answer = site.type("sbatch/atoll", "doctor", *SLURM, f"folders.runs={runs}", check=False)
    assert "apptainer" in answer.lower()
    assert "Traceback" not in answer


@pytest.fixture
def linked(site, runs):
    """A clone on scratch, by the name of a link in the home folder."""
    scratch, link = runs.parent, Path(f"/home/{USER}", runs.parent.name)
    for name in ("containers", "hydra_conf", "sbatch", "src", "texts"):  # not what other tests made
        shutil.copytree(site.clone / name, scratch / "atoll" / name)
    (scratch / "atoll" / "images").symlink_to(site.clone / "images")
    scratch.chmod(0o755)
    link.symlink_to(scratch)
    yield link / "atoll"
    link.unlink()
    shutil.rmtree(scratch / "atoll")


def test_a_clone_and_its_runs_through_a_link_of_the_home_folder(site, linked):
    """A container has the home folder, and in it the link, before its binds."""
    said = site.shell(f"cd / && {linked}/sbatch/atoll compose {shlex.join(SLURM)}")
    assert f"images: {linked}/images" in said
    texts = linked / "texts"
    words = (f"image.file={site.image}", "data=text_files", f"data.files={texts}/*.txt")
    places = (f"folders.runs={linked}", f"folders.prepared={linked}")
    run = compose((*SLURM, *words, *places), site.clone / "hydra_conf").run
    assert "__main__" in site.shell(
        f"cd / && {shlex.join([*container_prefix(run), 'ls', str(texts)])}"
    )
