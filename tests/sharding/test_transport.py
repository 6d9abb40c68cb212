"""A run over TCP on a facility with a fabric ends before its first step."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import small_run
from rank_pool import RankPool

from atoll.errors import UserError
from atoll.launch import Placement
from atoll.settings import Run
from atoll.sharding import transport
from atoll.sharding.process_group import World, check_transport

# As NCCL 2.27 and RCCL 2.22 write them with NCCL_DEBUG=INFO.
SOCKETS = """\
n1:77:77 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
n1:77:91 [0] NCCL INFO NET/IB : No device found.
n1:77:91 [0] NCCL INFO NET/Socket : Using [0]hsn0:10.0.0.1<0> [1]hsn1:10.0.0.2<0>
n1:77:91 [0] NCCL INFO Using network Socket
"""
LIBFABRIC = """\
n1:77:91 [0] NCCL INFO NET/OFI Using aws-ofi-nccl 1.9.1
n1:77:91 [0] NCCL INFO Using network AWS Libfabric
"""
INFINIBAND = "n1:77:91 [0] NCCL INFO Using network IB\n"
NOT_FOUND = """\
n1:77:91 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
n1:77:91 [0] /src/net.cc:560 NCCL WARN Error: network AWS Libfabric not found.
"""


def on_fabric(folder: Path, fabric: str | None) -> Run:
    if not (folder / "text.txt").exists():
        small_run.write_text(folder)
    run = small_run.settings(folder, 1, nodes=2)
    network = run.facility.network.model_copy(update={"fabric": fabric})
    return run.model_copy(update={"facility": run.facility.model_copy(update={"network": network})})


@pytest.mark.parametrize(
    ("log", "fabric", "refused"),
    [
        (SOCKETS, "slingshot", True),
        (SOCKETS, "infiniband", True),
        (SOCKETS, "ethernet", False),
        (SOCKETS, None, False),
        (LIBFABRIC, "slingshot", False),
        (INFINIBAND, "infiniband", False),
    ],
)
def test_sockets_are_refused_where_there_is_a_fabric(log, fabric, refused, tmp_path):
    error = transport.refusal(on_fabric(tmp_path, fabric), transport.networks_in(log))
    assert (error is not None) is refused
    if error is not None:
        assert error.found.startswith("NCCL fell back to TCP sockets; here has")
        assert "facility.network.plugin" in error.hint


def ends(world: World, run: Run) -> str:
    networks = tuple(transport.networks_in(SOCKETS if world.rank == 0 else ""))
    mine = dataclasses.replace(world, networks=networks)
    try:
        check_transport(run, mine)
    except UserError as error:
        return error.found
    return "went on"


def test_every_rank_ends_where_one_node_uses_sockets(ranks: RankPool, tmp_path: Path):
    found = ranks.run(ends, on_fabric(tmp_path, "slingshot"), world=2)
    assert len(set(found)) == 1
    assert "TCP sockets" in found[0]
    assert ranks.run(ends, on_fabric(tmp_path, "ethernet"), world=2) == ["went on"] * 2


def test_nccl_writes_for_one_rank_a_node_and_only_while_it_starts(monkeypatch):
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
        monkeypatch.delenv(name, raising=False)
    two_nodes = [Placement(rank, 4, rank % 2, 2, rank // 2, 2, "n1", 1, "slurm") for rank in (0, 1)]
    with transport.nccl_log(two_nodes[0]) as log:
        assert os.environ["NCCL_DEBUG_FILE"] == str(log)
        log.write_text(LIBFABRIC)
        assert transport.networks_of(log) == ["AWS Libfabric"]
    assert "NCCL_DEBUG" not in os.environ
    with transport.nccl_log(two_nodes[1]) as log:
        assert log is None
    assert transport.networks_of(None) == []
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    with transport.nccl_log(two_nodes[0]) as log:
        assert log is None and os.environ["NCCL_DEBUG"] == "WARN"


def test_a_missing_plugin_is_named_with_nccl_s_own_words(tmp_path):
    log = tmp_path / "log"
    log.write_text(NOT_FOUND)
    environ = {"NCCL_NET": "AWS Libfabric"}
    error = transport.failed_start(log, RuntimeError("ncclInvalidUsage"), environ)
    assert "network AWS Libfabric not found.; NCCL_NET=AWS Libfabric" in error.found
    assert "falls back to nothing" in error.hint
    plain = transport.failed_start(None, RuntimeError("a\nncclSystemError"), {})
    assert plain.found == "NCCL does not start: ncclSystemError"


def test_the_doctor_s_job_says_the_same(tmp_path):
    from atoll.monitor.node_probe import faults
    from atoll.monitor.node_probe import transport as carried

    facility = on_fabric(tmp_path, "slingshot").facility
    world = SimpleNamespace(size=2, device=SimpleNamespace(type="cuda"), networks=("Socket",))
    [(found, _)] = faults([], carried(world), facility)
    assert found == "NCCL fell back to TCP, though the facility has slingshot"
