"""Padding and speed of the ways to fill samples, on real documents.

    python benchmarks/packing.py [--sequence-tokens 2048] [--check]

The documents are the sources of the installed Python packages, tokenised. `padding` is what many
fine-tuning scripts do: one document a sample, cut at its end. Lost tokens are those cut away; cut
documents are those in more pieces than their length asks for.
"""

import argparse
import json
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import results

MOST_PADDING = 0.001


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequence-tokens", type=int, default=2048)
    parser.add_argument("--check", action="store_true", help="fail where the target is missed")
    arguments = parser.parse_args()
    sequence, lengths = arguments.sequence_tokens, document_tokens()
    print(f"{len(lengths):,} documents, {lengths.sum():,} tokens, samples of {sequence}")
    print(f"{'packing':10} {'padding':>9} {'lost':>7} {'cut':>7} {'pieces/s':>12}")
    padding = {way: report(way, lengths, sequence) for way in ("best_fit", "concat", "padding")}
    case, ours = f"slots of padding, samples of {sequence}", [padding["best_fit"]]
    peers = {"one document a sample": padding["padding"], "what it may leave": MOST_PADDING}
    rows = [results.row(case, "share", ours, k, [v], "lower", 1.0) for k, v in peers.items()]
    return int(not results.record("packing", rows) and arguments.check)


def document_tokens() -> np.ndarray[Any, Any]:
    """The lengths of the documents that `atoll tokenize` makes of the standard library."""
    from atoll import run_dir
    from atoll.config.compose import compose
    from atoll.data import shards
    from atoll.data.tokenize import prepare

    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "sources.jsonl"
        text.write_text("\n".join(json.dumps({"text": source}) for source in sources()))
        words = ["facility=laptop", "data=text_files", f"data.files={text}"]
        run = compose([*words, f"folders.prepared={folder}"]).run
        prepare(run, lambda line: None)
        prepared = run_dir.prepared(run)
        manifest = shards.read_manifest(prepared)
        return np.concatenate(
            [
                np.diff(
                    np.fromfile(shards.index_file(prepared, "train", s.number), "<i8"), prepend=0
                )
                for s in manifest.shards("train")
            ]
        )


def sources(limit: int = 6000) -> Iterator[str]:
    """Real documents of every length that lie on any machine with our environment."""
    paths = sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))
    for path in paths[:: max(1, len(paths) // limit)]:
        text = path.read_text(errors="ignore")
        if text.strip():
            yield text


def report(way: Any, lengths: np.ndarray[Any, Any], sequence: int) -> float:
    """Print one line; the share of slots that hold padding."""
    from atoll.data.pack import pack

    started = time.perf_counter()
    plan = pack(lengths, sequence, way)
    seconds = time.perf_counter() - started
    lost = 1 - plan.piece_length.sum() / lengths.sum()
    needed = -(-lengths // sequence)
    starts = np.cumsum(lengths) - lengths
    pieces = np.bincount(
        np.searchsorted(starts, plan.piece_start, side="right") - 1, minlength=len(lengths)
    )
    cut = (pieces > needed).mean()
    rate = len(plan.piece_length) / seconds
    print(f"{way:10} {plan.padding_fraction:9.4%} {lost:7.2%} {cut:7.2%} {rate:12,.0f}")
    return plan.padding_fraction


if __name__ == "__main__":
    sys.exit(main())
