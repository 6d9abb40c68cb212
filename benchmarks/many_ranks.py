"""Thousands of ranks on this machine: joining, stopping, sharing an error, naming a checkpoint.

    python benchmarks/many_ranks.py [--ranks 16 64 256 1000 2000] [--rounds 5] [--check]

Every rank is a process of its own, forked without torch: the agreement of ranks needs none. Each
joins three trees as a run does, then in turns: all agree on a stop; rank 2 has an error that all
hear of; the first rank collects every rank's file names and the metadata of its parts of 900
tensors, compressed as a checkpoint's is, and writes both down. Sockets and memory are those of one
rank, without the one that a run has to torch's store.

All ranks share this machine's processors, and others use it too. So what is fitted, as `a + b N`,
is the processor time of all ranks over the number of processors: what an idle machine would take;
the largest relative error of the fit is told. On ranks with processors of their own the way is
what remains: log2(N) messages up and as many down.

The other rows are small worlds, where gloo's groups were: two and four ranks with torch.
"""

import argparse
import gc
import json
import math
import multiprocessing
import os
import selectors
import socket
import statistics
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from atoll.sharding import agreement
from atoll.sharding.tree import Tree, join

HOST = "127.0.0.1"
TREES, TIMEOUT_SECONDS = 3, 300.0
CORES = len(os.sched_getaffinity(0))
TENSORS = 900
EXTRAPOLATED = 10_000
WHAT = {
    "join": "to join, all of them",
    "stop": "to agree on a stop",
    "error": "to share an error",
    "manifest": "to name a checkpoint's files",
}
# what 10,000 ranks may take on the two processors of a small machine, seconds
LIMITS = {"join": 120.0, "stop": 2.0, "error": 2.0, "manifest": 30.0}
SMALL = (2, 4)


class BareStore:
    """A store as torch's, without torch: a connection for each request, then closed."""

    def __init__(self, port: int) -> None:
        self.port = port

    def set(self, key: str, value: str) -> None:
        self._asked({"key": key, "value": value})

    def get(self, key: str) -> bytes:
        return self._asked({"key": key})

    def _asked(self, request: dict[str, str]) -> bytes:
        with socket.create_connection((HOST, self.port), TIMEOUT_SECONDS) as connection:
            connection.sendall(json.dumps(request).encode() + b"\n")
            return b"".join(iter(lambda: connection.recv(4096), b""))


def serve(listener: socket.socket) -> None:
    """The store's side, until this process is ended."""
    values: dict[str, str] = {}
    waiting: dict[str, list[socket.socket]] = {}
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for ready, _ in selector.select():
            if ready.fileobj is listener:
                selector.register(listener.accept()[0], selectors.EVENT_READ)
                continue
            connection: Any = ready.fileobj
            selector.unregister(connection)
            request = json.loads(connection.makefile().readline())
            key, value = request["key"], request.get("value")
            if value is not None:
                values[key] = value
            asking = [connection] if value is None else [connection, *waiting.pop(key, [])]
            for each in asking:
                if key in values:
                    each.sendall(values[key].encode())
                    each.close()
                else:
                    waiting.setdefault(key, []).append(each)


