"""Training begins with the first shards, waits for the next, and ends where they will not come."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import small_run

from atoll import run_dir

SECONDS = 90.0
DOCUMENTS, LONG = 110, 60  # from so many on a document takes a while


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, path = random.Random(3), tmp_path_factory.mktemp("text") / "text.txt"
    words = [" ".join(source.choice(small_run.WORDS) for _ in range(60)) for _ in range(DOCUMENTS)]
    long = " ".join(source.choice(small_run.WORDS) + str(n) for n in range(100_000))
    path.with_name("short.txt").write_text("\n".join(words[65:]))
    path.write_text("\n".join(w if n < LONG else f"{w} {long}" for n, w in enumerate(words[:65])))
    return path


class Submitted:
    """`atoll submit` of two ranks on two texts, one of which takes longer than they do to start."""

    def __init__(self, folder: Path, text: Path) -> None:
        self.folder, self.run_folder = folder, folder / "runs" / "early"
        words = ["name=early", "facility=laptop", "ranks_per_node=2", "sharding=ddp"]
        sources = (
            f"{{name: long, files: {text}}}, {{name: short, files: {text.with_name('short.txt')}}}"
        )
        words += ["data=mixture", f"data.sources=[{sources}]", "data.document=line"]
        words += ["data.documents_per_shard=10", "data.window_shards=2", "data.workers=1"]
        words += ["data.sequence_tokens=32", "tokenizer.vocabulary_tokens=300"]
        words += ["tokenizer.training_documents=20", "model=llama_tiny", "precision=fp32"]
        words += ["training.steps=24", "training.epochs=null", "training.log_every_steps=1"]
        words += ["training.global_batch_samples=8", "training.microbatch_samples=4"]
        words += ["evaluation.max_samples=8", "checkpoint.every_steps=4", "generation.prompt=null"]
        self.argv = [sys.executable, "-m", "atoll", "submit", *words]

    def start(self) -> "subprocess.Popen[str]":
        out = subprocess.PIPE
        return subprocess.Popen(
            self.argv, cwd=self.folder, stdout=out, stderr=subprocess.STDOUT, text=True
        )

    def losses(self) -> dict[int, float]:
        lines = run_dir.metrics(self.run_folder) if self.run_folder.exists() else []
        return {line["step"]: line["loss"] for line in lines if line["event"] == "train"}

    def shard(self, number: int) -> bool:
        return any(self.folder.glob(f"prepared/long-*/train/{number:05d}.json"))

    def is_whole(self) -> bool:
        return any(self.folder.glob("prepared/long-*/manifest.json"))

    def preparing(self) -> int:
        """The process of `atoll tokenize`."""
        for folder in Path("/proc").glob("[0-9]*"):  # an image has no pgrep
            with suppress(OSError):
                words = (folder / "cmdline").read_bytes().decode().split("\0")
                if words[1:4] == ["-m", "atoll", "tokenize"] and str(self.folder) in words[4]:
                    return int(folder.name)
        raise AssertionError("nobody prepares")


def eventually(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def test_ranks_train_on_what_is_there_and_a_killed_preparation_ends_them(
    text: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = Submitted(tmp_path_factory.mktemp("whole"), text)
    process = whole.start()
    eventually(lambda: whole.shard(3))
    os.kill(preparing := whole.preparing(), signal.SIGSTOP)
    eventually(whole.losses)
    assert not whole.is_whole()
    os.kill(preparing, signal.SIGCONT)
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    assert len(whole.losses()) == 24
    assert not run_dir.preparing_file(whole.run_folder).exists()

    killed = Submitted(tmp_path_factory.mktemp("killed"), text)
    process = killed.start()
    eventually(lambda: killed.shard(1))
    os.kill(killed.preparing(), signal.SIGKILL)
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    # the next one of either source, as far as it was when it was killed
    missing = r"shard \d of [57] \(\w+\) of \S+ is missing, and its preparation failed"
    assert re.search(missing, said), said
    process = killed.start()
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    assert killed.losses() == whole.losses()
