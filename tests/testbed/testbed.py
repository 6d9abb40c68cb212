"""A real Slurm of several virtual nodes, and a real Apptainer, on this one machine.

    python3 tests/testbed/testbed.py up | down | status        (as root, on Debian or Ubuntu)

`up` may be called again at any time. Everything of it is in /etc/slurm and STATE.
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
from pathlib import Path

from install import install_apptainer, install_packages, open_fuse, run, stop

STATE = Path("/var/lib/atoll-testbed")
SETTINGS = Path("/etc/slurm")
ROOT_IDS = "300000:65536"  # that root may build images with
USER = "atoll"  # who submits: an ordinary user
NODES = ["n1", "n2", "n3", "n4"]
DEVICES_PER_NODE, CORES_PER_NODE = 2, 4
MARK = "# written by Atoll's testbed"
DATABASE_PORT, CONTROLLER_PORT, ACCOUNTING_PORT, NODE_PORT = 17306, 17817, 17819, 17001

SLURM_CONF = f"""\
{MARK}
ClusterName=testbed
SlurmctldHost={{host}}(127.0.0.1)
SlurmUser=slurm
AuthType=auth/munge
# a job that is requeued waits this long before it starts again
AuthInfo=cred_expire=10
SlurmctldPort={CONTROLLER_PORT}
StateSaveLocation={STATE}/slurmctld
SlurmctldPidFile={STATE}/run/slurmctld.pid
SlurmctldLogFile={STATE}/log/slurmctld.log
SlurmdSpoolDir={STATE}/slurmd-%n
SlurmdPidFile={STATE}/run/slurmd-%n.pid
SlurmdLogFile={STATE}/log/slurmd-%n.log
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
AccountingStoragePort={ACCOUNTING_PORT}
AccountingStorageEnforce=associations,limits,qos
NodeName=n[1-{len(NODES)}] NodeHostname={{host}} NodeAddr=127.0.0.1 \
Port=[{NODE_PORT}-{NODE_PORT + len(NODES) - 1}] CPUs={CORES_PER_NODE} RealMemory=8000 \
Gres=gpu:{DEVICES_PER_NODE} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=NO
PartitionName=small Nodes=n1 MaxTime=10 State=UP
"""
# Devices that exist everywhere stand for the GPUs: nothing opens them.
GRES_CONF = f"""\
{MARK}
NodeName=n[1-{len(NODES)}] Name=gpu File=/dev/tty[1-{DEVICES_PER_NODE}]
"""
SLURMDBD_CONF = f"""\
{MARK}
AuthType=auth/munge
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={ACCOUNTING_PORT}
SlurmUser=slurm
PidFile={STATE}/run/slurmdbd.pid
LogFile={STATE}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={DATABASE_PORT}
StorageUser=slurm
StoragePass={{password}}
StorageLoc=slurm_acct_db
"""
ACCOUNTING = [
    ["add", "cluster", "testbed"],
    ["add", "account", "island", "Description=testbed", "Organization=testbed"],
    ["add", "qos", "debug", "MaxWall=30", "MaxTRES=node=2", "Flags=DenyOnLimit"],
    ["add", "user", USER, "Account=island", "QOS=normal,debug"],
    ["add", "user", "root", "Account=island", "QOS=normal,debug"],
]


def up() -> None:
    """Install, configure and start; everything that runs already is left as it is."""
    refuse_other_slurm()
    install_packages()
    install_apptainer()
    open_fuse()
    make_user()
    let_root_use_containers()
    name_nodes()
    write_settings()
    start_munge()
    start_database()
    start("slurmdbd", ACCOUNTING_PORT)
    keep_accounts()
    start("slurmctld", CONTROLLER_PORT)
    for position, node in enumerate(NODES):
        start("slurmd", NODE_PORT + position, "-N", node, name=f"slurmd-{node}")
    wait_for_nodes()
    status()


def down() -> None:
    """Stop what `up` started; what it installed and the accounting stay for the next time."""
    for pid_file in sorted((STATE / "run").glob("*.pid"), reverse=True):
        with suppress(ProcessLookupError, ValueError):
            os.kill(int(pid_file.read_text()), signal.SIGTERM)
        pid_file.unlink(missing_ok=True)
    print("the testbed is down; what it installed is still there")


def status() -> None:
    """Print the nodes, or that there are none."""
    answer = subprocess.run(["sinfo", "--Node", "--long"], capture_output=True, text=True)
    print((answer.stdout or answer.stderr).strip())
    apptainer = subprocess.run(["apptainer", "--version"], capture_output=True, text=True)
    print(f"{apptainer.stdout.strip()}; jobs are submitted by user {USER}, account island")


def refuse_other_slurm() -> None:
    if os.geteuid() != 0:
        stop("the testbed is installed by root", "sudo make testbed")
    theirs = SETTINGS / "slurm.conf"
    if theirs.exists() and MARK not in theirs.read_text():
        stop(f"{theirs} is of another Slurm", "use that one, or make the testbed elsewhere")


def make_user() -> None:
    try:
        pwd.getpwnam(USER)
    except KeyError:
        run("useradd", "--create-home", "--shell", "/bin/bash", USER)


def let_root_use_containers() -> None:
    """In a sandbox root lacks some powers, and Apptainer would insist on handing all of them on."""
    run("apptainer", "config", "global", "--set", "root default capabilities", "no")
    for table in (Path("/etc/subuid"), Path("/etc/subgid")):
        if not any(line.startswith("root:") for line in table.read_text().splitlines()):
            with table.open("a") as file:
                file.write(f"root:{ROOT_IDS}\n")


def name_nodes() -> None:
    """Each virtual node's name leads to this machine, as its ranks need it."""
    hosts = Path("/etc/hosts")
    line = f"127.0.0.1 {' '.join(NODES)} {MARK}"
    if line not in hosts.read_text():
        with hosts.open("a") as file:
            file.write(f"{line}\n")


