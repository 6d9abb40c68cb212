"""`atoll make-delta`: what a facility's training changed, encoded with error feedback."""

import json
import math
import secrets
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from atoll import run_dir
from atoll.commands import CommandParser, json_object
from atoll.errors import UserError
from atoll.federation.codec import CODECS
from atoll.federation.error_feedback import encoded_layout, write_encoded
from atoll.federation.fragments import PATTERNS, fragments_of, refuse_no_fragment
from atoll.federation.global_model import begin, read_global, replace_folder
from atoll.federation.tensors import TensorReader, TensorWriter, files_of, stretches, typed
from atoll.federation.update import FORMAT_VERSION, UpdateManifest, manifest_file
from atoll.federation.update_files import facts_of
from atoll.one_writer import one_writer
from atoll.settings.exchange import MAX_MANIFEST_BYTES, FileFacts, provenance_file

DIVERGED = (
    "nothing is sent: the campaign goes on without it (rule.below_quorum=hold where the quorum "
    "needs it), or another one begins with a lower learning rate"
)


def main(argv: list[str]) -> int:
    """`atoll make-delta`: the update of a finished run to the global model it began from."""
    parser = CommandParser("make-delta", main.__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--codec", required=True, choices=list(CODECS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--previous-residual", type=Path, help="of the update before this one")
    parser.add_argument("--residual", type=Path, required=True, help="what encoding leaves out")
    parser.add_argument("--adapter", action="store_true", help="of its adapter alone")
    parser.add_argument("--fragments", type=int, default=1, help="parts of the model")
    parser.add_argument("--fragment", type=int, default=0, help="the one that is sent")
    parser.add_argument("--fragment-pattern", choices=list(PATTERNS), default="strided")
    about_help = "JSON: the rest of the manifest"
    parser.add_argument("--about", type=json_object, required=True, help=about_help)
    arguments = parser.read(argv)
    refuse_no_fragment([arguments.fragment], arguments.fragments)
    about = arguments.about | training_facts(arguments.run)
    export = run_dir.export(arguments.run)
    with one_writer(arguments.out):
        make_delta(
            arguments.base,
            export / "adapter" if arguments.adapter else export,
            arguments.previous_residual,
            arguments.codec,
            arguments.out,
            arguments.residual,
            about,
            (arguments.fragments, arguments.fragment_pattern, arguments.fragment),
            provenance_file(export),
        )
    return 0


def training_facts(run_folder: Path) -> dict[str, Any]:
    """Tokens, steps and held-out loss of a run; `UserError` where nothing of it can be sent."""
    file = run_dir.result_file(run_folder)
    counts = [r["tokens"] for r in run_dir.metrics(run_folder) if r["event"] == "train"]
    if not file.is_file() or not counts:
        missing = "lines of training" if file.is_file() else file.name
        raise UserError(f"{run_folder} has no {missing}", "give the folder of a run that has ended")
    result = json.loads(file.read_text())
    if not math.isfinite(result["loss"]):
        raise UserError(
            f"the held-out loss of {run_folder} is {result['loss']}",
            DIVERGED,
        )
    return {"tokens": int(counts[-1]), "steps": result["steps"], "loss": result["loss"]}


def make_delta(
    base: Path,
    trained: Path,
    previous_residual: Path | None,
    codec: str,
    out: Path,
    residual: Path,
    about: dict[str, Any],
    fragment: tuple[int, str, int] = (1, "strided", 0),
    provenance: Path | None = None,
) -> UpdateManifest:
    """Write the update of a trained model (fp32 export) to the global model of the round.

    fragment: how many there are, by which pattern, and which one is sent.
    provenance: of the run; goes with the update where it is there, and not too long.
    previous_residual, residual: folders, kept at the facility, of what encoding left out the last
    time and leaves out now. They are of different rounds, so doing a round again adds nothing
    twice. Raises `UserError` where the two models have not the same tensors, or a value is not
    finite.
    """
    partial, partial_residual = begin(out), begin(residual)
    with ExitStack() as stack:
        before = stack.enter_context(TensorReader(base / "master"))
        after = stack.enter_context(TensorReader(trained))
        refuse_other_tensors(after, before)
        # the first time there is none: nothing is in the folder of the new one yet
        last = stack.enter_context(TensorReader(previous_residual or partial_residual))
        fragments, pattern, number = fragment
        layout = fragments_of(before.layout, fragments, pattern)[number]
        encoded = encoded_layout(layout, codec, prefix="delta-")
        writer = stack.enter_context(TensorWriter(partial, encoded))
        kept = stack.enter_context(TensorWriter(partial_residual, typed(layout, torch.float32)))
        for stretch in stretches(layout):
            change_N = after.values(stretch).float() - before.values(stretch)
            last_N = last.values(stretch) if stretch.name in last.entries else None
            _, residual_N = write_encoded(writer, codec, stretch, change_N, last_N)
            if not bool(torch.isfinite(residual_N).all()):
                raise UserError(
                    f"the trained model has values in {stretch.name} that are not finite",
                    DIVERGED,
                )
            kept.put(stretch, residual_N)
    manifest = UpdateManifest(
        format_version=FORMAT_VERSION,
        base=read_global(base)["digest"],
        encoding=codec,  # type: ignore[arg-type]
        nonce=secrets.token_hex(16),
        provenance=copied(provenance, partial),
        files={path.name: facts_of(path) for path in files_of(partial)},
        **about,
    )
    run_dir.write_whole(manifest_file(partial), manifest.model_dump_json(indent=1))
    replace_folder(partial_residual, residual)
    replace_folder(partial, out)
    return manifest


def copied(provenance: Path | None, folder: Path) -> FileFacts | None:
    """Its facts, once it lies in the folder of an update; None where there is none to send."""
    if provenance is None or not provenance.is_file():
        return None
    if provenance.stat().st_size > MAX_MANIFEST_BYTES:
        return None
    beside = provenance_file(folder)
    run_dir.write_whole(beside, provenance.read_bytes())
    return facts_of(beside)


def refuse_other_tensors(trained: TensorReader, base: TensorReader) -> None:
    shapes, wanted = ({n: e.shape for n, e in model.entries.items()} for model in (trained, base))
    if shapes != wanted:
        name = sorted(set(shapes.items()) ^ set(wanted.items()))[0][0]
        raise UserError(
            f"{trained.folder} has {name} as {shapes.get(name)}, the global model as "
            f"{wanted.get(name)}",
            "train the model of this round",
        )