def forked(work: Callable[[], None]) -> int:
    """A process that does `work` and nothing behind it; its id."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def world_of(size: int, rounds: int, folder: Path) -> dict[str, Any]:
    """What `size` ranks measured."""
    gc.collect()
    gc.freeze()  # no child copies what it does not change
    with socket.create_server((HOST, 0), backlog=4096) as listener:
        store = BareStore(listener.getsockname()[1])
        server = forked(lambda: serve(listener))
    gate, opener = os.pipe()

    def work(rank: int) -> None:
        os.close(opener)
        os.read(gate, 1)  # until all are there
        measured = rank_main(store, rank, size, rounds, folder)
        if rank == 0:
            (folder / f"of-{size}").write_text(json.dumps(measured))

    pids = [forked(lambda rank=rank: work(rank)) for rank in range(size)]
    os.close(gate)
    os.close(opener)
    failed = [rank for rank, pid in enumerate(pids) if os.waitpid(pid, 0)[1] != 0]
    os.kill(server, 9)
    os.waitpid(server, 0)
    if failed:
        raise RuntimeError(f"{len(failed)} of {size} ranks failed, the first is {failed[0]}")
    measured: dict[str, Any] = json.loads((folder / f"of-{size}").read_text())
    return measured


def rank_main(
    store: BareStore, rank: int, size: int, rounds: int, folder: Path
) -> dict[str, Any] | None:
    """One rank's life; on rank 0 what all have measured."""
    started = time.monotonic(), time.process_time()
    trees = join(store, rank, size, HOST, TIMEOUT_SECONDS, TREES)
    host, checkpoint, beside = trees
    agreement.barrier(host)
    joined = time.monotonic(), time.process_time()
    failure = ("the disk is full", "free some space") if rank == 2 else None
    entries = entries_of(rank)
    calls: dict[str, Callable[[], Any]] = {
        "stop": lambda: agreement.highest(beside, 200 if rank == size // 2 else 0),
        "error": lambda: agreement.first_failure(host, failure),
        "manifest": lambda: named_files(checkpoint, entries, folder),
    }
    turns = {name: [timed(host, calls[name]) for _ in range(rounds)] for name in calls}
    assert agreement.highest(beside, 0) == 0
    error = agreement.first_failure(host, failure)
    assert error is not None and (error.rank, error.ranks) == (2, 1)
    cpu = {name: statistics.median(used for _, used in turns[name]) for name in calls}
    cpu["join"] = joined[1] - started[1]
    own = (started[0], joined[0], len(sockets()), private_kib(), cpu)
    every = agreement.gathered_by_first(host, own)
    agreement.barrier(host)  # nobody leaves before
    for tree in trees:
        tree.close()
    if every is None:
        return None
    starts, ends, counts, kib, cpus = zip(*every, strict=True)
    seconds = {name: [wall for wall, _ in turns[name]] for name in calls}
    seconds["join"] = [max(ends) - min(starts)]
    return {
        "seconds": seconds,
        "cpu_seconds": {name: sum(of_rank[name] for of_rank in cpus) for name in seconds},
        "sockets": {"most": max(counts), "mean": statistics.fmean(counts)},
        "private_mib": {"most": max(kib) / 1024, "mean": statistics.fmean(kib) / 1024},
    }


def timed(tree: Tree, call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds until a call is over that all begin together, and of the processor for it."""
    agreement.barrier(tree)
    started = time.monotonic(), time.process_time()
    call()
    return time.monotonic() - started[0], time.process_time() - started[1]


def named_files(tree: Tree, own_entries: bytes, folder: Path) -> None:
    """As a checkpoint's end: every rank's files and entries, written down by the first."""
    name = f"__{tree.rank}_0.distcp"
    files = {name: {"bytes": 2**30 + tree.rank, "sha256": f"{tree.rank:064x}"}}
    entries = agreement.gathered_by_first(tree, own_entries)
    every = agreement.gathered_by_first(tree, files)
    if entries is not None and every is not None:
        with (folder / ".metadata").open("wb") as file:
            file.writelines(map(zlib.decompress, entries))
        merged = {name: entry for part in every for name, entry in part.items()}
        assert len(merged) == tree.size
        (folder / "manifest.json").write_text(json.dumps(merged, indent=1))
    agreement.of_first(tree, None)


def entries_of(rank: int) -> bytes:
    """As large as those of a rank's parts of so many tensors: 280 kB, and 15 kB compressed."""
    start, row = 2**20 * rank, "{:08x} model.layers.{}.mlp.weight {} {} {}"
    lines = (
        row.format(zlib.crc32(b"%d" % n), n % 32, n, start + n, "x" * 256) for n in range(TENSORS)
    )
    return zlib.compress("".join(lines).encode(), level=1)


def sockets() -> list[str]:
    links = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(path))
        except OSError:
            continue
    return [link for link in links if link.startswith("socket:")]


def private_kib() -> int:
    """Memory that is this process's own: shared pages of the fork are not."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return sizes["Private_Clean"] + sizes["Private_Dirty"]


def fitted(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """a and b of a + b N with the least squares of relative errors, and the largest of these."""
    weights = [(n, t, 1 / t**2) for n, t in points]
    w, wn = sum(w for *_, w in weights), sum(w * n for n, _, w in weights)
    wnn = sum(w * n * n for n, _, w in weights)
    wt, wnt = sum(w * t for _, t, w in weights), sum(w * n * t for n, t, w in weights)
    b = (w * wnt - wn * wt) / (w * wnn - wn**2)
    a = (wt - b * wn) / w
    return a, b, max(abs(a + b * n - t) / t for n, t in points)


def small_world(rank: int, size: int, port: int, rounds: int, answers: Any) -> None:
    """With torch: the same by gloo's groups and by trees, in turns."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous(f"tcp://{HOST}:{port}", rank, size))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    groups: list[Any] = []
    trees: list[Tree] = []

    def by_gloo() -> None:
        groups[:] = [dist.new_group(backend="gloo") for _ in range(2)]
        dist.barrier(groups[0])

    def by_tree(number: int) -> None:
        own = dist.PrefixStore(f"bench{number}", store)
        trees[:] = join(own, rank, size, HOST, TIMEOUT_SECONDS, TREES)
        agreement.barrier(trees[0])

    joins: dict[str, list[float]] = {"ours": [], "peer": []}
    for number in range(rounds):
        for name in ("ours", "peer"):
            dist.barrier()
            started = time.perf_counter()
            by_tree(number) if name == "ours" else by_gloo()
            joins[name].append(time.perf_counter() - started)
    values: list[Any] = [None] * size
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: agreement.first_failure(trees[0], None),
        "peer": lambda: dist.all_gather_object(values, None, group=groups[0]),
    }
    turns: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds * 20):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            dist.barrier()
            started = time.perf_counter()
            for _ in range(10):
                ways[name]()
            turns[name].append((time.perf_counter() - started) / 10)
    if rank == 0:
        answers[size] = {"calls": turns, "joins": joins}
    dist.barrier()
    dist.destroy_process_group()


