"""Save and resume a training's state: ours against DCP's plain save and save_pretrained, in turns.

    python benchmarks/checkpoint_against_dcp.py [--layers 12] [--rounds 3] [--folder DIR]

One process holds a Llama of 768 wide with its AdamW moments. `blocked` is how long the training
stands still for a save: ours until the next step begins, and again until its update may change the
weights, with the work of a forward and backward pass in between; the peers' whole save. `save` is
until the files are on the disk, ours with every file's sha256, fsync and the manifest; `resume`
until they are read, ours verified by the sha256 before. The peers
are `torch.distributed.checkpoint.save` with fsync, and `save_pretrained` with `torch.save` of the
optimizer, as the Hugging Face Trainer does it. The page cache is dropped before each resume.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar

from atoll.sharding.process_group import World
from atoll.train import checkpoint

CACHES = Path("/proc/sys/vm/drop_caches")
BLOCKED_LIMIT = 0.01
WORLD = World(0, 1, torch.device("cpu"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where there are 10 GB free")
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    arguments = parser.parse_args()
    disable_progress_bar()
    model, optimizer, step = trained(arguments.layers)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        saves: dict[str, Callable[[], dict[str, float]]] = {
            "ours": lambda: ours(folder, model, optimizer, step),
            "DCP save": lambda: plain(folder, model, optimizer),
            "save_pretrained": lambda: pretrained(folder, model, optimizer),
        }
        turns: dict[str, list[dict[str, float]]] = {way: [] for way in saves}
        for number in range(arguments.rounds + 1):
            for way in list(saves)[:: 1 if number % 2 == 0 else -1]:
                times = saves[way]()
                if number:  # the first round warms up
                    turns[way].append(times)
    met = results.record("checkpoint_against_dcp", rows(turns))
    return int(arguments.check and not met)


def trained(layers: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model and its optimizer after one step, and the work between two updates."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12}
    config = LlamaConfig(num_hidden_layers=layers, vocab_size=32000, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, 32000, (4, 256))

    def passes() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    passes()
    optimizer.step()
    return model, optimizer, passes


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments by name, as the trainer saves them."""
    state = {f"model.{name}": values for name, values in model.named_parameters()}
    for name, values in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"optimizer.{name}.{moment}"] = optimizer.state[values][moment]
    return state


def ours(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, passes: Any
) -> dict[str, float]:
    """Two saves: one that nothing else goes on beside, and one that training goes on beside."""
    run, state = cleared(folder / "ours"), state_of(model, optimizer)
    began = time.perf_counter()
    checkpoint.finish(started(run, state, 1))
    saved = time.perf_counter() - began
    pending = started(run, state, 2)
    passes()
    checkpoint.await_copy(pending)
    blocked = pending.blocked_seconds
    optimizer.zero_grad()
    checkpoint.finish(pending)
    path = checkpoint.latest(run)
    assert path is not None
    resumed = timed_cold(lambda: checkpoint.load(path, state, WORLD))
    return {"blocked": blocked, "save": saved, "resume": resumed}


def started(run: Path, state: dict[str, Tensor], step: int) -> checkpoint.Pending:
    return checkpoint.start_save(run, state, checkpoint.Progress(step, 1, 1, 1, {}), 1, WORLD)


def plain(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, float]:
    path, state = cleared(folder / "plain"), state_of(model, optimizer)
    writer = dcp.FileSystemWriter(path, sync_files=True)
    saved = timed(lambda: dcp.save(state, storage_writer=writer, no_dist=True))
    reader = dcp.FileSystemReader(path)
    resumed = timed_cold(lambda: dcp.load(state, storage_reader=reader, no_dist=True))
    return {"blocked": saved, "save": saved, "resume": resumed}


def pretrained(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    path = cleared(folder / "pretrained")

    def save() -> None:
        model.save_pretrained(path)
        torch.save(optimizer.state_dict(), path / "optimizer.pt")
        os.sync()

    def load() -> None:
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(path).state_dict())
        optimizer.load_state_dict(torch.load(path / "optimizer.pt", weights_only=True))

    saved = timed(save)
    return {"blocked": saved, "save": saved, "resume": timed_cold(load)}


def cleared(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.sync()
    return folder


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def timed_cold(call: Callable[[], object]) -> float:
    os.sync()
    if os.access(CACHES, os.W_OK):
        CACHES.write_text("3")
    return timed(call)


def rows(by_way: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Blocking against our own save; the rest against each peer."""
    turns = {way: {k: [turn[k] for turn in all_] for k in all_[0]} for way, all_ in by_way.items()}
    mine = turns.pop("ours")
    made = [
        results.row(
            "blocked", "s", mine["blocked"], "our whole save", mine["save"], "lower", BLOCKED_LIMIT
        )
    ]
    for peer, theirs in turns.items():
        for what in ("blocked", "save", "resume"):
            target = 1.0 if what == "blocked" else None
            made.append(results.row(what, "s", mine[what], peer, theirs[what], "lower", target))
    return made


if __name__ == "__main__":
    sys.exit(main())
