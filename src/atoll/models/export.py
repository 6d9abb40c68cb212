"""A Hugging Face folder from a sharded model, written by all ranks.

Each rank writes its own files; only the parameter under way is ever whole on a rank that does
not write it.
"""

import errno
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from atoll import run_dir
from atoll.models.adapter import Merged

Pieces = list[list[str]]


def plan_files(sizes: dict[str, int], max_file_bytes: int, ranks: int) -> Pieces:
    """Names of parameters per file, in the model's order; file i belongs to rank i % ranks.

    There are at least as many files as ranks where there are parameters enough.
    """
    target = min(max_file_bytes, max(1, -(-sum(sizes.values()) // ranks)))
    files: Pieces = [[]]
    filled = 0
    for name, size in sizes.items():
        if files[-1] and filled + size > target:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


@dataclass(frozen=True)
class Numbered:
    """Which of the export's files these are: the first one's number, and how many there are."""

    first: int
    total: int


@torch.no_grad()
def write_weights(
    folder: Path,
    parameters: dict[str, Any],
    dtype: torch.dtype,
    files: Pieces,
    numbered: Numbered,
    rank: int,
    ranks: int,
) -> None:
    """Gather each parameter in turn and write this rank's files, fsynced, modes from the umask.

    Collective: every rank calls it with the same arguments but `rank`.
    """
    failure: OSError | None = None
    for number, names in enumerate(files):
        mine = number % ranks == rank and failure is None
        tensors = {}
        for name in names:
            whole = _whole(parameters[name])
            if mine:
                tensors[name] = whole.to(device="cpu", dtype=dtype, copy=True).contiguous()
        if mine:
            try:
                _write_file(folder / file_name(numbered.first + number, numbered.total), tensors)
            except OSError as error:
                failure = error  # the other ranks still need this one to gather
    if failure is not None:
        raise failure


def file_name(number: int, count: int) -> str:
    return (
        "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
    )


def write_rest(
    folder: Path,
    config: Any,
    architecture: str,
    dtype: torch.dtype,
    files: Pieces,
    total_bytes: int,
    tokenizer: Path,
) -> None:
    """The index, the configuration and the tokenizer beside the weights; one rank calls this."""
    if len(files) > 1:
        weight_map = {n: file_name(i, len(files)) for i, names in enumerate(files) for n in names}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        run_dir.write_whole(folder / "model.safetensors.index.json", json.dumps(index, indent=1))
    config.dtype = dtype
    config.architectures = [architecture]
    config.save_pretrained(folder)
    for path in sorted(tokenizer.iterdir()):
        if path.suffix in (".json", ".model", ".txt", ".jinja") and path.name != "config.json":
            run_dir.write_whole(folder / path.name, path.read_bytes())


def publish(partial: Path, final: Path) -> None:
    """Put a complete export in the place of an older one."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    run_dir.sync_folder(partial)
    if final.exists():
        os.rename(final, old)
    os.rename(partial, final)
    run_dir.sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def partial_folder(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


def start(final: Path) -> Path:
    """An empty folder beside the final one."""
    partial = partial_folder(final)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # its only cause here is the disk
        raise OSError(errno.EIO, str(error), str(path)) from error
    os.chmod(path, 0o666 & ~_umask())
    run_dir.sync_file(path)


def _whole(parameter: Any) -> Tensor:
    if isinstance(parameter, Merged):
        return parameter.whole()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
