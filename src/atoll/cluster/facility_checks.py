"""What a login node can say of a facility: one function for each question, each with its hint."""

import getpass
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.cluster import limits
from atoll.cluster.hub_names import hub_cache, hub_home, hub_names, is_cached
from atoll.cluster.scheduler import answer_lines
from atoll.commands import run_command
from atoll.config import certificate
from atoll.errors import UserError
from atoll.images.build import container_runtime, made_of_others
from atoll.images.check import check_image
from atoll.settings import Run

OK, UNKNOWN, WRONG = "ok", "unknown", "wrong"
LEAST_FREE_GIB = 1.0
PLUGIN_HINT = "facility.network.plugin=FILE, built there as docs/facilities.md says"
# How sinfo and qstat refuse a name; any other failure is their own.
NOT_KNOWN = ("invalid partition", "unknown queue", "invalid queue")


@dataclass(frozen=True)
class Finding:
    """One answer: ok, unknown or wrong; and how to fix what is not ok."""

    state: str
    subject: str
    found: str
    hint: str = ""


Question = Callable[[Run, Mapping[str, str]], Iterator[Finding]]


def runtime(run: Run, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Apptainer or SingularityCE, and its version."""
    if run.image.args_file is None and run.image.file is None:
        yield Finding(OK, "container", "none is used: image=none")
        return
    # some facilities have it on the nodes only, as a module
    state = UNKNOWN if run.facility.modules.load else WRONG
    name = run.facility.container
    try:
        found = container_runtime(environment)
    except UserError as error:
        yield Finding(state, "container", error.found, error.hint)
        return
    if shutil.which(name, path=environment.get("PATH")) is None:
        yield Finding(state, "container", f"no {name} here", f"facility.container={found}")
        return
    version = answer_lines([name, "--version"], environment)
    yield Finding(OK, "container", version[0] if version else name)


def fuse(run: Run, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Images are mounted through FUSE unless the runtime is installed with setuid."""
    device = Path("/dev/fuse")
    if run.image.args_file is None and run.image.file is None:
        return
    if os.access(device, os.R_OK | os.W_OK):
        yield Finding(OK, "fuse", "/dev/fuse can be read and written")
    else:
        there = "cannot be read and written" if device.exists() else "is not there"
        hint = "ask the administrators: chmod a+rw /dev/fuse, or a setuid installation"
        yield Finding(UNKNOWN, "fuse", f"/dev/fuse {there}", hint)


def image(run: Run, environment: Mapping[str, str]) -> Iterator[Finding]:
    """The image file, for the nodes' architecture."""
    if run.image.file is None:
        return
    yield _checked("image", str(run.image.file), check_image, run)
    if older := made_of_others(run):
        found, _, hint = older.rpartition(": ")
        yield Finding(UNKNOWN, "image", found, hint)


def node(run: Run, environment: Mapping[str, str]) -> Iterator[Finding]:
    """What the facility says of its nodes, and what the image was built for."""
    stated, image = run.facility.node, run.image
    if stated.device == "cpu":
        return
    wanted = ("device_memory_gib", "cores", "memory_gib", "compute_capability")
    for name in (name for name in wanted if getattr(stated, name) is None):
        yield Finding(UNKNOWN, "node", f"{name} is not stated", f"facility.node.{name}=VALUE")
    if stated.compute_capability and image.capabilities:
        found = (
            f"{stated.compute_capability}; image={image.name} has {' '.join(image.capabilities)}"
        )
        yield Finding(OK, "devices", found)  # what does not fit was refused when composing


def measured(run: Run, environment: Mapping[str, str]) -> Iterator[Finding]:
    """What a doctor's job found earlier, against what the facility states."""
    yield Finding(OK, "hardware", certificate.origin(run))
    for setting, values in certificate.contradictions(run):
        yield Finding(WRONG, "hardware", f"{setting}: {values}", f"{setting}=VALUE, or ask for it")


def network(run: Run, environment: Mapping[str, str]) -> Iterator[Finding]:
    """What carries messages between nodes: NCCL and RCCL reach Slingshot by a plugin alone."""
    stated, brought = run.facility.network, run.image.network_plugins
    if run.facility.node.device == "cpu" or stated.fabric is None:
        return
    if stated.plugin is not None:
        seen = stated.plugin.is_file()
        where = "" if seen else " is not seen here: a job says whether nodes see it"
        yield Finding(
            OK if seen else UNKNOWN, "network", f"{stated.fabric}, {stated.plugin}{where}"
        )
    elif lacks_plugin(run):
        found = f"neither the facility nor image={run.image.name} has a plugin for {stated.fabric}"
        yield Finding(UNKNOWN, "network", found, PLUGIN_HINT)
    else:
        yield Finding(OK, "network", ", ".join([stated.fabric, *brought]))


def lacks_plugin(run: Run) -> bool:
    """Whether nothing that is stated brings what its fabric needs; a module there may."""
    network = run.facility.network
    on_fabric = network.fabric == "slingshot" and run.facility.node.device != "cpu"
    return on_fabric and network.plugin is None and not run.image.network_plugins


def unknown_network(run: Run) -> str:
    """One line for a job that may end at its start, since its nodes would talk over TCP."""
    if run.nodes == 1 or not lacks_plugin(run):
        return ""
    [finding] = network(run, {})
    fabric = run.facility.network.fabric
    return f"whether nodes talk over {fabric} is not known: {finding.found}; {finding.hint}\n"


def folders(run: Run, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Each folder that is written to can be written, and has room."""
    unwritten = {"bundle", "caches"}
    if run.image.file is None or run.image.file.exists():
        unwritten.add("images")  # of which others' clone may be only to be read
    for setting, folder in run.folders:
        if setting in unwritten:
            continue
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        free_gib = shutil.disk_usage(nearest).free / 2**30
        found = f"{folder}, {free_gib:.1f} GiB free"
        if not os.access(nearest, os.W_OK):
            hint = f"folders.{setting}=FOLDER, in hydra_conf/local/default.yaml"
            yield Finding(WRONG, setting, f"{nearest} cannot be written", hint)
        elif free_gib < LEAST_FREE_GIB:
            yield Finding(WRONG, setting, found, f"free some space, or folders.{setting}=FOLDER")
        else:
            yield Finding(OK, setting, found)


def facility_limits(run: Run, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Nodes and time against what the facility states."""
    yield _checked("support", run.image.name, limits.check_supported, run)
    yield _checked("nodes", str(run.nodes), limits.check_nodes, run)
    if run.facility.scheduler != "none":
        found = f"{run.facility.walltime_minutes} minutes"
        yield _checked("time limit", found, limits.check_time, run)


def account(run: Run, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Account and QoS as Slurm's accounting knows this user."""
    facility = run.facility
    if facility.limits.needs_account and not facility.account:
        yield _checked("account", "none", limits.check_account, run)
    if facility.scheduler != "slurm" or not facility.account:
        return
    show = ["sacctmgr", "--noheader", "--parsable2", "show", "associations"]
    form = "format=account,qos,partition"
    lines = answer_lines([*show, f"user={getpass.getuser()}", form], environment)
    if not lines:
        yield Finding(UNKNOWN, "account", "sacctmgr does not say which accounts are yours")
        return
    associations = [line.split("|") for line in lines]
    name = facility.account.lower()  # Slurm keeps accounts in lower case, and takes either
    own = [line for line in associations if line[0].lower() == name]
    if not own:
        hint = f"facility.account=NAME, one of: {_listed(line[0] for line in associations)}"
        yield Finding(WRONG, "account", f"{facility.account} is not yours", hint)
        return
    partition = facility.submit.get("partition")  # an association without one is for all
    here = [line for line in own if partition is None or line[2] in ("", str(partition))]
    if not here:
        found = f"{facility.account} may not use the partition {partition}"
        hint = f"facility.submit.partition=NAME, one of: {_listed(line[2] for line in own)}"
        yield Finding(WRONG, "account", found, hint)
        return
    yield Finding(OK, "account", str(facility.account))
    if facility.submit.get("qos") is not None:
        yield _qos(
            str(facility.submit["qos"]), {qos for line in here for qos in line[1].split(",")}
        )


def _qos(qos: str, allowed: set[str]) -> Finding:
    if qos in allowed:
        return Finding(OK, "qos", qos)
    return Finding(WRONG, "qos", qos, f"facility.submit.qos=NAME, one of: {_listed(allowed)}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))


def partition(run: Run, environment: Mapping[str, str]) -> Iterator[Finding]:
    """The partition or queue, as the scheduler shows it."""
    scheduler = run.facility.scheduler
    if scheduler == "none":
        return
    flag = "partition" if scheduler == "slurm" else "q"
    name = run.facility.submit.get(flag)
    if name is None:
        yield Finding(OK, flag, "the scheduler's default")
        return
    show = {
        "slurm": ["sinfo", "--noheader", f"--partition={name}", "--format=%a %l %D nodes"],
        "pbs": ["qstat", "-Q", str(name)],
    }
    if shutil.which(show[scheduler][0], path=environment.get("PATH")) is None:
        hint = "ask again on a login node of the facility"
        yield Finding(UNKNOWN, flag, f"no {show[scheduler][0]} here to ask about {name}", hint)
        return
    done = run_command(show[scheduler], environment=environment)
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0 and not any(word in done.last_line.lower() for word in NOT_KNOWN):
        yield Finding(UNKNOWN, flag, f"{show[scheduler][0]}: {done.last_line}", "ask again later")
        return
    hint = f"facility.submit.{flag}=NAME; {show[scheduler][0]} lists them"
    is_known = bool(lines) and done.returncode == 0
    found = f"{name}: {lines[-1]}" if is_known else f"{name} is not known to the scheduler"
    yield Finding(OK if is_known else WRONG, flag, found, "" if is_known else hint)


def offline(run: Run, environment: Mapping[str, str]) -> Iterator[Finding]:
    """What has a name of the hub must be in a cache that the nodes see, or the nodes be online."""
    home, cache = hub_home(run, environment), hub_cache(run, environment)
    hub = list(hub_names(run))
    own = [path for path in (*run.folders.caches.values(), Path.home()) if path.is_dir()]
    if run.image.file is not None and not any(cache.is_relative_to(path) for path in own):
        hint = f"folders.caches.HF_HOME={home}, or make the folder: a job then binds it"
        yield Finding(UNKNOWN, "hub cache", f"{cache} is not bound into the container", hint)
    for each in hub:
        if is_cached(each, run, environment):
            yield Finding(OK, "hub cache", f"{each.name} is in {cache}")
        else:
            hint = (
                "atoll prepare --into BUNDLE … where there is a network, then folders.bundle=BUNDLE"
            )
            verdict = WRONG if run.facility.node_network is False else UNKNOWN
            yield Finding(verdict, "hub cache", f"{each.name} is not in {cache}", hint)
    if hub:
        token = "HF_TOKEN" in environment or (home / "token").exists()
        found = "a token is set (its value is never shown)" if token else "no token is set"
        taken = ", and facility.submit.v=HF_TOKEN" if run.facility.scheduler == "pbs" else ""
        needed = f"gated names need one: export HF_TOKEN in the shell that submits{taken}"
        hint = "" if token else needed
        yield Finding(OK if token else UNKNOWN, "hub token", found, hint)


QUESTIONS: tuple[Question, ...] = (
    runtime,
    fuse,
    image,
    node,
    measured,
    network,
    folders,
    facility_limits,
    account,
    partition,
    offline,
)


def all_findings(run: Run, environment: Mapping[str, str]) -> list[Finding]:
    """Ask every question."""
    return [finding for ask in QUESTIONS for finding in ask(run, environment)]


def _checked(subject: str, found: str, check: Callable[[Run], None], run: Run) -> Finding:
    try:
        check(run)
    except UserError as error:
        return Finding(WRONG, subject, error.found, error.hint)
    return Finding(OK, subject, found)
