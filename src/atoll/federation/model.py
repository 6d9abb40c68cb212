"""The global model of a round, as files.

GLOBAL/
  master/   fp32 weights, as many files as the export has
  memory/   what the server's step remembers, and what encoding has cost so far; fp32
  delta/    the difference to the round before, encoded: all that travels to a facility
  export/   the Hugging Face folder, in half precision
  manifest.json   digests of the files, written last
"""

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from atoll import run_dir
from atoll.errors import UserError
from atoll.federation.codec import CODECS, stored_length
from atoll.federation.tensors import Reader, Writer

STRETCH = 1 << 19  # values in memory at once, of one tensor: a multiple of every block
Shapes = dict[str, tuple[int, ...]]
# what of an export is copied from the model before: never anything of an update
BESIDE_WEIGHTS = (".json", ".model", ".txt", ".jinja")


@dataclass(frozen=True)
class Stretch:
    """Some values of one tensor of one file."""

    file: str
    name: str
    first: int
    count: int


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def shapes_of(master: Path) -> dict[str, Shapes]:
    """File name -> tensor -> shape."""
    found = {}
    for path in files_of(master):
        reader = Reader(path)
        found[path.name] = {name: entry.shape for name, entry in reader.entries.items()}
        reader.close()
    if not found:
        raise UserError(f"no safetensors in {master}", "give the folder of a model")
    return found


def stretches(shapes: dict[str, Shapes]) -> Iterator[Stretch]:
    """All values of a model, in the order in which they are always taken."""
    for file, tensors in shapes.items():
        for name, shape in tensors.items():
            total = prod(shape)
            for first in range(0, total, STRETCH):
                yield Stretch(file, name, first, min(STRETCH, total - first))


def part_of(stretch: Stretch, per_block: int) -> tuple[int, int]:
    """Where a part of an encoded stretch lies in its tensor, and how many values it has."""
    return stored_length(per_block, stretch.first), stored_length(per_block, stretch.count)


def encoded_shapes(shapes: Shapes, codec: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Tensor of an encoded file -> its format and length."""
    return {
        name + suffix: (dtype, (stored_length(per_block, prod(shape)),))
        for name, shape in shapes.items()
        for suffix, (dtype, per_block) in CODECS[codec].parts.items()
    }


def plain_shapes(
    shapes: Shapes, dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (dtype, shape) for name, shape in shapes.items()}


def first_global(model: Path, out: Path, about: dict[str, Any]) -> str:
    """The global model before any round, from a Hugging Face folder; its digest."""
    shapes = shapes_of(model)
    partial = begin(out)
    (partial / "master").mkdir()
    for file, tensors in shapes.items():
        reader = Reader(model / file)
        writer = Writer(partial / "master" / file, plain_shapes(tensors, torch.float32))
        for stretch in stretches({file: tensors}):
            writer.put(
                stretch.name,
                stretch.first,
                reader.values(stretch.name, stretch.first, stretch.count).float(),
            )
        writer.finish()
        reader.close()
    shutil.copytree(model, partial / "export", ignore=shutil.ignore_patterns("adapter", ".*"))
    return publish(partial, out, about)


def copy_beside_weights(export: Path, into: Path, dtype: str) -> None:
    """Configuration, tokenizer and index of the model before; the dtype is the new one."""
    for path in sorted(export.iterdir()):
        if path.suffix in BESIDE_WEIGHTS and path.is_file():
            content = path.read_bytes()
            if path.name == "config.json":
                values = json.loads(content)
                content = json.dumps(values | {"dtype": dtype}, indent=1).encode()
            run_dir.write_whole(into / path.name, content)


def begin(out: Path) -> Path:
    """An empty folder beside `out`, for what is not whole yet."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, out: Path, about: dict[str, Any]) -> str:
    """Write the manifest, then give the folder its name; the digest of the master."""
    files = {path.name: run_dir.sha256_of(path) for path in files_of(partial / "master")}
    digest = run_dir.digest(files, 64)
    record = {"digest": digest, "master": files, **about}
    for folder in {path.parent for path in partial.rglob("*")}:
        run_dir.sync_folder(folder)
    run_dir.write_whole(partial / "manifest.json", json.dumps(record, indent=1, sort_keys=True))
    if out.exists():
        shutil.rmtree(out)  # without a manifest, or of the same inputs: the same bytes again
    partial.rename(out)
    run_dir.sync_folder(out.parent)
    return digest


def read_global(folder: Path) -> dict[str, Any]:
    """The manifest of a whole global model; `UserError` where there is none."""
    try:
        found: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} is no whole global model ({type(error).__name__})",
            "aggregate the round before it first",
        ) from None
    return found


def main(argv: list[str]) -> int:
    """`atoll apply-delta CAME OUT [--base BEFORE]`: a facility's copy of a round's global model."""
    parser = argparse.ArgumentParser(prog="atoll apply-delta", description=main.__doc__)
    parser.add_argument("came", type=Path, help="the first global model whole, or a difference")
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", type=Path, help="the global model that the difference is to")
    parser.add_argument("--first", action="store_true", help="CAME is a Hugging Face folder")
    arguments = parser.parse_args(argv)
    came, out = arguments.came, arguments.out
    if arguments.first:
        first_global(came, out, {"round": 0})
        return 0
    told = read_global(came)
    if arguments.base is None:
        found = take_whole(came, out)
    else:
        found = apply_delta(arguments.base, came / "delta", told["codec"], out, {})
    if found != told["digest"]:
        shutil.rmtree(out)
        raise UserError(
            f"{came} gives the global model {found[:12]}, its manifest says {told['digest'][:12]}",
            "delete it: it is sent again",
        )
    return 0


def take_whole(came: Path, out: Path) -> str:
    """A copy of a whole global model, in fp32; its digest, computed from the files."""
    partial = begin(out)
    shutil.copytree(came / "master", partial / "master")
    _make_folder(came / "export", partial)
    return publish(partial, out, {})


def _make_folder(export_before: Path, partial: Path) -> None:
    """A Hugging Face folder of the fp32 weights, which are there once under two names."""
    (partial / "export").mkdir()
    copy_beside_weights(export_before, partial / "export", "float32")
    for path in files_of(partial / "master"):
        os.link(path, partial / "export" / path.name)


def apply_delta(base: Path, delta: Path, codec: str, out: Path, about: dict[str, Any]) -> str:
    """The next global model's master, from the one before and the difference; its digest.

    Bit for bit what the server has: it adds the same decoded values.
    """
    shapes = shapes_of(base / "master")
    partial = begin(out)
    (partial / "master").mkdir()
    coding = CODECS[codec]
    for file, tensors in shapes.items():
        old, change = Reader(base / "master" / file), Reader(delta / file)
        writer = Writer(partial / "master" / file, plain_shapes(tensors, torch.float32))
        for stretch in stretches({file: tensors}):
            parts = {
                suffix: change.values(stretch.name + suffix, *part_of(stretch, per_block))
                for suffix, (_, per_block) in coding.parts.items()
            }
            added = coding.decode(parts, stretch.count)
            before = old.values(stretch.name, stretch.first, stretch.count)
            writer.put(stretch.name, stretch.first, before + added)
        writer.finish()
        old.close()
        change.close()
    _make_folder(base / "export", partial)
    return publish(partial, out, about)
