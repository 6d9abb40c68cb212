"""What carries messages between nodes: NCCL's (or RCCL's) own word, read once when it starts."""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from atoll.errors import UserError
from atoll.launch import Placement
from atoll.settings import Run

SOCKET = "Socket"
FABRICS = ("infiniband", "slingshot")  # where TCP sockets are a mistake
_NO_PLUGIN = "the image or facility.binds lack the plugin for this network"
HINT = f"{_NO_PLUGIN}: facility.network.plugin=FILE, or facility.network.fabric=ethernet to accept"


@contextmanager
def nccl_log(placement: Placement) -> Iterator[Path | None]:
    """Have NCCL write what it chooses into a file of this rank, for as long as the `with` lasts.

    One rank a node is enough, and none where there is one node. A log that the user asked for by
    NCCL_DEBUG is left alone.
    """
    if placement.node_count == 1 or placement.local_rank != 0 or "NCCL_DEBUG" in os.environ:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="atoll-nccl-") as folder:
        log = Path(folder) / "nccl.log"
        asked = {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET",
            "NCCL_DEBUG_FILE": str(log),
        }
        before = dict(os.environ)
        os.environ.update(asked)
        try:
            yield log
        finally:  # NCCL keeps its file open: what it writes later goes nowhere
            for name in asked:
                os.environ.pop(name)
            os.environ.update({name: before[name] for name in asked if name in before})


def networks_in(text: str) -> list[str]:
    """The networks that lines of NCCL_DEBUG=INFO say are used: IB, Socket, AWS Libfabric, …"""
    return sorted({name.strip() for name in re.findall(r"Using network (.+)", text)})


def networks_of(log: Path | None) -> list[str]:
    """The networks that a log names; none where there is no log."""
    return networks_in(log.read_text(errors="replace")) if log and log.is_file() else []


def refusal(run: Run, networks: list[str]) -> UserError | None:
    """Why a run should not go on: it talks over TCP on a facility that has a fabric."""
    fabric = run.facility.network.fabric
    if fabric not in FABRICS or SOCKET not in networks:
        return None
    return UserError(
        f"NCCL fell back to TCP sockets; {run.facility.name} has {fabric}, many times as fast", HINT
    )


def failed_start(log: Path | None, error: Exception, environ: Mapping[str, str]) -> UserError:
    """NCCL's own words when it does not start, and the network that was asked of it."""
    lines = log.read_text(errors="replace").splitlines() if log and log.is_file() else []
    warned = [line.partition("WARN ")[2] for line in lines if "WARN " in line]
    words = (warned or str(error).strip().splitlines() or ["no reason given"])[-1]
    asked = [f"{n}={environ[n]}" for n in ("NCCL_NET", "NCCL_NET_PLUGIN") if environ.get(n)]
    return UserError(
        f"NCCL does not start: {words}{'; ' if asked else ''}{', '.join(asked)}",
        f"NCCL_NET falls back to nothing: {_NO_PLUGIN}"
        if asked
        else "atoll doctor --job says more",
    )
