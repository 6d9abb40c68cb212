"""Two real Slurm clusters of virtual nodes, and a real Apptainer, on this one machine.

    python3 tests/testbed/testbed.py up | down | status        (as root, on Debian or Ubuntu)

`up` may be called again at any time. The first cluster is the machine's own (/etc/slurm); the
second has its own user, munge key, accounting and ports, and is met by SLURM_CONF. Everything else
is in STATE.
"""

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from install import install_apptainer, install_packages, open_fuse, run, stop

STATE = Path("/var/lib/atoll-testbed")
ROOT_IDS = "300000:65536"  # that root may build images with
DEVICES_PER_NODE, CORES_PER_NODE = 2, 4
MARK = "# written by Atoll's testbed"
DATABASE_PORT = 17306


@dataclass(frozen=True)
class Cluster:
    """A Slurm: who submits (an ordinary user), its nodes, and where its parts are."""

    name: str
    user: str
    nodes: tuple[str, ...]
    settings: Path  # folder of slurm.conf
    state: Path
    munge_socket: Path
    first_port: int  # controller, accounting, then the nodes

    @property
    def controller_port(self) -> int:
        return self.first_port

    @property
    def accounting_port(self) -> int:
        return self.first_port + 1

    @property
    def node_port(self) -> int:
        return self.first_port + 2

    @property
    def database(self) -> str:
        return f"slurm_{self.name}"

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self.settings / "slurm.conf")}


CLUSTERS = [
    Cluster(
        "testbed", "atoll", ("n1", "n2", "n3", "n4"), Path("/etc/slurm"), STATE,
        Path("/run/munge/munge.socket.2"), 17817,
    ),
    Cluster(
        "east", "atoll_east", ("e1", "e2"), Path("/etc/slurm-east"), STATE / "east",
        STATE / "east" / "munge" / "munge.socket", 17917,
    ),
]  # fmt: skip

SLURM_CONF = """\
{mark}
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmUser=slurm
AuthType=auth/munge
# a job that is requeued waits so many seconds before it starts again
AuthInfo=cred_expire=10,socket={munge_socket}
SlurmctldPort={controller_port}
StateSaveLocation={state}/slurmctld
SlurmctldPidFile={state}/run/slurmctld.pid
SlurmctldLogFile={state}/log/slurmctld.log
SlurmdSpoolDir={state}/slurmd-%n
SlurmdPidFile={state}/run/slurmd-%n.pid
SlurmdLogFile={state}/log/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2,sched_interval=5
GresTypes=gpu
KillWait=20
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={accounting_port}
AccountingStoragePass={munge_socket}
AccountingStorageEnforce=associations,limits,qos
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{node_port}-{last_port}] \
CPUs={cores} RealMemory=8000 Gres=gpu:{devices} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=NO
PartitionName=small Nodes={first_node} MaxTime=10 State=UP
"""
# Devices that exist everywhere stand for the GPUs: nothing opens them.
GRES_CONF = """\
{mark}
NodeName={nodes} Name=gpu File=/dev/tty[1-{devices}]
"""
SLURMDBD_CONF = """\
{mark}
AuthType=auth/munge
AuthInfo=socket={munge_socket}
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={accounting_port}
SlurmUser=slurm
PidFile={state}/run/slurmdbd.pid
LogFile={state}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser={database}
StoragePass={password}
StorageLoc={database}
"""


def accounting(cluster: Cluster) -> list[list[str]]:
    """What sacctmgr is told to add."""
    return [
        ["cluster", cluster.name],
        ["account", "island", "Description=testbed", "Organization=testbed"],
        ["qos", "debug", "MaxWall=30", "MaxTRES=node=2", "Flags=DenyOnLimit"],
        ["user", cluster.user, "Account=island", "QOS=normal,debug"],
        ["user", "root", "Account=island", "QOS=normal,debug"],
    ]


def up() -> None:
    """Install, configure and start; everything that runs already is left as it is."""
    refuse_other_slurm()
    install_packages()
    install_apptainer()
    open_fuse()
    let_root_use_containers()
    name_nodes()
    for cluster in CLUSTERS:
        make_user(cluster.user)
        write_settings(cluster)
    start_munge(CLUSTERS[0])
    for cluster in CLUSTERS[1:]:
        start_munge_of_its_own(cluster)
    start_database()
    for cluster in CLUSTERS:
        start_slurm(cluster)
    for cluster in CLUSTERS:
        wait_for_nodes(cluster)
    status()


