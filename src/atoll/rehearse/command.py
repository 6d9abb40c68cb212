"""`atoll rehearse`: the same job under a facility's constraints, on the testbed of this machine."""

import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from atoll.config.compose import overrides_parser
from atoll.errors import UserError
from atoll.rehearse.mirror import MARIADB_SOCKET
from atoll.rehearse.rehearsal import rehearsed
from atoll.rehearse.rows import DIFFERS, Row
from atoll.tables import table

ABOUT = """\
Run a small job under a facility's constraints on this machine's testbed: its queues, accounts and
device names in a real Slurm, its binds, modules, node names and variables, and no network."""
# Its own network (the daemons' ports, and no way out), mounts (/etc/hosts) and processes (all of
# them end with the first).
NAMESPACES = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
LMOD = Path("/etc/profile.d/lmod.sh")  # the module command
INSIDE = "ATOLL_REHEARSAL"


def main(argv: list[str]) -> int:
    """Print the table; 1 if anything differs."""
    parser = overrides_parser("rehearse", ABOUT)
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--keep", action="store_true", help="keep the folder of the rehearsal")
    arguments = parser.read(argv)
    if INSIDE not in os.environ:
        check_testbed()
        os.environ[INSIDE] = "1"
        words = [sys.executable, "-m", "atoll", "rehearse", *argv]
        os.execvp("unshare", ["unshare", *NAMESPACES, *words])
    folder = Path(tempfile.mkdtemp(prefix="atoll-rehearsal-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        rows = rehearsed(arguments.overrides, folder)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    show(rows, arguments.json)
    return int(any(row.state == DIFFERS for row in rows))


def check_testbed() -> None:
    """Refuse where there is no testbed to rehearse on.

    Raises `UserError`.
    """
    if os.geteuid() != 0:
        raise UserError(
            "a rehearsal starts a Slurm of its own, as root", "sudo, then the same line"
        )
    programs = ("slurmctld", "slurmd", "slurmdbd", "mariadb", "unshare", "ip")
    missing = [name for name in programs if shutil.which(name) is None]
    missing += [str(path) for path in (LMOD, MARIADB_SOCKET) if not path.exists()]
    if missing:
        raise UserError(f"no testbed on this machine: no {', '.join(missing)}", "make testbed")


def show(rows: list[Row], as_json: bool) -> None:
    """A line for each row."""
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        cells = [[row.state, row.subject, row.words] for row in rows]
        print(table(["", "constraint", "what was seen"], cells))
