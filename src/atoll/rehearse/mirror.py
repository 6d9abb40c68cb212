"""A Slurm of this machine that takes what a facility's takes: its queues, devices, node names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.launch import expand_hosts
from atoll.settings import Queue, Run
from atoll.settings.machine import Facility

ACCOUNT = "rehearsal"
MARIADB_SOCKET = Path("/var/lib/atoll-testbed/run/mysql.sock")
LIVE_NODES = 2  # with a daemon; the others exist in name, so that large jobs can be asked for
DEFAULT_HOSTS = "node[1-2]"
DEFAULT_CORES = 64
PORTS = {"controller": 17817, "accounting": 17818, "node": 17819}

SLURM_CONF = """\
ClusterName={cluster}
SlurmctldHost={machine}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=10
SlurmctldPort={controller}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/slurmd-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=bf_interval=1,sched_interval=1
GresTypes=gpu
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={accounting}
AccountingStorageEnforce=associations,limits,qos
"""
SLURMDBD_CONF = """\
AuthType=auth/munge
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={accounting}
SlurmUser=root
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc={cluster}
"""


@dataclass(frozen=True)
class Mirror:
    """What a facility's Slurm knows, as far as the facility's YAML states it."""

    cluster: str
    account: str
    hosts: list[str]  # those that run jobs, as the facility writes them
    node_count: int
    cores: int
    memory_mib: int | None
    devices: int
    device_type: str | None  # the a100 of gpu:a100:4
    features: list[str]
    whole_nodes: bool  # where no job asks for devices, each has all of its nodes
    default_partition: str
    queues: dict[str, Queue]  # each of them both a partition and a QoS


def mirror_of(run: Run, stated: Facility) -> Mirror:
    """The mirror that a run asks for, of a facility as its YAML states it.

    A queue that was typed exists where the facility states none to choose from.
    """
    facility, submit = run.facility, run.facility.submit
    asked = [stated.submit] if stated.limits.queues else [stated.submit, submit]
    flags = ("partition", "q", "qos")
    named = [str(words[flag]) for words in asked for flag in flags if words.get(flag)]
    queues = {name: Queue() for name in named} | stated.limits.queues
    hosts = expand_hosts(facility.node_names or DEFAULT_HOSTS)
    return Mirror(
        cluster=re.sub(r"\W", "_", f"rehearsal_{facility.name}"),
        account=facility.account or ACCOUNT,
        hosts=[host.split(".")[0] for host in hosts[:LIVE_NODES]],
        node_count=max(LIVE_NODES, run.nodes),
        cores=facility.node.cores or DEFAULT_CORES,
        memory_mib=_memory_mib(run),
        devices=facility.node.devices,
        device_type=_device_type(submit),
        features=re.findall(r"[\w.-]+", str(submit.get("constraint") or submit.get("C") or "")),
        whole_nodes=not any(flag.startswith("g") for flag in submit),
        default_partition=str(stated.submit.get("partition") or stated.submit.get("q") or "all"),
        queues=queues,
    )


def settings_files(mirror: Mirror, folder: Path, machine: str) -> dict[str, str]:
    """File name -> text, of the settings of the mirror's daemons."""
    facts = {"cluster": mirror.cluster, "folder": folder, "machine": machine, **PORTS}
    lines = [*_nodes(mirror), *_partitions(mirror)]
    device = f" Type={mirror.device_type}" if mirror.device_type else ""
    gres = f"Name=gpu{device} File=/dev/tty[1-{mirror.devices}]\n"  # nothing opens them
    return {
        "slurm.conf": SLURM_CONF.format(**facts) + "".join(f"{line}\n" for line in lines),
        "gres.conf": gres,
        "slurmdbd.conf": SLURMDBD_CONF.format(**facts),
    }


def accounting(mirror: Mirror, user: str) -> list[list[str]]:
    """What sacctmgr is told to add: the account, and a QoS for each queue."""
    qos = [["qos", name, *_qos_limits(queue)] for name, queue in mirror.queues.items()]
    names = ",".join(["normal", *mirror.queues])
    return [
        ["cluster", mirror.cluster],
        ["account", mirror.account],
        *qos,
        ["user", user, f"Account={mirror.account}", f"QOS={names}"],
    ]


def _nodes(mirror: Mirror) -> list[str]:
    memory = f" RealMemory={mirror.memory_mib}" if mirror.memory_mib else " RealMemory=1000000"
    features = f" Features={','.join(mirror.features)}" if mirror.features else ""
    device = f"gpu:{mirror.device_type}" if mirror.device_type else "gpu"
    same = f"CPUs={mirror.cores}{memory} Gres={device}:{mirror.devices}{features}"
    live = [
        f"NodeName={host} NodeHostname=localhost NodeAddr=127.0.0.1 "
        f"Port={PORTS['node'] + number} {same} State=UNKNOWN"
        for number, host in enumerate(mirror.hosts)
    ]
    others = mirror.node_count - len(mirror.hosts)
    absent = f"NodeName=other[1-{others}] NodeAddr=127.0.0.1 {same} State=DOWN"
    return [*live, absent] if others else live


def _partitions(mirror: Mirror) -> list[str]:
    names = dict.fromkeys([mirror.default_partition, *mirror.queues])
    lines = []
    for name in names:
        queue = mirror.queues.get(name, Queue())
        most = f" MaxNodes={queue.max_nodes}" if queue.max_nodes else ""
        minutes = f" MaxTime={queue.max_walltime_minutes}" if queue.max_walltime_minutes else ""
        default = " Default=YES" if name == mirror.default_partition else ""
        shared = " OverSubscribe=EXCLUSIVE" if mirror.whole_nodes else ""
        lines.append(f"PartitionName={name} Nodes=ALL State=UP{default}{most}{minutes}{shared}")
    return lines


def _qos_limits(queue: Queue) -> list[str]:
    wall = [f"MaxWall={queue.max_walltime_minutes}"] if queue.max_walltime_minutes else []
    nodes = [f"MaxTRESPerJob=node={queue.max_nodes}"] if queue.max_nodes else []
    return [*wall, *nodes, *(["Flags=DenyOnLimit"] if wall or nodes else [])]


def _memory_mib(run: Run) -> int | None:
    """A GiB more than stated: facilities round."""
    stated = run.facility.node.memory_gib
    return None if stated is None else int((stated + 1) * 1024)


def _device_type(submit: Mapping[str, object]) -> str | None:
    """The type in `gpu:a100:4` (gres) or `a100:4` (gpus-per-node)."""
    gres = re.fullmatch(r"gpu:([A-Za-z]\w*):\d+", str(submit.get("gres")))
    gpus = re.fullmatch(r"([A-Za-z]\w*):\d+", str(submit.get("gpus-per-node")))
    match = gres or gpus
    return match[1] if match else None
