"""A Hugging Face folder from a sharded model, written by all ranks.

Each rank writes its own files; only the parameter under way is ever whole on a rank that does
not write it.
"""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll import run_dir
from atoll.data.chat_template import turn_end_id
from atoll.models.adapter import full_tensor
from atoll.models.classifier import classifies
from atoll.models.export_config import write_config, write_end_ids, write_tokenizer_config
from atoll.models.safetensor_files import file_name, write_index, write_tensors
from atoll.proof.statement import OWN
from atoll.settings import Run

Pieces = list[list[str]]
GENERATION = "generation_config.json"


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
    dtype_of: Callable[[str], torch.dtype],
    files: Pieces,
    numbered: Numbered,
    rank: int,
    ranks: int,
    stored: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> dict[str, dict[str, Any]]:
    """Gather each parameter in turn and write this rank's files, fsynced, modes from the umask.

    dtype_of: each one's in the files, by its name. stored: parameters as the family's files have
    them. Returns the bytes and sha256 of its files.
    Collective: every rank calls it with the same arguments but `rank`.
    """
    writing: list[Future[dict[str, Any]]] = []
    paths = [folder / file_name(numbered.first + n, numbered.total) for n in range(len(files))]
    with ThreadPoolExecutor(1) as writer:  # the next parameters are gathered meanwhile
        for number, names in enumerate(files):
            # one file at a time is whole in memory; after a failure only the others need this rank
            mine = number % ranks == rank and not (writing and writing[-1].exception())
            tensors = {}
            for name in names:
                tensor = full_tensor(parameters[name])
                if mine:
                    tensors[name] = tensor.to(device="cpu", dtype=dtype_of(name)).contiguous()
            if mine:
                writing.append(writer.submit(write_tensors, paths[number], stored(tensors)))
    written = [future.result() for future in writing]
    return dict(zip((path.name for path in paths[rank::ranks]), written, strict=True))


def write_rest(
    folder: Path,
    config: Any,
    architecture: str,
    dtype: torch.dtype,
    files: Pieces,
    total_bytes: int,
    tokenizer: Path,
    source: Path | None = None,
    end_ids: list[int] | None = None,
) -> None:
    """The index, the configuration and the tokenizer beside the weights; one rank calls this.

    source: the folder that the weights began from, whose settings of generation are passed on.
    end_ids: the tokens that end an answer, of a model that chats.
    """
    write_index(folder, files, total_bytes)
    config.dtype = dtype
    config.architectures = [architecture]
    if classifies(config) and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = _pad_id(tokenizer)
    write_config(folder, config)
    write_tokenizer(folder, tokenizer)
    if source is not None and (source / GENERATION).is_file():
        run_dir.write_whole(folder / GENERATION, (source / GENERATION).read_bytes())
    if end_ids:
        write_end_ids(folder / GENERATION, end_ids)


def write_tokenizer(folder: Path, tokenizer: Path) -> None:
    """What a tokenizer's folder has, beside a model or an adapter whose own files stay."""
    for path in sorted(tokenizer.iterdir()):
        foreign = path.name in ("config.json", "adapter_config.json", *OWN)
        if path.suffix in (".json", ".model", ".txt", ".jinja") and not foreign:
            run_dir.write_whole(folder / path.name, path.read_bytes())
    write_tokenizer_config(folder)


def end_ids(run: Run, tokenizer: Path, answers: bool = False) -> list[int]:
    """The tokens that end an answer, where answers are learned: the text's end, and a turn's.

    answers: others learn them, from this model.
    """
    if not (answers or run.data.holds_conversations):
        return []
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    if words.chat_template is None:  # each that learns brings its own
        return []
    ids = (words.eos_token_id, turn_end_id(words))
    return [token for token in ids if token is not None]


def _pad_id(tokenizer: Path) -> int | None:
    """What pads rows, by which transformers finds a row's last word; most sources have none.

    The tokenizer's own, else the end of a text, as its users set it.
    """
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    ids: tuple[int | None, int | None] = (words.pad_token_id, words.eos_token_id)
    return next((token for token in ids if token is not None), None)


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
