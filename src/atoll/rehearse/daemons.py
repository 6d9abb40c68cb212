"""Start the mirror's Slurm; it ends with the process namespace around it."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from atoll.commands import run_command
from atoll.errors import UserError
from atoll.rehearse.mirror import MARIADB_SOCKET, PORTS, Mirror, accounting, settings_files

START_SECONDS = 60.0
USER = "root"  # who submits


def start_slurm(mirror: Mirror, folder: Path, environment: Mapping[str, str]) -> None:
    """Accounting, controller and nodes, with the accounts in place.

    Raises `UserError` with the words of the daemon that does not start.
    """
    folder.mkdir()
    for name in ("state", *(f"slurmd-{host}" for host in mirror.hosts)):
        (folder / name).mkdir()
    for name, text in settings_files(mirror, folder, socket.gethostname().split(".")[0]).items():
        file = folder / name
        file.write_text(text)
        file.chmod(0o600 if name == "slurmdbd.conf" else 0o644)
    database(f"create or replace database {mirror.cluster}")
    with_socket = {**environment, "MYSQL_UNIX_PORT": str(MARIADB_SOCKET)}
    _start(["slurmdbd"], PORTS["accounting"], with_socket, folder / "slurmdbd.log")
    for words in accounting(mirror, USER):
        run_command(["sacctmgr", "--immediate", "--quiet", "add", *words], environment=environment)
    _start(["slurmctld"], PORTS["controller"], environment, folder / "slurmctld.log")
    for number, host in enumerate(mirror.hosts):
        log = folder / f"slurmd-{host}.log"
        _start(["slurmd", "-N", host], PORTS["node"] + number, environment, log)
    _wait(lambda: _nodes_are_idle(mirror, environment), "the nodes", folder / "slurmctld.log")


def database(statement: str) -> None:
    """Tell the testbed's database; a failure is told by the daemon that needs it."""
    run_command(["mariadb", f"--socket={MARIADB_SOCKET}"], input_text=f"{statement};")


def _nodes_are_idle(mirror: Mirror, environment: Mapping[str, str]) -> bool:
    nodes = ",".join(mirror.hosts)
    command = ["sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %t"]
    states = dict(
        line.split() for line in run_command(command, environment=environment).stdout.splitlines()
    )
    return all(states.get(host) == "idle" for host in mirror.hosts)


def _start(argv: Sequence[str], port: int, environment: Mapping[str, str], log: Path) -> None:
    done = run_command(argv, environment=environment)
    if done.returncode != 0:
        raise UserError(f"{argv[0]} does not start: {done.last_line}", f"see {log}")
    _wait(lambda: _listens(port), argv[0], log)


def _wait(ready: Callable[[], bool], what: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if time.monotonic() > deadline:
            lines = log.read_text().splitlines() if log.exists() else []
            reason = lines[-1] if lines else "no word in its log"
            raise UserError(f"{what} did not come up in {START_SECONDS:.0f} s", reason)
        time.sleep(0.1)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
