"""`atoll apply-delta`: a facility's copy of a round's global model, from the one before."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from atoll.commands import VerbParser
from atoll.errors import UserError
from atoll.federation.error_feedback import read_decoded
from atoll.federation.global_model import (
    begin,
    copy_beside_weights,
    first_global,
    publish,
    read_global,
)
from atoll.federation.tensors import (
    TensorReader,
    TensorWriter,
    files_of,
    layout_of,
    stretches,
    typed,
)


def main(argv: list[str]) -> int:
    """`atoll apply-delta CAME OUT [--base BEFORE]`: a facility's copy of a round's global model."""
    parser = VerbParser("apply-delta", main.__doc__)
    parser.add_argument("came", type=Path, help="the first global model whole, or a delta")
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", type=Path, help="the global model that the delta is added to")
    parser.add_argument("--first", action="store_true", help="CAME is a Hugging Face folder")
    arguments = parser.read(argv)
    came, out = arguments.came, arguments.out
    if arguments.first:
        first_global(came, out, {"round": 0})
        return 0
    manifest = read_global(came)
    if arguments.base is None:
        digest = take_whole(came, out)
    else:
        digest = apply_delta(arguments.base, came / "delta", manifest["codec"], out, {})
    if digest != manifest["digest"]:
        shutil.rmtree(out)
        raise UserError(
            f"{came} gives the global model {digest[:12]}, its manifest says "
            f"{manifest['digest'][:12]}",
            "delete it: it is sent again",
        )
    return 0


def take_whole(came: Path, out: Path) -> str:
    """A copy of a whole global model, in fp32; its digest, computed from the files."""
    partial = begin(out)
    shutil.copytree(came / "master", partial / "master")
    _link_export(came / "export", partial)
    return publish(partial, out, {})


def apply_delta(base: Path, delta: Path, codec: str, out: Path, about: dict[str, Any]) -> str:
    """The next global model's master, from the one before and the delta; its digest.

    Bit for bit what the server has: it adds the same decoded values.
    """
    layout, partial = layout_of(base / "master"), begin(out)
    with (
        TensorReader(files_of(base / "master")) as before,
        TensorReader(files_of(delta)) as encoded,
        TensorWriter(partial / "master", typed(layout, torch.float32)) as writer,
    ):
        for stretch in stretches(layout):
            writer.put(stretch, before.values(stretch) + read_decoded(encoded, codec, stretch))
    _link_export(base / "export", partial)
    return publish(partial, out, about)


def _link_export(export_before: Path, partial: Path) -> None:
    """A Hugging Face folder of the fp32 weights, which are there once under two names."""
    (partial / "export").mkdir()
    copy_beside_weights(export_before, partial / "export", "float32")
    for path in files_of(partial / "master"):
        os.link(path, partial / "export" / path.name)
