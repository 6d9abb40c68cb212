"""Average four updates of 1 GB: `atoll aggregate` against from_pretrained and a mean, in turns.

    python benchmarks/aggregate_against_mean.py [--layers 16] [--rounds 1] [--folder DIR]

The peer is how the workflow of the seeds does it: every model into memory in fp32, the mean of the
state dicts, save_pretrained. Ours reads and verifies the updates, and writes the next global model:
master, export, difference. The disk alone: the same bytes read and written by plain read and write,
with fsync. `cold`: the page cache is dropped before each turn, where this user may; `just received`
means that it holds what was read and written last, as after a transfer.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import results
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from atoll.federation.global_model import first_global
from atoll.federation.make_delta import make_delta

UPDATES = 4
PEER_NAME = "from_pretrained + mean"
FASTER, PEAK_MIB = 4.0, 400.0
DISK_TIMES = {"cold": 2.0, "just received": 1.3}
CACHES = Path("/proc/sys/vm/drop_caches")
BLOCK_BYTES = 16 << 20
Before = Callable[[], None]  # what becomes of the page cache ahead of a turn
PEER = """
import sys, torch
from transformers import AutoModelForCausalLM
models = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in sys.argv[2:]]
states = [model.state_dict() for model in models]
mean = {name: sum(state[name] for state in states) / len(states) for name in states[0]}
models[0].load_state_dict(mean)
models[0].save_pretrained(sys.argv[1])
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1, help="each of two turns, A B B A")
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    parser.add_argument("--folder", type=Path, default=None, help="where there are 16 GB free")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        base, updates, models = made(folder, arguments.layers)
        seconds = {}
        for case, before in {"cold": forget_files, "just received": os.sync}.items():
            ways: dict[str, Callable[[], float]] = {
                "aggregate": partial(ours, folder, base, updates, before),
                PEER_NAME: partial(peer, folder, models, before),
                "disk": partial(disk, folder, updates, before),
            }
            seconds[case] = results.in_turns(ways, 2 * arguments.rounds)
        peak = peak_mebibytes(folder, base, updates)
        wrong = wrong_values(folder, updates)
        made_rows = rows(seconds, updates, peak)
    met = results.record("aggregate_against_mean", made_rows)
    print(f"differs from the fp64 mean, rounded: {wrong} values")
    return int(arguments.check and (wrong > 0 or not met))


def made(folder: Path, layers: int) -> tuple[Path, list[Path], list[Path]]:
    """A global model, four updates in fp32, and the four models that they come from."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
    config = LlamaConfig(num_hidden_layers=layers, vocab_size=32000, **sizes)
    torch.manual_seed(0)
    start = LlamaForCausalLM(config)
    start.save_pretrained(folder / "start")
    base = folder / "global-0"
    first_global(folder / "start", base, {})
    updates, models = [], []
    for number in range(UPDATES):
        torch.manual_seed(number + 1)
        changed = AutoModelForCausalLM.from_pretrained(folder / "start", dtype=torch.float32)
        with torch.no_grad():
            for values in changed.parameters():
                values += 1e-3 * torch.randn_like(values)
        trained = folder / f"trained-{number}"
        changed.save_pretrained(trained)
        about = {"campaign": "bench", "round": 1, "facility": f"f{number}", "tokens": 1000}
        about |= {"steps": 1, "loss": 1.0, "image": "", "configuration": "", "data": ""}
        update = folder / f"f{number}" / "update"
        make_delta(base, trained, None, "fp32", update, folder / f"residual-{number}", about)
        updates.append(update)
        models.append(trained)
    return base, updates, models


def command(base: Path, updates: list[Path], out: Path) -> list[str]:
    words = ["aggregate", *map(str, updates), "--base", str(base), "--out", str(out)]
    rule = json.dumps({"weigh": "equal", "min_cosine": -1.0})
    return [sys.executable, "-m", "atoll", *words, "--rule", rule]


def ours(folder: Path, base: Path, updates: list[Path], before: Before) -> float:
    out = folder / "next"
    shutil.rmtree(out, ignore_errors=True)
    return timed(command(base, updates, out), before)


def peer(folder: Path, models: list[Path], before: Before) -> float:
    out = folder / "peer"
    shutil.rmtree(out, ignore_errors=True)
    return timed([sys.executable, "-c", PEER, str(out), *map(str, models)], before)


def timed(argv: list[str], before: Before) -> float:
    before()
    start = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.sync()
    return time.perf_counter() - start


def disk(folder: Path, updates: list[Path], before: Before) -> float:
    """Read what aggregate reads, and write as many bytes as it has written."""
    folders = [*updates, folder / "global-0" / "master"]
    sources = [path for part in folders for path in files(part)]
    written = sum(path.stat().st_size for path in files(folder / "next"))
    before()
    start = time.perf_counter()
    buffer = bytearray(BLOCK_BYTES)
    for path in sources:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    with open(folder / "plain", "wb", buffering=0) as file:
        for _ in range(written // BLOCK_BYTES):
            file.write(buffer)
        os.fsync(file.fileno())
    os.sync()
    return time.perf_counter() - start


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def forget_files() -> None:
    os.sync()
    if os.access(CACHES, os.W_OK):
        CACHES.write_text("3")


def peak_mebibytes(folder: Path, base: Path, updates: list[Path]) -> float:
    """The largest resident size of an aggregation, in a process that does nothing else."""
    out = folder / "measured"
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True,"
        " stdout=subprocess.DEVNULL);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    argv = [sys.executable, "-c", code, *command(base, updates, out)]
    output = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    return int(output) / 1024


def wrong_values(folder: Path, updates: list[Path]) -> int:
    """Values of the global difference that are not the fp64 mean, rounded once to fp32."""
    wrong = 0
    for path in files(folder / "next" / "delta"):
        given = [load_file(file) for update in updates for file in files(update)]
        for name, values in load_file(path).items():
            parts = [update[name] for update in given if name in update]
            mean = sum(part.double() for part in parts) / len(updates)
            wrong += int((values != mean.float()).sum())
    return wrong


def rows(
    seconds: dict[str, dict[str, list[float]]], updates: list[Path], peak: float
) -> list[dict[str, Any]]:
    size = sum(path.stat().st_size for path in files(updates[0])) / 1e9
    case = f"{UPDATES} updates of {size:.2f} GB"
    aims = {(how, "disk"): times for how, times in DISK_TIMES.items()}
    aims |= {(how, PEER_NAME): 1 / FASTER for how in seconds}
    made = [
        results.row(f"{case}, {how}", "s", times["aggregate"], peer, times[peer], "lower", target)
        for how, times in seconds.items()
        for peer in (PEER_NAME, "disk")
        for target in [aims.get((how, peer))]
    ]
    limit = "what it may take"
    made.append(results.row(f"{case}, peak", "MiB", [peak], limit, [PEAK_MIB], "lower", 1.0))
    return made


if __name__ == "__main__":
    sys.exit(main())
