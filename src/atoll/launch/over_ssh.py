"""`atoll over-ssh`: start one command on every machine of a host file, and end them together.

Each command's standard input is a pipe to here. A byte on it is a signal for its ranks; its end,
which also comes when this process or the connection dies, is the end of the command.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from atoll.commands import CommandParser
from atoll.errors import UserError
from atoll.launch.master import on_fabric, port_from
from atoll.launch.processes import FORWARDED_SIGNALS, GRACE_SECONDS, die_with

# Nobody is there to type a password; a machine that is gone is noticed within a minute.
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]
POLL_SECONDS = 0.1
# After Ctrl-C ranks get this long to end by themselves.
INTERRUPT_SECONDS = 30.0
LOST_CONNECTION = 255  # as ssh says
_LINE = re.compile(r"^(?P<host>[^\s=-][^\s=]*)(\s+slots=(?P<slots>\d+))?$")


def main(argv: list[str]) -> int:
    """Start the words behind `--` on the first machines of a file; the first code that is not 0."""
    split = argv.index("--") if "--" in argv else len(argv)
    arguments, command = _parser().read(argv[:split]), argv[split + 1 :]
    if not command:
        raise UserError("over-ssh without a command", "put it behind --")
    hosts = read_hosts(arguments.hosts, arguments.nodes, arguments.ranks)
    port = arguments.port or port_from(hosts[0], str(os.getpid()), str(time.time_ns()))
    address = on_fabric(hosts[0], arguments.address_suffix)
    passed = {name: os.environ[name] for name in arguments.variable if name in os.environ}
    starts = {
        host: ssh_argv(host, arguments.ssh_option, {**passed, **place(rank, hosts, address, port)})
        for rank, host in enumerate(hosts)
    }
    return run_together(starts, command)


def read_hosts(file: Path, nodes: int, ranks: int) -> list[str]:
    """The first `nodes` machines of a host file: one a line, `slots=N` behind it, `#` comments.

    Raises `UserError` where it has too few, one twice, or one with fewer slots than ranks.
    """
    try:
        lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    except OSError as error:
        raise UserError(
            f"{file}: {error.strerror}", "facility.hosts_file=FILE, a host a line"
        ) from None
    hosts: list[str] = []
    for line in filter(None, lines):
        match = _LINE.match(line)
        if match is None or match["host"] in hosts:
            raise UserError(f"{file}: {line!r}", "each machine once, as NAME or NAME slots=N")
        if match["slots"] and int(match["slots"]) < ranks:
            raise UserError(
                f"{file}: {match['host']} has {match['slots']} slots for {ranks} ranks",
                f"ranks_per_node={match['slots']}, or fix the file",
            )
        hosts.append(match["host"])
    if len(hosts) < nodes:
        raise UserError(
            f"{file} names {len(hosts)} machines, the run asks for {nodes}", f"nodes={len(hosts)}"
        )
    return hosts[:nodes]


def place(rank: int, hosts: Sequence[str], address: str, port: int) -> dict[str, str]:
    """What tells the one task of a machine which of the machines it is on."""
    numbers = {"RANK": rank, "WORLD_SIZE": len(hosts), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    stated = {name: str(number) for name, number in numbers.items()}
    return {**stated, "MASTER_ADDR": address, "MASTER_PORT": str(port)}


def ssh_argv(host: str, options: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """The words before a command that has these variables on that machine."""
    pairs = [f"{name}={text}" for name, text in variables.items()]
    return [*SSH, *options, host, shlex.join(["exec", "env", *pairs])]


def run_together(starts: Mapping[str, Sequence[str]], command: Sequence[str]) -> int:
    """Run until the last machine ends; when one fails, or at Ctrl-C, all of them end."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in FORWARDED_SIGNALS}
    try:
        running = {
            # in a session of its own: Ctrl-C reaches the ranks by us alone
            host: subprocess.Popen(
                [*words[:-1], f"{words[-1]} {shlex.join(command)}"],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
            for host, words in starts.items()
        }
        return _watch(running, received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(running: Mapping[str, "subprocess.Popen[bytes]"], received: list[int]) -> int:
    exit_code, close_at, kill_at = 0, float("inf"), float("inf")
    while any(process.poll() is None for process in running.values()):
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        while received:
            number = received.pop(0)
            _tell(running, bytes([number]))
            close_at = now + INTERRUPT_SECONDS if number == signal.SIGINT else close_at
        if not exit_code and (failed := _failed(running)):
            exit_code = failed
            close_at = now
        if now >= close_at:
            _tell(running, None)
            close_at, kill_at = float("inf"), now + 4 * GRACE_SECONDS
        if now >= kill_at:
            for process in running.values():
                process.kill()
    return exit_code or _failed(running)


def _failed(running: Mapping[str, "subprocess.Popen[bytes]"]) -> int:
    """The code of a machine that failed, which is named; 0 while there is none."""
    for host, process in running.items():
        if process.returncode:
            code = process.returncode if process.returncode > 0 else 128 - process.returncode
            what = "is not reached, or lost" if code == LOST_CONNECTION else f"ended with {code}"
            sys.stderr.write(f"atoll: {host} {what}\n")
            return code
    return 0


def _tell(running: Mapping[str, "subprocess.Popen[bytes]"], word: bytes | None) -> None:
    """Send a signal's number to every machine, or with None the end."""
    for process in running.values():
        assert process.stdin is not None
        with suppress(OSError, ValueError):
            if word is None:
                process.stdin.close()
            else:
                process.stdin.write(word)
                process.stdin.flush()


def follow_stdin() -> None:
    """On such a machine: have a process of its own turn what comes by stdin into signals for us."""
    launcher = os.getpid()
    if os.fork():
        return
    die_with(launcher)
    while word := os.read(0, 1):
        os.kill(launcher, word[0])
    os.kill(launcher, signal.SIGTERM)
    time.sleep(2 * GRACE_SECONDS)
    os.kill(launcher, signal.SIGKILL)  # its ranks die with it
    os._exit(0)


def _parser() -> CommandParser:
    parser = CommandParser("over-ssh", "Start a command on machines without a scheduler, over ssh.")
    parser.add_argument("--hosts", type=Path, required=True, help="a file: one machine a line")
    parser.add_argument("--nodes", type=int, required=True, help="how many of them")
    parser.add_argument("--ranks", type=int, default=1, help="ranks on each, against slots=N")
    parser.add_argument("--port", type=int, help="port of rank 0 (default: one made up)")
    parser.add_argument("--address-suffix", default="", help="added to the first machine's name")
    for name, about in (("variable", "a variable to pass on"), ("ssh-option", "a word for ssh")):
        parser.add_argument(f"--{name}", action="append", default=[], help=about)
    return parser
