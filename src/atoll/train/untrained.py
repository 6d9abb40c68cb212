"""`atoll untrained RUN.yaml FOLDER`: the model a run would begin with, as a Hugging Face folder.

Neither a rank nor a step: weights are copied, converted or drawn, one file in memory at a time, and
no text is read unless the tokenizer is made of it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from atoll import run_dir
from atoll.commands import CommandParser
from atoll.data import vocabulary
from atoll.data.shards import tokenizer_folder
from atoll.data.tokenize import make_tokenizer
from atoll.models import export
from atoll.models.adapter import merging_reader
from atoll.models.build import weights_for
from atoll.models.safetensor_files import file_name, write_tensors
from atoll.models.source import source_folder
from atoll.models.stored_names import as_stored, stored_dtype
from atoll.models.weights import stored_buffers
from atoll.one_writer import one_writer
from atoll.settings import Run, load_run
from atoll.train.tasks import TASKS


def main(argv: list[str]) -> int:
    """Write the model that a run's settings name, before any training."""
    parser = CommandParser("untrained", main.__doc__)
    parser.add_argument("run_file", type=Path, help="a run's settings: run.yaml")
    parser.add_argument("folder", type=Path)
    about = "a folder with an adapter that is added to the weights, once"
    parser.add_argument("--adapter", type=Path, help=about)
    about = "runs that begin from it learn answers: generation ends where a turn does"
    parser.add_argument("--answers", action="store_true", help=about)
    arguments = parser.read(argv)
    run, adapter = load_run(arguments.run_file), arguments.adapter
    with one_writer(arguments.folder):
        write_untrained(run, arguments.folder, adapter=adapter, answers=arguments.answers)
    return 0


def write_untrained(
    run: Run,
    final: Path,
    ready: Path | None = None,
    adapter: Path | None = None,
    answers: bool = False,
) -> None:
    """The folder, whole or not at all; bit for bit what a run of no steps exports.

    ready: the run's tokenizer, where it was made before. adapter: of the run's `model.lora`, added.
    answers: that runs from it learn, whatever its own text is.

    Raises `UserError` where the model or its tokenizer cannot be had, or do not fit each other.
    """
    with tokenizer_of(run) if ready is None else nullcontext(ready) as tokenizer:
        ends = export.end_ids(run, tokenizer, answers)
        _write(run, tokenizer, final, adapter, ends)


def _write(run: Run, tokenizer: Path, final: Path, adapter: Path | None, ends: list[int]) -> None:
    task, words = TASKS[run.task.name], vocabulary.describe(tokenizer, run.data.bos)
    config = task.config(run, words)
    hf = task.model(config, run, words).hf
    dtype, partial = getattr(torch, run.export.dtype), export.start(final)
    tensors = dict(hf.named_parameters()) | stored_buffers(hf)
    sizes = {n: t.numel() * stored_dtype(hf, n, dtype).itemsize for n, t in tensors.items()}
    files = export.plan_files(sizes, int(run.export.max_file_gib * 2**30), 1)
    stored: export.Pieces = []
    began = time.monotonic()
    for number, names in enumerate(files):
        path = partial / file_name(number, len(files))
        stored.append(_write_file(run, config, path, hf, {n: tensors[n] for n in names}, adapter))
        seconds = time.monotonic() - began
        print(f"{path.name}: {len(stored[-1])} tensors, {seconds:.0f} s", flush=True)
    total = sum(sizes.values())
    source = source_folder(run.model)
    what = (config, type(hf).__name__, dtype, stored, total, tokenizer, source, ends)
    export.write_rest(partial, *what)
    export.publish(partial, final)


@contextmanager
def tokenizer_of(run: Run) -> Iterator[Path]:
    """The folder of the run's tokenizer: its bundle's, or one that is loaded or made."""
    if run.folders.bundle is not None:
        yield tokenizer_folder(run_dir.prepared(run))
        return
    with TemporaryDirectory() as folder:
        make_tokenizer(run, Path(folder))
        yield Path(folder)


@torch.no_grad()
def _write_file(
    run: Run,
    config: Any,
    path: Path,
    hf: Any,
    empty: dict[str, torch.Tensor],
    adapter: Path | None,
) -> list[str]:
    """One file's tensors; the source is opened for each, or what is mapped would stay in memory."""
    dtype = getattr(torch, run.export.dtype)
    tensors = {}
    with weights_for(run.model, config, run.seed) as read:
        if adapter is not None and run.model.lora is not None:
            read = merging_reader(read, hf, run.model.lora, adapter)
        for name, shaped in empty.items():
            slices = tuple(slice(0, size) for size in shaped.shape)
            kept = stored_dtype(hf, name, dtype)
            tensors[name] = read(name, slices).float().to(kept, copy=True).contiguous()
    stored = as_stored(hf, tensors)
    write_tensors(path, stored)
    return list(stored)