def write_settings() -> None:
    for folder in ("run", "log", "slurmctld", *(f"slurmd-{node}" for node in NODES)):
        (STATE / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("run", "log", "slurmctld"):
        shutil.chown(STATE / folder, "slurm", "slurm")
    host = socket.gethostname().split(".")[0]
    (SETTINGS / "slurm.conf").write_text(SLURM_CONF.format(host=host))
    (SETTINGS / "gres.conf").write_text(GRES_CONF)
    secret = SETTINGS / "slurmdbd.conf"
    if not secret.exists():
        secret.touch(mode=0o600)
        secret.write_text(SLURMDBD_CONF.format(password=secrets.token_hex(16)))
        shutil.chown(secret, "slurm", "slurm")


def start_munge() -> None:
    if Path("/run/munge/munge.socket.2").exists() and _answers(["munge", "--no-input"]):
        return
    Path("/run/munge").mkdir(mode=0o755, exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    run("runuser", "-u", "munge", "--", "munged", "--force")
    shutil.copyfile("/run/munge/munged.pid", STATE / "run" / "munged.pid")


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
    settings = (SETTINGS / "slurmdbd.conf").read_text()
    password = settings.split("StoragePass=")[1].split()[0]
    statements = (
        "create database if not exists slurm_acct_db;"
        f"create or replace user slurm@'127.0.0.1' identified by '{password}';"
        f"create or replace user slurm@localhost identified by '{password}';"
        "grant all on slurm_acct_db.* to slurm@'127.0.0.1';"
        "grant all on slurm_acct_db.* to slurm@localhost;"
    )
    run("mariadb", f"--socket={socket_file}", input=statements)


def start(program: str, port: int, *flags: str, name: str = "") -> None:
    if _listens(port):
        return
    run(program, *flags)
    _wait(lambda: _listens(port), name or program)


def keep_accounts() -> None:
    for words in ACCOUNTING:
        # what is there already is no change, and says so with a code of its own
        subprocess.run(["sacctmgr", "--immediate", "--quiet", *words], capture_output=True)
    users = run("sacctmgr", "--noheader", "--parsable2", "show", "assoc", "format=user")
    if USER not in users.split():
        stop(f"slurmdbd does not know user {USER}", f"see {STATE}/log/slurmdbd.log")


def wait_for_nodes() -> None:
    def ready() -> bool:
        words = ["sinfo", "--noheader", "--Node", "--format=%N %T", "--partition=main"]
        answer = subprocess.run(words, capture_output=True, text=True).stdout
        states = dict(line.split() for line in answer.splitlines())
        for node, state in states.items():
            if state.startswith(("down", "drain", "unknown")) and not state.endswith("*"):
                run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        return all(states.get(node) in ("idle", "mixed", "allocated") for node in NODES)

    _wait(ready, f"Slurm's nodes {', '.join(NODES)}")


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
