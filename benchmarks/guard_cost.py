"""What each guard costs, as a share of a step: the same run with it and without, in turns.

    python benchmarks/guard_cost.py [--rounds 4] [--check]

Two gloo ranks. `judge` is in every step: the loss and the norm over all ranks, and whether the
update is left out. `replay` comes every guard.replay_every_steps: one microbatch twice, and the
state twice. `save` comes before each checkpoint: no number that is none, copies that agree. What
does not come with each step counts by its share; the last line adds them up at the defaults.
"""

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import results
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

CLONE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CLONE / "tests")]
RANKS, MICROBATCHES, STEPS, PAIRS = 2, 2, 4, 8
LIMIT = 1.01
STRATEGIES = ("ddp", "full_shard")
MODEL = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 4096,
    "max_position_embeddings": 1024,
}  # fmt: skip


def settings(folder: Path, strategy: str) -> Any:
    import small_run

    return small_run.settings(
        folder,
        RANKS,
        name=strategy,
        sharding=small_run.sharding(strategy),
        model__config=MODEL,
        data__sequence_tokens=256,
        training__global_batch_samples=RANKS * MICROBATCHES,
        training__microbatch_samples=1,
    )


def rank_main(rank: int, port: int, rounds: int, folder: Path, costs_of_strategies: Any) -> None:
    from torch.distributed.rendezvous import rendezvous

    from atoll.sharding.process_group import MEETING, talking
    from atoll.sharding.tree import join

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", rank, RANKS, timeout=MEETING))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    try:
        trees = join(store, rank, RANKS, "127.0.0.1", MEETING.total_seconds(), count=3)
        with talking(trees, torch.device("cpu")) as world:
            for strategy in STRATEGIES:
                costs = measured(world, settings(folder, strategy), rounds)
                if rank == 0:
                    costs_of_strategies[strategy] = costs
    finally:
        dist.destroy_process_group()


def measured(world: Any, run: Any, rounds: int) -> dict[str, list[float]]:
    """Seconds: of a step without guards, and what each adds where it acts."""
    from atoll import run_dir
    from atoll.train.assemble import assemble
    from atoll.train.checkpoint import Progress
    from atoll.train.guard import Guard
    from atoll.train.loop import accumulate_gradients, remaining_batches
    from atoll.train.optimizer import take_step
    from atoll.train.replay import Replay, check_copies, microbatches_of
    from atoll.train.state_dict import state_dict, update

    start = Progress(0, 0, 0, RANKS, {})
    train_state = assemble(run, run_dir.folder(run), world)
    looks = run.model_copy(update={"guard": run.guard.model_copy(update={"spike_sigma": 6.0})})
    states = [(train_state, "judge"), (with_run(train_state, looks), "judge, with spikes")]
    guards = {name: Guard(state, start) for state, name in states}
    replay, numbers = Replay(train_state), iter(range(1, 10**6))
    with remaining_batches(train_state, start) as batches:
        share = next(batches)
    compute = partial(accumulate_gradients, train_state, share, 1)
    least = partial(accumulate_gradients, train_state, microbatches_of(share, run), 1)

    def step() -> None:
        compute()
        take_step(train_state.optimizer, 1e-4, 1.0)

    def updated(judge: Callable[[Any], Any] | None) -> float:
        compute()
        return timed(lambda: update(train_state, 1e-4, judge))

    def judged(name: str) -> float:
        """An update with the guard less the one beside it without; neither comes first always."""
        guard, loss = guards[name], torch.ones(())

        def with_guard() -> float:
            return updated(partial(guard.judge, next(numbers), loss, share.global_targets))

        ways = {"with": with_guard, "without": lambda: updated(None)}
        turns = results.in_turns(ways, PAIRS)
        pairs = zip(turns["with"], turns["without"], strict=True)
        return statistics.median(with_it - without for with_it, without in pairs)

    def replayed() -> float:
        def both() -> None:
            replay.before(1, least)
            replay.behind(1)

        return timed(both)

    def saved() -> float:
        state = state_dict(train_state)

        def check() -> None:
            assert guards["judge"].of_state(state, 1) is None
            check_copies(train_state, state, 1)

        return timed(check)

    ways: dict[str, Callable[[], float]] = {
        "step": lambda: statistics.median(timed(step) for _ in range(STEPS)),
        **{name: partial(judged, name) for name in guards},
        "replay": replayed,
        "save": saved,
    }
    for way in ways.values():  # warm up
        way()
    return results.in_turns(ways, rounds)


def with_run(train_state: Any, run: Any) -> Any:
    from dataclasses import replace

    return replace(train_state, run=run)


def timed(call: Callable[[], object]) -> float:
    """Until all ranks are through: else a guard would count what a later call waits for."""
    dist.barrier()
    started = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - started


def rows_of(strategy: str, costs: dict[str, list[float]], run: Any) -> list[dict[str, Any]]:
    """A step with each guard against a step without, in each turn."""
    every = {"replay": run.guard.replay_every_steps, "save": 500}
    steps = costs.pop("step")
    base = statistics.median(steps)
    shares = {
        name: [seconds / every.get(name, 1) / base for seconds in turns]
        for name, turns in costs.items()
    }
    default = [turns for name, turns in shares.items() if name != "judge, with spikes"]
    shares["all at the defaults"] = [sum(turn) for turn in zip(*default, strict=True)]
    return [
        results.row(
            f"a step with {name}, {strategy}",
            "s",
            [base * (1.0 + share) for share in turns],
            "without",
            [base] * len(turns),
            "lower",
            LIMIT,
            share=statistics.median(turns),
            step_turns=steps,
            seconds=statistics.median(costs[name]) if name in costs else None,
        )
        for name, turns in shares.items()
    ]


def main() -> int:
    import small_run

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--check", action="store_true", help=f"fail beyond a ratio of {LIMIT}")
    arguments = parser.parse_args()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        small_run.write_text(Path(folder))
        runs = {name: settings(Path(folder), name) for name in STRATEGIES}
        for run in runs.values():
            small_run.ready(run)
        with multiprocessing.get_context("spawn").Manager() as manager:
            shared = manager.dict()
            about = (port, arguments.rounds, Path(folder), shared)
            multiprocessing.spawn(rank_main, args=about, nprocs=RANKS)
            costs = dict(shared)
    rows = [row for name, run in runs.items() for row in rows_of(name, costs[name], run)]
    for row in rows:
        cost = "" if row["seconds"] is None else f", {row['seconds'] * 1e3:.2f} ms where it acts"
        print(f"{row['case']}: {row['share']:.3%} of a step{cost}", flush=True)
    return int(not results.record("guard_cost", rows) and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
