"""The global model of a round, as files.

GLOBAL/
  master/   fp32 weights, as many files as the export has
  memory/   what the server's step remembers, and the residual of encoding the delta; fp32
  delta/    what changed since the round before, encoded: all that travels to a facility
  export/   the Hugging Face folder, in half precision
  manifest.json   digests of the files, written last
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll import run_dir
from atoll.errors import UserError
from atoll.federation.tensors import (
    Stretch,
    TensorReader,
    TensorWriter,
    TypedLayout,
    bytes_of,
    copy_fixed,
    files_of,
    stretches,
)
from atoll.proof.statement import OWN
from atoll.settings.exchange import BESIDE_WEIGHTS

CONFIG, INDEX = "config.json", "model.safetensors.index.json"


def first_global(model: Path, out: Path, about: dict[str, Any]) -> str:
    """The global model before any round, from a Hugging Face folder; its digest."""
    partial = begin(out)
    with TensorReader(model) as reader:
        write_master(partial, reader, reader.values)
    link_export(model, partial)
    return publish(partial, out, about)


def write_master(
    partial: Path, before: TensorReader, values_of: Callable[[Stretch], Tensor]
) -> None:
    """The fp32 weights, a stretch at a time; what does not learn as it was before."""
    wide = before.typed_as(torch.float32)
    with TensorWriter(partial / "master", wide, before.stays) as writer:
        for stretch in stretches(before.layout):
            writer.put(stretch, values_of(stretch))
        copy_fixed(before, writer)


def copy_beside_weights(
    export: Path, into: Path, dtype: str, weights: TypedLayout | None = None
) -> None:
    """Configuration, tokenizer and index of the model before; the dtype is the new one.

    weights: of the new model, by which its index says how many bytes it has.
    """
    for path in sorted(export.iterdir()):
        if path.suffix in BESIDE_WEIGHTS and path.is_file() and path.name not in OWN:
            content = path.read_bytes()
            if path.name == CONFIG:
                content = _of_dtype(content, dtype)
            elif path.name == INDEX and weights is not None:
                content = _of_bytes(content, bytes_of(weights))
            run_dir.write_whole(into / path.name, content)


def _of_dtype(config: bytes, dtype: str) -> bytes:
    """A configuration with another dtype, also by the name of transformers 4 where it has it."""
    values = json.loads(config)
    older = {"torch_dtype": dtype} if "torch_dtype" in values else {}
    return json.dumps(values | {"dtype": dtype} | older, indent=1).encode()


def _of_bytes(index: bytes, total: int) -> bytes:
    """An index with another total size, where it has one."""
    values = json.loads(index)
    about = values.get("metadata") or {}
    if about.get("total_size", total) == total:
        return index
    return json.dumps(values | {"metadata": about | {"total_size": total}}, indent=1).encode()


def link_export(before: Path, partial: Path) -> None:
    """A Hugging Face folder of the fp32 weights, which are there once under two names."""
    (partial / "export").mkdir()
    with TensorReader(partial / "master") as reader:
        wide = reader.typed_as(torch.float32)
    copy_beside_weights(before, partial / "export", "float32", wide)
    for path in files_of(partial / "master"):
        os.link(path, partial / "export" / path.name)


def begin(out: Path) -> Path:
    """An empty folder beside `out`, for what is not whole yet."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish(
    partial: Path,
    out: Path,
    about: dict[str, Any],
    files: dict[str, str] | None = None,
    wanted: str | None = None,
) -> str:
    """Write the manifest, then give the folder its name; the digest of the master.

    files: the sha256 of the master's files, where they are known already. wanted: the digest that
    it has to have, else it is removed, and `UserError` raised.
    """
    if files is None:
        files = {path.name: run_dir.sha256_of(path) for path in files_of(partial / "master")}
    digest = run_dir.digest(files, 64)
    if wanted not in (None, digest):
        shutil.rmtree(partial)
        raise UserError(
            f"what came gives the global model {digest[:12]} for {out}, its manifest says {wanted}",
            "delete what came: it is sent again",
        )
    record = {"digest": digest, "master": files, **about}
    for folder in {path.parent for path in partial.rglob("*")}:
        run_dir.sync_folder(folder)
    run_dir.write_whole(partial / "manifest.json", json.dumps(record, indent=1, sort_keys=True))
    replace_folder(partial, out)
    return digest


def replace_folder(partial: Path, final: Path) -> None:
    """Give a folder its name; one that was there goes only when the new one is complete."""
    run_dir.sync_folder(partial)
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    run_dir.sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def read_global(folder: Path) -> dict[str, Any]:
    """The manifest of a whole global model; `UserError` where there is none."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} is no whole global model ({type(error).__name__})",
            "aggregate the round before it first",
        ) from None
    return manifest
