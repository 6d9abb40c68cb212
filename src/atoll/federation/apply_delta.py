"""`atoll apply-delta`: a facility's copy of a round's global model, from the one before."""

import argparse
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from atoll import run_dir
from atoll.commands import CommandParser, json_object
from atoll.federation import global_model
from atoll.federation.error_feedback import read_decoded
from atoll.federation.global_model import begin, publish
from atoll.federation.tensors import Stretch, TensorReader
from atoll.one_writer import one_writer

# of a model's manifest, for facilities that go on from their own weights
KEPT = ("averaged_rounds", "changed_rounds", "taken", "refused", "refused_in", "rule")


def main(argv: list[str]) -> int:
    """`atoll apply-delta CAME OUT [--base BEFORE]`: a facility's copy of a round's global model."""
    parser = CommandParser("apply-delta", main.__doc__)
    parser.add_argument("came", type=Path, help="the first global model whole, or a delta")
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", type=Path, help="the global model that the delta is added to")
    parser.add_argument("--first", action="store_true", help="CAME is a Hugging Face folder")
    about = "JSON: kept in the first one's manifest"
    parser.add_argument("--about", type=json_object, default={}, help=about)
    arguments = parser.read(argv)
    with one_writer(arguments.out):
        _apply(arguments)
    return 0


def _apply(arguments: argparse.Namespace) -> None:
    came, out = arguments.came, arguments.out
    if arguments.first:
        global_model.first_global(came, out, {"round": 0, **arguments.about})
        return
    manifest = global_model.read_global(came)
    about = {name: manifest[name] for name in KEPT if name in manifest}
    if arguments.base is None:
        take_whole(came, out, about, manifest["digest"])
    else:
        apply_delta(
            arguments.base, came / "delta", manifest["codec"], out, about, manifest["digest"]
        )


def take_whole(
    came: Path, out: Path, about: dict[str, Any] | None = None, wanted: str | None = None
) -> str:
    """A copy of a whole global model, in fp32; its digest, computed from the files.

    about: what its manifest keeps of that of the whole. wanted: as below.
    """
    partial = begin(out)
    shutil.copytree(came / "master", partial / "master", copy_function=run_dir.copy_synced)
    global_model.link_export(came / "export", partial)
    return publish(partial, out, about or {}, wanted=wanted)


def apply_delta(
    base: Path,
    delta: Path,
    codec: str,
    out: Path,
    about: dict[str, Any] | None = None,
    wanted: str | None = None,
) -> str:
    """The next global model's master, from the one before and the delta; its digest.

    Bit for bit what the server has: it adds the same decoded values, where there are any.
    about: what its manifest keeps of the server's. wanted: the digest it has to have; `UserError`
    where it has not.
    """
    partial = begin(out)
    with TensorReader(base / "master") as before, TensorReader(delta) as encoded:

        def values_of(stretch: Stretch) -> Tensor:
            if stretch.name not in encoded.entries:
                return before.values(stretch)
            return before.values(stretch) + read_decoded(encoded, codec, stretch)

        global_model.write_master(partial, before, values_of)
    global_model.link_export(base / "export", partial)
    return publish(partial, out, about or {}, wanted=wanted)