def start_slurm(cluster: Cluster) -> None:
    make_database(cluster)
    start(cluster, "slurmdbd", cluster.accounting_port)
    keep_accounts(cluster)
    start(cluster, "slurmctld", cluster.controller_port)
    for position, node in enumerate(cluster.nodes):
        start(cluster, "slurmd", cluster.node_port + position, "-N", node)


def down() -> None:
    """Stop what `up` started; what it installed and the accounting stay for the next time."""
    for pid_file in sorted(STATE.glob("**/run/*.pid"), reverse=True):
        with suppress(ProcessLookupError, ValueError):
            os.kill(int(pid_file.read_text()), signal.SIGTERM)
        pid_file.unlink(missing_ok=True)
    print("the testbed is down; what it installed is still there")


def status() -> None:
    """Print the nodes, or that there are none."""
    for cluster in CLUSTERS:
        answer = subprocess.run(
            ["sinfo", "--Node", "--long"],
            capture_output=True,
            text=True,
            env=cluster.environment,
        )
        print((answer.stdout or answer.stderr).strip())
        print(f"jobs of {cluster.name} are submitted by user {cluster.user}, account island")
    apptainer = subprocess.run(["apptainer", "--version"], capture_output=True, text=True)
    print(apptainer.stdout.strip())


def refuse_other_slurm() -> None:
    if os.geteuid() != 0:
        stop("the testbed is installed by root", "sudo make testbed")
    for cluster in CLUSTERS:
        theirs = cluster.settings / "slurm.conf"
        if theirs.exists() and MARK not in theirs.read_text():
            stop(f"{theirs} is of another Slurm", "use that one, or make the testbed elsewhere")


def make_user(name: str) -> None:
    """One who can log in by key alone: '*' is no password, and no lock either."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        run("useradd", "--create-home", "--shell", "/bin/bash", name)
    run("usermod", "--password", "*", name)


def let_root_use_containers() -> None:
    """In a sandbox root lacks some powers, and Apptainer would insist on handing all of them on."""
    run("apptainer", "config", "global", "--set", "root default capabilities", "no")
    for table in (Path("/etc/subuid"), Path("/etc/subgid")):
        if not any(line.startswith("root:") for line in table.read_text().splitlines()):
            with table.open("a") as file:
                file.write(f"root:{ROOT_IDS}\n")


def name_nodes() -> None:
    """Each virtual node's name leads to this machine, as its ranks need it."""
    hosts, names = Path("/etc/hosts"), [node for one in CLUSTERS for node in one.nodes]
    line = f"127.0.0.1 {' '.join(names)} {MARK}"
    if line not in hosts.read_text():
        with hosts.open("a") as file:
            file.write(f"{line}\n")


