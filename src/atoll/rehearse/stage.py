"""Stand-ins, below one folder, for what a facility has and this machine has not."""

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from atoll.commands import run_command
from atoll.errors import UserError
from atoll.settings.machine import Facility, Modules

# Slurm looks for an address that is not the loopback's before it listens (AI_ADDRCONFIG).
OWN_ADDRESS = "10.255.255.1/32"
FILE_NAME = ".so"
MODULE_FILE = "#%Module1.0\nprepend-path PATH {programs}\n"
# PALS's mpiexec knows flags that MPICH's does not; the variables are those it leaves in a task.
MPIEXEC = """\
#!/bin/bash
# Stands for PALS's mpiexec: its flags are read, its variables given, and MPICH starts the ranks.
words=()
while [[ ${{1:-}} == -* ]]; do
    case $1 in
        -n | --np | -np) words+=(-n "$2"); shift 2 ;;
        --ppn | -ppn) words+=(-ppn "$2"); shift 2 ;;
        --cpu-bind | --hostfile | --depth | -d | --mem-bind | --gpu-bind) shift 2 ;;
        --env) export "${{2?}}"; shift 2 ;;
        --line-buffer | --no-vni | --cpu-bind=* | --gpu-bind=*) shift ;;
        *) printf 'mpiexec: unknown flag %s\\n' "$1" >&2; exit 2 ;;
    esac
done
export PBS_NODEFILE={node_file} PBS_ENVIRONMENT=PBS_BATCH PALS_APID=rehearsal
exec {mpiexec} "${{words[@]}}" bash -c \\
    'export PALS_RANKID=$PMI_RANK PALS_LOCAL_RANKID=$MPI_LOCALRANKID; exec "$@"' pals "$@"
"""


@dataclass(frozen=True)
class Stage:
    """The folder of a rehearsal."""

    folder: Path

    @property
    def slurm(self) -> Path:
        return self.folder / "slurm"

    @property
    def modules(self) -> Path:
        return self.folder / "modulefiles"

    @property
    def programs(self) -> Path:
        return self.folder / "bin"

    def environment(self) -> dict[str, str]:
        """What programs on the rehearsed login node find in their environment."""
        return {
            **os.environ,
            "SLURM_CONF": str(self.slurm / "slurm.conf"),
            "MODULEPATH": str(self.modules),
            "PATH": f"{self.programs}:{os.environ['PATH']}",
        }

    def stand_in(self, path: str) -> Path:
        """An empty folder, or file, in place of a path of the facility."""
        place = self.folder / "facility" / path.lstrip("/")
        if FILE_NAME in place.name:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        else:
            place.mkdir(parents=True, exist_ok=True)
        return place

    def bind(self, bind: str) -> str:
        """A facility's bind with a stand-in as its source."""
        source, _, rest = bind.partition(":")
        return f"{self.stand_in(source)}:{rest or source}"

    def stand_ins(self, facility: Facility) -> list[str]:
        """The settings by which a run finds the stand-ins of its facility's paths."""
        network, use = facility.network, facility.modules.use
        plugin = [] if network.plugin is None else [str(self.stand_in(str(network.plugin)))]
        own = [] if facility.node_folder is None else [str(facility.node_folder)]
        lists = {
            "binds": [self.bind(bind) for bind in (*facility.binds, *own)],
            "modules.use": [str(self.stand_in(folder)) for folder in use],
            "network.libraries": [str(self.stand_in(folder)) for folder in network.libraries],
        }
        words = [f"facility.{name}=[{','.join(paths)}]" for name, paths in lists.items()]
        words += ["facility.node_folder=null"] if own else []
        return [*words, *(f"facility.network.plugin={path}" for path in plugin)]

    def write_modules(self, modules: Modules) -> None:
        """A module file for each name, in the older syntax that all module systems read.

        They are found in the last folder that the job is told to use, if there is one.
        """
        folders = [self.modules, *(self.stand_in(folder) for folder in modules.use)]
        self.modules.mkdir(exist_ok=True)
        for name in modules.load:
            file = folders[-1] / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(MODULE_FILE.format(programs=self.programs))

    def write_programs(self, container: str, node_lines: list[str], mpiexec: str | None) -> None:
        """The container's command under the facility's name; PALS's mpiexec."""
        self.programs.mkdir(exist_ok=True)
        runtime = run_command(["which", "apptainer"]).stdout.strip()
        if runtime and container != "apptainer":
            (self.programs / container).symlink_to(runtime)
        if mpiexec:
            node_file = self.folder / "nodes"
            node_file.write_text("".join(f"{line}\n" for line in node_lines))
            script = self.programs / "mpiexec"
            quoted = shlex.quote(str(node_file))
            script.write_text(MPIEXEC.format(node_file=quoted, mpiexec=shlex.quote(mpiexec)))
            script.chmod(0o755)

    def open_loopback(self) -> None:
        """The only network there is."""
        run_command(["ip", "link", "set", "lo", "up"])
        run_command(["ip", "address", "add", OWN_ADDRESS, "dev", "lo"])

    def name_hosts(self, hosts: Iterable[str], suffix: str) -> None:
        """Let each host, and its name on the fast network, lead to this machine; here alone."""
        names = [form for host in hosts for form in (host, host.split(".")[0] + suffix)]
        known = Path("/etc/hosts").read_text()
        file = self.folder / "hosts"
        file.write_text(f"{known}\n127.0.0.1 localhost {' '.join(dict.fromkeys(names))}\n")
        mount = run_command(["mount", "--bind", str(file), "/etc/hosts"])
        if mount.returncode != 0:
            raise UserError(
                f"/etc/hosts cannot be laid over: {mount.last_line}", "rehearse as root"
            )