def small_worlds(rounds: int) -> dict[int, Any]:
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        answers = manager.dict()
        for size in SMALL:
            with socket.create_server((HOST, 0)) as listener:
                port = listener.getsockname()[1]
            about = [(rank, size, port, rounds, answers) for rank in range(size)]
            ranks = [context.Process(target=small_world, args=each) for each in about]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
        return dict(answers)


def rows_of(worlds: dict[int, dict[str, Any]], small: dict[int, Any]) -> list[dict[str, Any]]:
    import results

    rows, most, fewest = [], max(worlds), min(worlds)
    for name, words in WHAT.items():
        times = {size: world["seconds"][name] for size, world in worlds.items()}
        points = [(n, world["cpu_seconds"][name] / CORES) for n, world in worlds.items()]
        a, b, residual = fitted(points)
        fit = {"a": a, "b": b, "largest_relative_residual": residual, "points": points}
        title, peer = f"{words}, {most:,} ranks", f"{fewest} ranks"
        rows.append(results.row(title, "s", times[most], peer, times[fewest], "lower", fit=fit))
        title = f"{words}, {EXTRAPOLATED:,} ranks on {CORES} idle processors"
        whole, limit = a + b * EXTRAPOLATED, LIMITS[name]
        rows.append(
            results.row(title, "s", [whole], "what it may take", [limit], "lower", 1.0, fit=fit)
        )
        print(f"{words}: {a:.3g} s + {b * 1e6:.3g} us x N, at most {residual:.0%} off", flush=True)
    last = worlds[most]
    counts = last["sockets"]
    rows.append(
        results.row(
            f"sockets of a rank, {most:,} ranks, the most",
            "sockets",
            [counts["most"]],
            "three groups of gloo",
            [TREES * (most - 1)],
            "lower",
            TREES * math.ceil(math.log2(most)) / (TREES * (most - 1)),
            **counts,
        )
    )
    memory = last["private_mib"]
    title = f"memory of a rank's own, {most:,} ranks, the mean"
    limit = "what it may take"
    rows.append(results.row(title, "MiB", [memory["mean"]], limit, [16], "lower", 1.0, **memory))
    for size, turns in small.items():
        for title, peer, (ours, theirs) in (
            ("run_on_all_ranks", "all_gather_object", turns["calls"].values()),
            ("to join three trees", "two gloo groups", turns["joins"].values()),
        ):
            ours, theirs = ([s * 1e3 for s in each] for each in (ours, theirs))
            title = f"{title}, {size} ranks"
            rows.append(results.row(title, "ms", ours, peer, theirs, "lower", 1.0))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256, 1000, 2000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    arguments = parser.parse_args()
    worlds = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.ranks:
            worlds[size] = world_of(size, arguments.rounds, Path(folder))
            print(size, json.dumps(worlds[size]), flush=True)
    rows = rows_of(worlds, small_worlds(arguments.rounds))
    import results  # it imports torch, which no rank above may have

    met = results.record("many_ranks", rows)
    return int(arguments.check and not met)


if __name__ == "__main__":
    sys.exit(main())
