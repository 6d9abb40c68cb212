"""What a facility's training changed, encoded, with what the encoding left out kept for later."""

import argparse
import json
import secrets
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll import run_dir
from atoll.errors import UserError
from atoll.federation import model
from atoll.federation.codec import CODECS
from atoll.federation.model import Stretch
from atoll.federation.tensors import Reader, Writer
from atoll.federation.update import FORMAT_VERSION, Manifest, facts_of, manifest_file

LOSSLESS = "fp32"


def main(argv: list[str]) -> int:
    """`atoll make-delta`: the update of a finished run to the global model it began from."""
    parser = argparse.ArgumentParser(prog="atoll make-delta", description=main.__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--codec", required=True, choices=list(CODECS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--previous-residual", type=Path)
    parser.add_argument("--left-after", type=Path, required=True)
    parser.add_argument("--about", required=True, help="JSON: the rest of the manifest")
    arguments = parser.parse_args(argv)
    result = json.loads(run_dir.result_file(arguments.run).read_text())
    about = json.loads(arguments.about) | {
        "tokens": trained_tokens(arguments.run),
        "steps": result["steps"],
        "loss": result["loss"],
    }
    make_delta(
        arguments.base,
        run_dir.export(arguments.run),
        arguments.previous_residual,
        arguments.codec,
        arguments.out,
        arguments.left_after,
        about,
    )
    return 0


def trained_tokens(run_folder: Path) -> int:
    """The tokens that a run was trained on, from the last line that counts them."""
    lines = run_dir.metrics_file(run_folder).read_text().splitlines()
    counts = [record["tokens"] for record in map(json.loads, lines) if record["event"] == "train"]
    return int(counts[-1])


def make_delta(
    base: Path,
    trained: Path,
    previous_residual: Path | None,
    codec: str,
    out: Path,
    left_after: Path,
    about: dict[str, Any],
) -> Manifest:
    """Write the update of a trained model (fp32 export) to the global model of the round.

    previous_residual, left_after: folders, kept at the facility, of what encoding had and has left
    out; it is added before encoding (Seide et al. 2014). They are of different rounds, so doing a
    round again adds nothing twice. Raises `UserError` where the two models have not the same
    tensors, or a value is not finite.
    """
    shapes = model.shapes_of(base / "master")
    partial, rest = model.begin(out), model.begin(left_after)
    with ExitStack() as stack:
        values_of = _trained_values(trained, shapes, stack)
        for file, tensors in shapes.items():
            old = Reader(base / "master" / file)
            kept = None if previous_residual is None else _reader(previous_residual / file, stack)
            writer = Writer(partial / f"delta-{file}", model.encoded_shapes(tensors, codec))
            left = Writer(rest / file, model.plain_shapes(tensors, torch.float32))
            for stretch in model.stretches({file: tensors}):
                place = (stretch.name, stretch.first, stretch.count)
                wanted = values_of(stretch) - old.values(*place)
                if kept is not None:
                    wanted += kept.values(*place)
                _put(writer, left, stretch, wanted, codec)
            writer.finish()
            left.finish()
            old.close()
    files = {path.name: facts_of(path) for path in model.files_of(partial)}
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        base=model.read_global(base)["digest"],
        encoding=codec,  # type: ignore[arg-type]
        nonce=secrets.token_hex(16),
        files=files,
        **about,
    )
    run_dir.write_whole(manifest_file(partial), manifest.model_dump_json(indent=1))
    _replace(rest, left_after)
    _replace(partial, out)
    return manifest


def _put(writer: Writer, left: Writer, stretch: Stretch, wanted: Tensor, codec: str) -> None:
    if not bool(torch.isfinite(wanted).all()):
        raise UserError(
            f"the trained model has values in {stretch.name} that are not finite",
            "nothing is sent: lower the learning rate, and start the round's job again",
        )
    coding = CODECS[codec]
    parts = coding.encode(wanted)
    for suffix, (_, per_block) in coding.parts.items():
        writer.put(stretch.name + suffix, model.part_of(stretch, per_block)[0], parts[suffix])
    left.put(stretch.name, stretch.first, wanted - coding.decode(parts, stretch.count))


def _trained_values(trained: Path, shapes: dict[str, model.Shapes], stack: ExitStack) -> Any:
    """The function that reads a stretch of the trained model, however its files are cut."""
    home: dict[str, Reader] = {}
    for path in model.files_of(trained):
        reader = Reader(path)
        stack.callback(reader.close)
        home |= dict.fromkeys(reader.entries, reader)
    wanted = {name: shape for tensors in shapes.values() for name, shape in tensors.items()}
    found = {name: reader.entries[name].shape for name, reader in home.items()}
    if found != wanted:
        name = sorted(set(found.items()) ^ set(wanted.items()))[0][0]
        raise UserError(
            f"{trained} has {name} as {found.get(name)}, the global model as {wanted.get(name)}",
            "train the model of this round",
        )
    return lambda one: home[one.name].values(one.name, one.first, one.count).float()


def _reader(path: Path, stack: ExitStack) -> Reader | None:
    if not path.is_file():
        return None
    reader = Reader(path)
    stack.callback(reader.close)
    return reader


def _replace(partial: Path, final: Path) -> None:
    """The folder that was there goes only when the new one is complete."""
    run_dir.sync_folder(partial)
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        final.rename(old)
    partial.rename(final)
    run_dir.sync_folder(final.parent)
    if old.exists():
        for path in old.iterdir():
            path.unlink()
        old.rmdir()
