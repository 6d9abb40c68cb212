"""Write a sharded model as a Hugging Face folder: ours against a gathered save_pretrained.

    python benchmarks/export_against_save_pretrained.py [--layers 12] [--rounds 4]

Two gloo ranks hold a Llama of 768 wide with full_shard. The peer is the usual way: the whole state
dict on the first rank (`get_model_state_dict`, full), then `save_pretrained` there while the other
waits. Ours: each rank writes its own files, one parameter gathered at a time, fsync and a rename.
Both write fp32, and both end with all on the disk. Memory: how much the first rank's peak rises
over what training held.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import results
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

CLONE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CLONE / "tests")]
RANKS = 2
STATUS = Path("/proc/self/status")
PEAK_RESET = Path("/proc/self/clear_refs")  # "5": the peak begins anew


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    arguments = parser.parse_args()
    from rank_pool import RankPool

    pool = RankPool()
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = prepared(Path(folder), arguments.layers)
            turns_of = pool.run(measured, run, arguments.rounds, world=RANKS)[0]
    finally:
        pool.close()
    peer = "gathered save_pretrained"
    rows = []
    for number, (what, unit) in enumerate((("export", "s"), ("export, rise of memory", "MiB"))):
        mine, theirs = ([turn[number] for turn in turns_of[way]] for way in ("ours", "peer"))
        rows.append(results.row(what, unit, mine, peer, theirs, "lower", 1.0))
    met = results.record("export_against_save_pretrained", rows)
    return int(arguments.check and not met)


def prepared(folder: Path, layers: int) -> Any:
    import small_run

    config = {"model_type": "llama", "hidden_size": 768, "intermediate_size": 2048}
    config |= {"num_hidden_layers": layers, "num_attention_heads": 12, "num_key_value_heads": 12}
    config |= {"vocab_size": 32000, "max_position_embeddings": 128}
    small_run.write_text(folder)
    changes = {"model__config": config, "training__steps": 1, "export__dtype": "float32"}
    run = small_run.settings(folder, RANKS, **changes)
    small_run.ready(run)
    return run


def measured(world: Any, run: Any, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds, and MiB that the peak rises by, of each turn."""
    from atoll import run_dir
    from atoll.train.assemble import assemble
    from atoll.train.export_model import export_model

    train_state = assemble(run, run_dir.folder(run), world)
    final = run_dir.export(train_state.run_folder)
    ways = {"ours": lambda: export_model(train_state), "peer": lambda: gathered(train_state, final)}
    turns_of: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in list(ways)[:: 1 if number % 2 == 0 else -1]:
            if world.rank == 0:
                shutil.rmtree(final, ignore_errors=True)
                os.sync()
            turn = one_turn(ways[way])
            if number:  # the first round warms up
                turns_of[way].append(turn)
    return turns_of


def one_turn(way: Any) -> tuple[float, float]:
    PEAK_RESET.write_text("5")
    before = status_mebibytes("VmRSS")
    dist.barrier()
    started = time.perf_counter()
    way()
    os.sync()
    dist.barrier()
    seconds = time.perf_counter() - started
    return seconds, status_mebibytes("VmHWM") - before


def status_mebibytes(name: str) -> float:
    [line] = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) / 1024


def gathered(train_state: Any, final: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(train_state.model.hf, options=options)
    if train_state.world.rank == 0:
        train_state.model.hf.save_pretrained(final, state_dict=state)
    dist.barrier()


if __name__ == "__main__":
    sys.exit(main())
