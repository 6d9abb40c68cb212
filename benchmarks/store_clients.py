"""The store alone: how long until 1,000 to 10,000 simulated ranks have met at it.

    python benchmarks/store_clients.py [--clients 1000 4000] [--rounds 3] [--check]

A static launch makes one store and no other meeting point, so this is what a large job waits for.
Each client connects, counts itself in, and waits for the word that all are there. The store's two
servers take turns: libuv's event loop, which torch uses and so do we, and the older one of threads
and polling. Clients live in a few processes of this machine, in a network of their own: torch asks
for the name of each peer, and a slow name server would be what is measured.
"""

import argparse
import multiprocessing
import os
import resource
import shutil
import sys
import time
from datetime import timedelta
from functools import partial

import results
from torch.distributed import TCPStore

PROCESSES = 4
TIMEOUT = timedelta(minutes=5)
SERVERS = {"libuv": True, "threads": False}
LIMIT_SECONDS = 30.0
ALONE = "--alone"  # this process has a network of its own


def clients(port: int, count: int, total: int, use_libuv: bool) -> None:
    """Be `count` of the clients: connect, be counted, and wait for the others."""
    stores = [
        TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT, use_libuv=use_libuv)
        for _ in range(count)
    ]
    for store in stores:
        if store.add("joined", 1) == total:
            store.set("all", "here")
    for store in stores:
        store.wait(["all"])


def timed(total: int, use_libuv: bool) -> float:
    """Seconds until every client has seen all others come."""
    server = TCPStore(
        "127.0.0.1", 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False, use_libuv=use_libuv
    )
    shares = [total // PROCESSES + (i < total % PROCESSES) for i in range(PROCESSES)]
    context = multiprocessing.get_context("fork")
    start = time.perf_counter()
    processes = [
        context.Process(target=clients, args=(server.port, share, total, use_libuv))
        for share in shares
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    seconds = time.perf_counter() - start
    if any(process.exitcode for process in processes) or int(server.get("joined")) != total:
        raise RuntimeError(f"not all of {total} clients have met")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help=f"fail beyond {LIMIT_SECONDS} s")
    parser.add_argument(ALONE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.alone:
        alone = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up; exec "$@"']
        argv = [*alone, "sh", sys.executable, *sys.argv, ALONE]
        os.execv(shutil.which("unshare") or "unshare", argv)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = []
    for total in arguments.clients:
        ways = {name: partial(timed, total, libuv) for name, libuv in SERVERS.items()}
        ours, peer = results.in_turns(ways, arguments.rounds).values()
        case = f"{total} clients have met"
        rows.append(results.row(case, "s", ours, "server of threads", peer, "lower", 1.0))
        limit = "what it may take"
        rows.append(results.row(case, "s", ours, limit, [LIMIT_SECONDS], "lower", 1.0))
    return int(not results.record("store_clients", rows) and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
