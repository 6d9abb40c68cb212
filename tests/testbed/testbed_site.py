"""A clone that the testbed's ordinary user can read, with the image and without a .venv."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll import run_dir
from atoll.cluster.goodput import JobStart, job_starts
from atoll.cluster.jobs import sacct
from atoll.images.recipe import recipe, stage

ROOT = Path(__file__).parents[2]
IMAGE = ROOT / "images" / "cpu.sif"
USER = "atoll"
HOW = "no testbed here; as root: make testbed image-cpu"
TINY = (
    "facility.node.peak_tflops=0.1",  # else every rank of every run measures one
    "model=llama_tiny",
    "model.config.vocab_size=512",
    "model.config.hidden_size=64",
    "model.config.intermediate_size=128",
    "model.config.num_hidden_layers=4",
    "training.global_batch_samples=8",
    "training.log_every_steps=1",
    "data=text_files",
    "data.files=texts/*.txt",
    "data.document=paragraph",
    "data.sequence_tokens=64",
    "tokenizer.vocabulary_tokens=512",
    "evaluation.max_samples=8",
    "preflight=false",  # virtual nodes share processors: one may seem unfit
    "generation.prompt=null",  # a sample would be one more start of Python for each run
)


def queued_jobs(answer: str) -> list[str]:
    """The ids of the jobs that a submission says it has queued."""
    jobs = re.findall(r"^job (\d+):", answer, re.MULTILINE)
    assert jobs, answer
    return jobs


@dataclass(frozen=True)
class Site:
    """The clone on the testbed, as its user sees it."""

    clone: Path
    image: Path
    settings: tuple[str, ...]  # of every run here

    def type(self, *words: str, check: bool = True, **variables: str) -> str:
        """Type a command in the clone; its words on both outputs."""
        exports = "".join(f"export {name}={shlex.quote(v)}; " for name, v in variables.items())
        return self.shell(f"{exports}{shlex.join(words)}", check)

    def shell(self, line: str, check: bool = True) -> str:
        done = subprocess.run(
            ["runuser", "-u", USER, "--", "bash", "-c", f"cd {self.clone} && {line}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"PATH": os.environ["PATH"], "HOME": f"/home/{USER}", "USER": USER},
        )
        assert not check or done.returncode == 0, done.stdout
        return done.stdout

    def submit(self, name: str, *words: str, **variables: str) -> str:
        """Queue a small run through the batch file; the id of its job."""
        line = ["sbatch/train.sbatch", "facility=testbed", f"name={name}", *self.settings, *words]
        return queued_jobs(self.type(*line, **variables))[0]

    def finished(self, name: str, seconds: float = 400) -> Path:
        """Wait until a run is finished; its folder."""
        folder = self.clone / "runs" / name
        made = (run_dir.result_file(folder), run_dir.export(folder))
        self.until(name, lambda: all(path.exists() for path in made), seconds)
        assert ": finished" in (said := self.status(name)), said
        return folder

    def accounted(self, name: str) -> list[JobStart]:
        """Wait until the accounting has the ends of a run's jobs, a little after it is finished."""
        folder = self.clone / "runs" / name
        ids = [line.split()[1] for line in run_dir.jobs_file(folder).read_text().splitlines()]
        self.until(name, lambda: "Unknown" not in self.type(*sacct(ids, "End")))
        return job_starts(folder)

    def until(self, name: str, ready: Callable[[], bool], seconds: float = 400) -> None:
        """Wait for something that a run does; an AssertionError with its output if it failed.

        Its status is asked for beside the wait: what is waited for may soon be over.
        """
        start = asked = time.monotonic()
        pool, said = ThreadPoolExecutor(1), None
        try:
            while not ready():
                now = time.monotonic()
                if said is None and now - asked > 10:  # it takes the processors from the run
                    asked, said = now, pool.submit(self.status, name)
                if said is not None and said.done():
                    failed = ": failed" in said.result() or now - start > seconds
                    assert not failed, f"{said.result()}\n{self.output(name)}"
                    said = None
                time.sleep(0.05)
        finally:
            pool.shutdown(wait=False)

    def status(self, name: str) -> str:
        return self.atoll("status", str(self.clone / "runs" / name))

    def atoll(self, *words: str) -> str:
        """`atoll` on the machine itself, where Slurm's programs are."""
        command = [sys.executable, "-m", "atoll", *words]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        return subprocess.run(command, capture_output=True, text=True, env=environment).stdout

    def output(self, name: str) -> str:
        files = sorted((self.clone / "runs" / name).glob("*.out"))
        return "\n".join(path.read_text() for path in files)


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """Skips, with a line saying how to get one, where there is no testbed."""
    if not is_ready():
        pytest.skip(HOW)
    with staged_site() as site:
        yield site


def is_ready() -> bool:
    """Whether this is root on a machine whose testbed is up, with an image."""
    nodes = shutil.which("sinfo") and subprocess.run(
        ["sinfo", "--noheader", "--partition=main", "--format=%D"], capture_output=True, text=True
    )
    return bool(os.geteuid() == 0 and nodes and nodes.stdout.strip() == "4" and IMAGE.exists())


@contextmanager
def staged_site() -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="atoll-testbed-", dir="/var/tmp"))
    try:
        yield _site(folder, IMAGE.resolve())
    finally:
        subprocess.run(["scancel", f"--user={USER}"], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _site(folder: Path, image: Path) -> Site:
    folder.chmod(0o755)
    stage(ROOT, folder)
    clone = folder / "atoll"
    (clone / "images").mkdir()
    copy = clone / "images" / image.name
    try:
        os.link(image, copy)
    except OSError:
        shutil.copy(image, copy)
    (clone / "images" / "cpu.sif").symlink_to(copy.name)
    texts = clone / "texts"
    texts.mkdir()
    for path in sorted((ROOT / "src" / "atoll").rglob("*.py")):
        (texts / f"{path.parent.name}-{path.stem}.txt").write_text(path.read_text())
    for made in (clone, clone / "images", texts):
        shutil.chown(made, USER, USER)
    # an image of other code than this clone's runs the clone's code
    same = image.name == recipe(ROOT, "cpu", None, "zstd").file_name
    return Site(clone, copy, (*TINY, f"image.bind_source={str(not same).lower()}"))
