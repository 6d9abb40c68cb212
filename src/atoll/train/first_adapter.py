"""`atoll adapter RUN.yaml [FOLDER]`: what a run's adapter begins as, and which base it is for.

A base is told by the digest of its weights in fp32, tensor by tensor: it is the same whatever files
hold them, and for a model that is drawn from a seed. A tensor at a time is in memory.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.commands import CommandParser
from atoll.data import vocabulary
from atoll.errors import UserError
from atoll.models import export
from atoll.models.adapter import adapt, adapted_reader, is_adapters, name_in_file, write_adapter
from atoll.models.build import weights_for
from atoll.models.classifier import new_head
from atoll.models.export_config import write_config
from atoll.models.weights import stored_buffers
from atoll.settings import Run, load_run
from atoll.train.tasks import TASKS
from atoll.train.untrained import tokenizer_of

OPENED_BYTES = 1 << 30


def main(argv: list[str]) -> int:
    """Print the digest of a run's base; with FOLDER write its first adapter there, too."""
    parser = CommandParser("adapter", main.__doc__)
    parser.add_argument("run_file", type=Path, help="a run's settings: run.yaml")
    parser.add_argument("folder", type=Path, nargs="?")
    arguments = parser.read(argv)
    run = load_run(arguments.run_file)
    with tokenizer_of(run) as tokenizer:
        if arguments.folder is not None:
            write_first_adapter(run, tokenizer, arguments.folder)
        print(json.dumps({"digest": base_digest(run, tokenizer)}))
    return 0


@torch.no_grad()
def base_digest(run: Run, tokenizer: Path) -> str:
    """The sha256 of a model's names, shapes and fp32 values, without any adapter."""
    config, hf = _skeleton(run, tokenizer)
    tensors, digest = dict(hf.named_parameters()) | stored_buffers(hf), hashlib.sha256()
    sizes = {name: tensors[name].numel() * torch.float32.itemsize for name in sorted(tensors)}
    for names in export.plan_files(sizes, OPENED_BYTES, 1):
        # opened again: what is mapped would stay in memory
        with weights_for(run.model, config, run.seed) as read:
            for name in names:
                values = read(name, _all_of(tensors[name])).float().contiguous()
                digest.update(f"{name} {list(values.shape)}\n".encode())
                digest.update(memoryview(values.view(-1).numpy()).cast("B"))
    return digest.hexdigest()


@torch.no_grad()
def write_first_adapter(run: Run, tokenizer: Path, final: Path) -> None:
    """An adapter as a run would begin with it; beside it its model's tokenizer and settings."""
    if run.model.lora is None:
        raise UserError("the run has no adapter", "set model.lora.rank=16")
    config, hf = _skeleton(run, tokenizer)
    adapt(hf, run.model.model_copy(update={"quantisation": "none"}))
    head, shapes = new_head(config), {n: tuple(p.shape) for n, p in hf.named_parameters()}
    own = {name: p for name, p in hf.named_parameters() if is_adapters(name, head)}
    with weights_for(run.model, config, run.seed) as read:
        read = adapted_reader(read, run.seed, shapes, run.model.lora)
        tensors = {
            name_in_file(name): read(name, _all_of(p)).float().contiguous()
            for name, p in own.items()
        }
    partial = export.partial_folder(final)
    shutil.rmtree(partial, ignore_errors=True)
    write_adapter(partial, run.model, tensors, head)
    config.dtype = torch.float32
    config.architectures = [type(hf).__name__]
    write_config(partial, config)
    export.write_tokenizer(partial, tokenizer)
    export.publish(partial, final)


def _skeleton(run: Run, tokenizer: Path) -> tuple[Any, Any]:
    """The configuration, and the plain model on the meta device."""
    task, words = TASKS[run.task.name], vocabulary.describe(tokenizer, run.data.bos)
    config = task.config(run, words)
    return config, task.model(config, run, words).hf


def _all_of(tensor: Tensor) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in tensor.shape)
