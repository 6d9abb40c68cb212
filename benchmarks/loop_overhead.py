"""What our loop costs beside bare torch: the same model, batches and optimizer, in turns.

    python benchmarks/loop_overhead.py [--rounds 4] [--check]

Two gloo ranks. `bare` is what a careful person writes: forward, backward, clip_grad_norm_, fused
AdamW, zero_grad, with no_sync between microbatches. Ours adds layouts' flags, norms by mesh, the
shared stop code and the meter. Both spread the model by the same calls of torch.
"""

import argparse
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import results
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.fsdp import FSDPModule
from torch.distributed.rendezvous import rendezvous

CLONE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CLONE / "tests")]
RANKS, MICROBATCHES, STEPS, TOKENS = 2, 2, 4, 256
LIMIT = 1.02
STRATEGIES = ("ddp", "full_shard")


def rank_main(rank: int, port: int, rounds: int, times_of_strategies: Any) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", rank, RANKS))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    try:
        from atoll.sharding.process_group import talking
        from atoll.sharding.tree import join

        trees = join(store, rank, RANKS, "127.0.0.1", timeout_seconds=600, count=3)
        with talking(trees, torch.device("cpu")) as world:
            for strategy in STRATEGIES:
                times = measured(world, strategy, rounds)
                if rank == 0:
                    times_of_strategies[strategy] = times
    finally:
        dist.destroy_process_group()


def measured(world: Any, strategy: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step, ours and bare, A B B A."""
    import small_run

    from atoll.models.build import build_config, build_model
    from atoll.settings import Run
    from atoll.sharding.engines import ENGINES
    from atoll.sharding.step_plan import StepPlan
    from atoll.train.assemble import build_sharded
    from atoll.train.optimizer import make_optimizer, take_step
    from atoll.train.stop_signals import exchanged_stop_code

    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 688}
    config |= {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 8}
    config |= {"vocab_size": 4096, "max_position_embeddings": 1024}
    run: Run = small_run.settings(
        Path("/nowhere"),
        RANKS,
        sharding=small_run.sharding(strategy),
        model__config=config,
        data__sequence_tokens=TOKENS,
        training__global_batch_samples=RANKS * MICROBATCHES,
    )
    hf_config = build_config(run.model, 4096, TOKENS, {})
    plan = StepPlan(torch.float32, False, False, False)
    batches = [batch_of(seed) for seed in range(MICROBATCHES)]
    scale = 1.0 / (MICROBATCHES * (TOKENS - 1))

    def ours() -> None:
        code_of_all = exchanged_stop_code(world, lambda: 0)
        ENGINES["plain"](wrapped, batches, scale, plan)
        take_step(optimizer, 1e-4, 1.0)
        code_of_all()

    def bare() -> None:
        for number, batch in enumerate(batches):
            last = number == MICROBATCHES - 1
            if isinstance(wrapped, FSDPModule):
                wrapped.set_requires_gradient_sync(last)
                (wrapped(batch, torch.float32) * scale).backward()
            else:
                wrapped.require_backward_grad_sync = last
                (wrapped(batch, torch.float32) * scale).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.inner.step()
        optimizer.inner.zero_grad()

    empty = build_model(hf_config, run.training)
    model, wrapped = build_sharded(run, hf_config, empty, world, torch.float32)
    optimizer = make_optimizer(run.optimizer, model)
    times: dict[str, list[float]] = {"ours": [], "bare": []}
    for number in range(rounds + 1):
        for step in (ours, bare, bare, ours):
            dist.barrier()
            started = time.perf_counter()
            for _ in range(STEPS):
                step()
            if number:  # the first round warms up
                times[step.__name__].append((time.perf_counter() - started) / STEPS)
    return times


def batch_of(seed: int) -> Any:
    from atoll.data.batch import Batch

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 4096, (1, TOKENS), generator=generator)
    labels = torch.cat([tokens[:, 1:], torch.full((1, 1), -100)], dim=1)
    ends = torch.tensor([0, TOKENS], dtype=torch.int32)
    return Batch(tokens, labels, torch.arange(TOKENS)[None], ends, (TOKENS,), TOKENS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--check", action="store_true", help=f"fail beyond a ratio of {LIMIT}")
    arguments = parser.parse_args()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with multiprocessing.get_context("spawn").Manager() as manager:
        shared = manager.dict()
        multiprocessing.spawn(rank_main, args=(port, arguments.rounds, shared), nprocs=RANKS)
        times_of_strategies = dict(shared)
    rows = [
        results.row(
            f"a step, {name}", "s", times["ours"], "bare torch", times["bare"], "lower", LIMIT
        )
        for name, times in times_of_strategies.items()
    ]
    return int(not results.record("loop_overhead", rows) and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
