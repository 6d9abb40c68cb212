"""A folder's safetensors files and the index beside them: read with care, written durably."""

import errno
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from atoll import run_dir
from atoll.errors import UserError, first_line
from atoll.settings.exchange import STAYS

FILE_NAME = re.compile(r"^[A-Za-z0-9._-]+\.safetensors$")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file in `folder` that holds it.

    File names from an index are taken only if they are plain names of files in that folder.
    """
    if (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        return {name: _inside(folder, file) for name, file in weight_map.items()}
    if not (folder / SINGLE).is_file():
        raise UserError(
            f"no {SINGLE} in {folder}",
            "only safetensors are read: `atoll prepare --into BUNDLE …` converts pytorch_model.bin "
            "and Meta's own Llama files",
        )
    return dict.fromkeys(tensor_names(folder / SINGLE), folder / SINGLE)


def tensor_names(path: Path) -> list[str]:
    """The names in one file, in its order."""
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise corrupted(path, error) from error


def corrupted(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path} cannot be read as safetensors: {first_line(error)}", "fetch or export it again"
    )


def file_name(number: int, count: int) -> str:
    """The name of file `number` (from 0) of `count`, as transformers gives it."""
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_tensors(
    path: Path, tensors: dict[str, Tensor], stays: Sequence[str] = ()
) -> dict[str, Any]:
    """A file that is seen complete or not at all, fsynced, its mode from the umask.

    stays: names of tensors that do not learn, kept in its metadata. Returns its bytes and sha256,
    which is taken while the disk syncs. Raises `OSError` where that fails.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        staying = {STAYS: " ".join(stays)} if stays else {}
        save_file(tensors, partial, metadata={"format": "pt"} | staying)
    except SafetensorError as error:  # its only cause here is the disk
        raise OSError(errno.EIO, str(error), str(path)) from error
    mask = os.umask(0)
    os.umask(mask)
    partial.chmod(0o666 & ~mask)
    with ThreadPoolExecutor(1) as pool:
        sha256 = pool.submit(run_dir.sha256_of, partial)
        run_dir.sync_file(partial)
    facts = {"bytes": partial.stat().st_size, "sha256": sha256.result()}
    partial.replace(path)
    run_dir.sync_folder(path.parent)
    return facts


def write_index(folder: Path, files: list[list[str]], total_bytes: int | None = None) -> None:
    """Which of the files holds which tensor; nothing where there is one file."""
    if len(files) == 1:
        return
    weight_map = {n: file_name(i, len(files)) for i, names in enumerate(files) for n in names}
    metadata = {} if total_bytes is None else {"total_size": total_bytes}
    index = {"metadata": metadata, "weight_map": weight_map}
    run_dir.write_whole(folder / INDEX, json.dumps(index, indent=1))


def _inside(folder: Path, file: str) -> Path:
    if not FILE_NAME.match(file):
        raise UserError(
            f"the index of {folder} names {file!r}, which is no plain file name",
            "do not use weights from where this came from",
        )
    path = folder / file
    if not path.is_file():
        raise UserError(f"{path} is missing, the index names it", "fetch or export the model again")
    return path
