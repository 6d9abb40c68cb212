"""Tokenising: the whole of `atoll tokenize` against the bare encoder and against datasets.map.

    python benchmarks/tokenize_rate.py [--megabytes 128] [--turns 3] [--check]

All three turn the same text into tokens with the same byte-level BPE of 32,000 tokens on the same
cores, in turns, each in a process of its own that has imported what it needs:
- raw: `encode_batch_fast` on texts already in memory, as many threads as cores, the best of two
  batch sizes; it keeps nothing. This is the limit.
- datasets.map: from a data set already loaded, batched, one process a core. It writes Arrow.
- atoll: `prepare`, from the first byte read to the manifest, with sha256, fsync and rename; only
  the tokenizer is there before.
`--check` fails where a target is missed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path

import results
from one_run import run_on

from atoll import run_dir
from atoll.data.tokenize import open_prepared, prepare

VOCABULARY_TOKENS = 32_000
RAW_BATCH_CHARACTERS = (512 << 10, 4 << 20)
MAP_BATCH_DOCUMENTS = 100
TARGETS = {"raw": 0.9, "datasets.map": 1.3}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare rates of tokenising.")
    parser.add_argument("--megabytes", type=int, default=128, help="text to tokenise")
    parser.add_argument("--turns", type=int, default=3, help="times each is run")
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(WAYS[arguments.way](arguments.folder)))
        return 0
    with tempfile.TemporaryDirectory(prefix="tokenize-rate-") as name:
        folder = Path(name)
        make_text_and_tokenizer(folder, arguments.megabytes * 1_000_000)
        rates = measure(folder, arguments.turns)
    rows = [
        results.row("whole preparation", "Mtok/s", rates["atoll"], peer, rates[peer], "higher", aim)
        for peer, aim in TARGETS.items()
    ]
    return int(not results.record("tokenize_rate", rows) and arguments.check)


def make_text_and_tokenizer(folder: Path, characters: int) -> None:
    with (folder / "text.jsonl").open("w") as file:
        for text in python_sources(characters):
            file.write(json.dumps({"text": text}) + "\n")
    run = run_on(folder / "first", [folder / "text.jsonl"], VOCABULARY_TOKENS)
    prepared = prepare(run, print)
    for name in ("tokenizer", "plan.json"):
        (prepared / name).rename(folder / name)


def python_sources(characters: int) -> Iterator[str]:
    """The standard library's sources, tests included, repeated up to a size."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [p for p in sorted(root.rglob("*.py")) if not {"site-packages"} & set(p.parts)]
    for path in cycle(paths):
        text = path.read_text("utf-8", errors="replace")
        if text:
            yield text
            characters -= len(text)
        if characters <= 0:
            return


def measure(folder: Path, turns: int) -> dict[str, list[float]]:
    """Mtok/s of each way in each turn."""

    # no script: multiprocessing would run that again in each process, which `atoll` has not either
    start = "import sys, tokenize_rate; sys.exit(tokenize_rate.main())"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}

    def turn(name: str) -> float:
        command = [sys.executable, "-c", start, "--way", name, "--folder", str(folder)]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=environment
        )
        output = done.stdout
        seconds, tokens = json.loads(output.splitlines()[-1])
        return float(tokens / seconds / 1e6)

    return results.in_turns({name: partial(turn, name) for name in WAYS}, turns)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def raw(folder: Path) -> tuple[float, int]:
    """Seconds and tokens of the bare encoder."""
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ["RAYON_NUM_THREADS"] = str(cores())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").open()]
    timings = []
    for characters in RAW_BATCH_CHARACTERS:
        batches = list(batched(texts, characters))
        began = time.perf_counter()
        tokens = 0
        for batch in batches:
            encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            tokens += sum(map(len, encodings))
        timings.append((time.perf_counter() - began, tokens))
    return min(timings)


def batched(texts: list[str], characters: int) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if sum(map(len, batch)) >= characters:
            yield batch
            batch = []
    if batch:
        yield batch


def datasets_map(folder: Path) -> tuple[float, int]:
    """Seconds and tokens of datasets.map."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(dir=folder)
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    rows = datasets.load_dataset("json", data_files=str(folder / "text.jsonl"), split="train")

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"input_ids": [encoding.ids for encoding in encodings]}

    began = time.perf_counter()
    encoded = rows.map(
        encode,
        batched=True,
        batch_size=MAP_BATCH_DOCUMENTS,
        num_proc=cores(),
        remove_columns=["text"],
    )
    seconds = time.perf_counter() - began
    return seconds, sum(len(ids) for ids in encoded.with_format("numpy")["input_ids"])


def atoll(folder: Path) -> tuple[float, int]:
    """Seconds and tokens of the whole preparation, closing tokens left out of the count."""
    place = Path(tempfile.mkdtemp(dir=folder))
    run = run_on(place, [folder / "text.jsonl"], VOCABULARY_TOKENS)
    prepared = run_dir.prepared(run)
    shutil.copytree(folder / "tokenizer", prepared / "tokenizer")
    shutil.copy(folder / "plan.json", prepared)
    began = time.perf_counter()
    prepare(run, lambda _: None)
    seconds = time.perf_counter() - began
    manifest = open_prepared(run)
    splits = ("train", "validation")
    return seconds, sum(manifest.tokens(s) - manifest.documents(s) for s in splits)


WAYS: dict[str, Callable[[Path], tuple[float, int]]] = {
    "raw": raw,
    "datasets.map": datasets_map,
    "atoll": atoll,
}


if __name__ == "__main__":
    sys.exit(main())