def write_settings(cluster: Cluster) -> None:
    for folder in ("run", "log", "slurmctld", *(f"slurmd-{node}" for node in cluster.nodes)):
        (cluster.state / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("run", "log", "slurmctld"):
        shutil.chown(cluster.state / folder, "slurm", "slurm")
    cluster.settings.mkdir(exist_ok=True)
    first, last = cluster.nodes[0], cluster.nodes[-1]
    facts = {
        "mark": MARK,
        "name": cluster.name,
        "host": socket.gethostname().split(".")[0],
        "state": cluster.state,
        "munge_socket": cluster.munge_socket,
        "controller_port": cluster.controller_port,
        "accounting_port": cluster.accounting_port,
        "node_port": cluster.node_port,
        "last_port": cluster.node_port + len(cluster.nodes) - 1,
        "nodes": f"{first[0]}[{first[1:]}-{last[1:]}]",
        "first_node": first,
        "cores": CORES_PER_NODE,
        "devices": DEVICES_PER_NODE,
        "database_port": DATABASE_PORT,
        "database": cluster.database,
        "password": secrets.token_hex(16),
    }
    (cluster.settings / "slurm.conf").write_text(SLURM_CONF.format(**facts))
    (cluster.settings / "gres.conf").write_text(GRES_CONF.format(**facts))
    secret = cluster.settings / "slurmdbd.conf"
    if not secret.exists() or f"StorageLoc={cluster.database}\n" not in secret.read_text():
        secret.touch(mode=0o600)
        secret.write_text(SLURMDBD_CONF.format(**facts))
        shutil.chown(secret, "slurm", "slurm")


def start_munge(cluster: Cluster) -> None:
    """The machine's own."""
    if cluster.munge_socket.exists() and _answers(["munge", "--no-input"]):
        return
    Path("/run/munge").mkdir(mode=0o755, exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    run("runuser", "-u", "munge", "--", "munged", "--force")
    shutil.copyfile("/run/munge/munged.pid", STATE / "run" / "munged.pid")


def start_munge_of_its_own(cluster: Cluster) -> None:
    """With a key that no other cluster has: neither can speak for the other's users."""
    folder, socket_file = cluster.munge_socket.parent, cluster.munge_socket
    if socket_file.exists() and _answers(["munge", "--no-input", f"--socket={socket_file}"]):
        return
    folder.mkdir(exist_ok=True)
    key = folder / "munge.key"
    if not key.exists():
        key.touch(mode=0o400)
        key.write_bytes(secrets.token_bytes(128))
    for path in (folder, key):
        shutil.chown(path, "munge", "munge")
    files = {"key": "munge.key", "pid": "munged.pid", "log": "munged.log", "seed": "munged.seed"}
    flags = [f"--{name}-file={folder / file}" for name, file in files.items()]
    run("runuser", "-u", "munge", "--", "munged", "--force", f"--socket={socket_file}", *flags)
    shutil.copyfile(folder / "munged.pid", cluster.state / "run" / "munged.pid")


def start_database() -> None:
    data, socket_file = STATE / "mysql", STATE / "run" / "mysql.sock"
    if _listens(DATABASE_PORT):
        return
    (STATE / "run").chmod(0o777)
    if not data.exists():
        run("mariadb-install-db", "--user=mysql", f"--datadir={data}", "--skip-test-db")
    command = [
        *("mariadbd", "--no-defaults", "--user=mysql", f"--datadir={data}"),
        *(f"--socket={socket_file}", f"--port={DATABASE_PORT}", "--bind-address=127.0.0.1"),
        f"--pid-file={STATE / 'run' / 'mariadbd.pid'}",
        *("--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900"),
    ]
    with open(STATE / "log" / "mariadbd.log", "ab") as log:
        subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    _wait(lambda: _listens(DATABASE_PORT), "mariadbd")


def make_database(cluster: Cluster) -> None:
    if _listens(cluster.accounting_port):
        return
    settings = (cluster.settings / "slurmdbd.conf").read_text()
    password = settings.split("StoragePass=")[1].split()[0]
    name = cluster.database
    statements = (
        f"create database if not exists {name};"
        f"create or replace user {name}@'127.0.0.1' identified by '{password}';"
        f"create or replace user {name}@localhost identified by '{password}';"
        f"grant all on {name}.* to {name}@'127.0.0.1';"
        f"grant all on {name}.* to {name}@localhost;"
    )
    run("mariadb", f"--socket={STATE / 'run' / 'mysql.sock'}", input=statements)


def start(cluster: Cluster, program: str, port: int, *flags: str) -> None:
    if _listens(port):
        return
    run(program, *flags, env=cluster.environment)
    _wait(lambda: _listens(port), f"{program} of {cluster.name}")


def keep_accounts(cluster: Cluster) -> None:
    sacctmgr = ["sacctmgr", "--immediate", "--quiet", "add"]
    for words in accounting(cluster):
        # what is there already is no change, and says so with a code of its own
        subprocess.run([*sacctmgr, *words], capture_output=True, env=cluster.environment)
    asked = ["sacctmgr", "--noheader", "--parsable2", "show", "assoc", "format=user"]
    if cluster.user not in run(*asked, env=cluster.environment).split():
        stop(f"slurmdbd does not know user {cluster.user}", f"see {cluster.state}/log/slurmdbd.log")


def wait_for_nodes(cluster: Cluster) -> None:
    def ready() -> bool:
        words = ["sinfo", "--noheader", "--Node", "--format=%N %T", "--partition=main"]
        answer = subprocess.run(words, capture_output=True, text=True, env=cluster.environment)
        states = dict(line.split() for line in answer.stdout.splitlines())
        for node, state in states.items():
            if state.startswith(("down", "drain", "unknown")) and not state.endswith("*"):
                update = ["scontrol", "update", f"NodeName={node}", "State=RESUME"]
                run(*update, env=cluster.environment)
        return all(states.get(node) in ("idle", "mixed", "allocated") for node in cluster.nodes)

    _wait(ready, f"Slurm's nodes {', '.join(cluster.nodes)}")


def _wait(ready, what: str, seconds: float = 60) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            stop(f"{what} did not come up in {seconds:.0f} s", f"see {STATE}/log")
        time.sleep(0.3)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _answers(argv: list[str]) -> bool:
    return subprocess.run(argv, capture_output=True).returncode == 0


if __name__ == "__main__":
    actions = {"up": up, "down": down, "status": status}
    if len(sys.argv) != 2 or sys.argv[1] not in actions:
        stop("what to do is missing", f"give one of {', '.join(actions)}")
    actions[sys.argv[1]]()
