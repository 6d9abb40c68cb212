"""`engine=streamflow`: each round is a CWL v1.2 workflow, which StreamFlow carries out.

What a step does is an `atoll` command that is done once however often it is started, and files are
moved by rsync. StreamFlow starts them where they belong, over ssh, and again if they fail; it has
no resume, no deadline, and ends with a facility that does not answer. So each round is a run of its
own, of those facilities that answer now. It unpacks whatever a facility sends in place of a file,
so none comes through it: steps give each other numbers, and answers are asked from here.

campaigns/NAME/streamflow/
  round.cwl                       send -> train -> take for each facility, then average
  send.cwl take.cwl average.cwl   steps here; train_FACILITY.cwl: at the facility's login node
  inputs.yml streamflow.yml       the round, and where each step runs
"""

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from atoll import run_dir
from atoll.campaign.asking import collect_here
from atoll.campaign.round import at_the_seam
from atoll.campaign.site import WORK
from atoll.campaign.store import CampaignStore
from atoll.campaign.transfer import SSH_SECONDS, atoll_here, home_of, refuse_full_disk, ssh
from atoll.commands import run_command
from atoll.errors import UserError
from atoll.settings.federation import Campaign, Site

CLONE = Path(__file__).resolve().parents[3]
WAIT_SECONDS = 1800.0  # a command at a facility outlives a coordinator that is killed by no more
ALONE_SECONDS = 600.0  # of a workflow of one facility, that asks how it is and does not wait
COLLECT_SECONDS = 60.0  # that what is ready may be fetched in, where the time is over already
LATE_SECONDS = 300.0  # that a command at a facility may take to end, when its time is over
LOOK_SECONDS = 5.0
CODE = {"type": "int", "outputBinding": {"outputEval": "$(runtime.exitCode)"}}
ONE_OR_MORE = ["int", {"type": "array", "items": "int"}]


def collect(store: CampaignStore, number: int) -> None:
    """Start StreamFlow for those that are missing and answer, until the round is settled."""
    program, folder = found_program(), store.folder / "streamflow"
    deadline, grace = store.deadline(number), 60 * store.campaign.grace_minutes
    last = max(deadline, time.time()) + grace  # had once, by the workflow and by what follows it
    end_older(folder)
    while waiting := store.unsettled(number):
        homes = _answering(store, number, waiting)
        if homes:
            write(store, number, homes, everyone=len(homes) == len(waiting))
            end = deadline + grace
            late = time.time() + WAIT_SECONDS + 2 * LATE_SECONDS
            if carry_out(program, folder, number, end, late) and time.time() < end:
                _find_failing(store, number, homes, program, end)
        if time.time() > deadline:
            # once more: what is ready is not lost
            collect_here(store, number, max(last, time.time() + COLLECT_SECONDS))
        elif store.unsettled(number):
            time.sleep(store.campaign.poll_seconds)


def found_program() -> str:
    """StreamFlow has an environment of its own: it needs another antlr4 than Hydra does."""
    own = CLONE / ".venv-streamflow" / "bin" / "streamflow"
    program = str(own) if own.is_file() else shutil.which("streamflow")
    if program is None:
        raise UserError(
            "engine=streamflow, and there is no StreamFlow here", "install it: make streamflow"
        )
    return program


def carry_out(program: str, folder: Path, number: int, end: float, late: float = math.inf) -> int:
    """Run StreamFlow to its end; it is stopped at another, the deadline's grace.

    late: from then on, too, as soon as no step is under way here: a facility keeps it waiting.
    Returns its code; where it was stopped 1, or 0 if a model or an update was on its way.
    """
    shutil.rmtree(folder / "work", ignore_errors=True)  # it never cleans up itself
    argv = [program, "run", str(folder / "streamflow.yml"), "--outdir", str(folder / "out")]
    argv += ["--name", f"round-{number:03d}-{time.time_ns()}", "--quiet"]
    with open(folder / "streamflow.log", "ab") as log:
        process = subprocess.Popen(
            argv, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(folder / "home")}, start_new_session=True,
        )  # fmt: skip
    run_dir.write_whole(folder / "running.json", json.dumps({"pid": process.pid}))
    end = max(end, time.time() + COLLECT_SECONDS)
    try:
        while time.time() < min(end, late) or (time.time() < end and _has_a_step_here(process.pid)):
            with suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=LOOK_SECONDS)
        return 0 if _has_a_step_here(process.pid) else 1
    finally:
        end_older(folder)
        process.wait()


def _has_a_step_here(streamflow: int) -> bool:
    """Whether a model or an update is on its way: that takes as long as it takes."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"round" in words and os.getsid(int(process.name)) == streamflow:
                return True
    return False


def end_older(folder: Path) -> None:
    """Stop the StreamFlow of a coordinator that is gone; its steps can be started again."""
    path = folder / "running.json"
    if not path.is_file():
        return
    pid = int(json.loads(path.read_text())["pid"])
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        if str(folder / "streamflow.yml") in words:
            os.killpg(pid, signal.SIGKILL)
    path.unlink(missing_ok=True)


def _answering(store: CampaignStore, number: int, sites: list[Site]) -> dict[str, Path | None]:
    """Facility -> its home folder, of those that answer; None: on this machine."""
    homes: dict[str, Path | None] = {}

    def look(site: Site) -> None:
        if site.host is not None:
            ssh_options_of(store.campaign, site.host)
        homes[site.name] = home_of(store.campaign, site)

    with ThreadPoolExecutor(max(1, len(sites))) as pool:  # who hangs takes nobody else's time
        list(pool.map(lambda site: at_the_seam(store, number, site, partial(look, site)), sites))
    return {site.name: homes[site.name] for site in sites if site.name in homes}


def _find_failing(
    store: CampaignStore, number: int, homes: dict[str, Path | None], program: str, end: float
) -> None:
    """Ask each facility of a workflow that failed once more, alone: who fails then, has failed.

    StreamFlow ends all steps where one fails, so those of the others say nothing.
    """
    folder = store.folder / "streamflow"
    for site in [site for site in store.unsettled(number) if site.name in homes]:
        write(store, number, {site.name: homes[site.name]}, everyone=False, wait_seconds=0.0)
        code = carry_out(program, folder, number, min(end, time.time() + ALONE_SECONDS))
        if code and not store.state(number, site).settled:
            refuse_full_disk(folder)  # here, which is nobody's failure
            log = folder / "streamflow.log"
            store.count_failure(number, site, f"its steps failed, see {log}")


def write(
    store: CampaignStore,
    number: int,
    homes: dict[str, Path | None],
    everyone: bool,
    wait_seconds: float = WAIT_SECONDS,
) -> None:
    """The workflow of a round, with the facilities in `homes`, each with its home folder there.

    everyone: nobody else is awaited, so the round's last step averages. wait_seconds: at most, of a
    facility for its job.
    """
    folder = store.folder / "streamflow"
    sites = [site for site in store.campaign.sites if site.name in homes]
    files = {
        "send.cwl": _step_here(store, "send", "Bring the global model to a facility, by rsync."),
        "take.cwl": _step_here(store, "take", "Fetch a facility's update, and check it."),
        "round.cwl": workflow_of([site.name for site in sites], everyone),
        "inputs.yml": _inputs(store, number, sites, wait_seconds),
        "streamflow.yml": deployments(store, sites, homes),
    }
    if everyone:
        about = "The updates become the next global model."
        files["average.cwl"] = _step_here(store, "average", about)
    for site in sites:
        files[f"train_{site.name}.cwl"] = _step_there(site, homes[site.name], wait_seconds)
    _keep_known_hosts(store.campaign, sites, folder / "home" / ".ssh" / "known_hosts")
    for name, content in files.items():
        text = yaml.safe_dump(content, sort_keys=False, width=100)
        run_dir.write_whole(folder / name, text)


def workflow_of(names: list[str], everyone: bool) -> dict[str, Any]:
    """send -> train -> take for each facility, beside each other; then average."""
    steps: dict[str, Any] = {}
    inputs: dict[str, str] = {"number": "int", "until": "double", "poll_seconds": "double"}
    for name in names:
        inputs |= {f"facility_{name}": "string", f"asked_{name}": "int"}
        which = {"number": "number", "facility": f"facility_{name}"}
        training = {"asked": f"asked_{name}", "until": "until", "poll_seconds": "poll_seconds"}
        training["after"] = f"send_{name}/done"
        taking = which | {"after": f"train_{name}/done"}
        steps[f"send_{name}"] = {"run": "send.cwl", "in": which, "out": ["done"]}
        steps[f"train_{name}"] = {"run": f"train_{name}.cwl", "in": training, "out": ["done"]}
        steps[f"take_{name}"] = {"run": "take.cwl", "in": taking, "out": ["done"]}
    last = [f"take_{name}/done" for name in names]
    if everyone:
        after = {"number": "number", "after": {"source": last}}
        steps["average"] = {"run": "average.cwl", "in": after, "out": ["done"]}
        last = ["average/done"]
    return {
        "cwlVersion": "v1.2",
        "class": "Workflow",
        "doc": "One round: every facility trains the global model, and the updates are averaged.",
        "requirements": {"MultipleInputFeatureRequirement": {}},
        "inputs": inputs,
        "steps": steps,
        "outputs": {"done": {"type": ONE_OR_MORE, "outputSource": last}},
    }


def _step_here(store: CampaignStore, step: str, about: str) -> dict[str, Any]:
    """A step on this machine: `atoll round FOLDER NUMBER STEP …`."""
    words = [*_at_home(Path.cwd(), Path.home()), *atoll_here(), "round", str(store.folder)]
    inputs: dict[str, Any] = {"number": _input("int", 1)}
    if step == "average":
        inputs["after"] = ONE_OR_MORE
    else:
        inputs["facility"] = _input("string", 3)
    if step == "take":
        inputs["after"] = "int"
    tool = _tool(about, words, inputs)
    return tool | {"arguments": [{"valueFrom": step, "position": 2}]}


def _step_there(site: Site, home: Path | None, wait_seconds: float) -> dict[str, Any]:
    """The step at a facility: `atoll site` waits for the batch job.

    Whatever code it ends with: how its job ended is asked here, and counted to it alone. One that
    hangs is ended there, so that the others are asked again.
    """
    words = _at_home(home or Path.cwd(), home or Path.home())
    words += ["timeout", "-k", "30", str(round(wait_seconds + LATE_SECONDS))]
    words += [*(site.command or atoll_here()), "site", site.folder]
    inputs = {
        "asked": _input("int", 1),
        "until": _input("double", 2, "--until"),
        "poll_seconds": _input("double", 3, "--poll-seconds"),
        "after": "int",
    }
    tool = _tool(f"Train at {site.name}, through its own batch system.", words, inputs)
    return tool | {"successCodes": list(range(256))}


def _tool(about: str, words: list[str], inputs: dict[str, Any]) -> dict[str, Any]:
    """A command; what it prints stays where it runs."""
    return {
        "cwlVersion": "v1.2",
        "class": "CommandLineTool",
        "doc": about,
        "baseCommand": words,
        "inputs": inputs,
        "stdout": "printed.txt",
        "outputs": {"done": CODE},
    }


def _input(kind: str, position: int, prefix: str | None = None) -> dict[str, Any]:
    binding = {"position": position} | ({} if prefix is None else {"prefix": prefix})
    return {"type": kind, "inputBinding": binding}


def _at_home(folder: Path, home: Path) -> list[str]:
    """StreamFlow gives each step a HOME and TMPDIR of its own; ours are a person's."""
    return ["env", "-u", "TMPDIR", "-C", str(folder), f"HOME={home}"]


def _inputs(
    store: CampaignStore, number: int, sites: list[Site], wait_seconds: float
) -> dict[str, Any]:
    return {
        "number": number,
        "until": min(store.deadline(number), time.time() + wait_seconds),
        "poll_seconds": store.campaign.poll_seconds,
        **{f"facility_{site.name}": site.name for site in sites},
        **{f"asked_{site.name}": store.asked_round(number, site) for site in sites},
    }


def deployments(
    store: CampaignStore, sites: list[Site], homes: dict[str, Path | None]
) -> dict[str, Any]:
    """Where each step runs: ours here, each facility's at its login node over ssh."""
    folder = store.folder / "streamflow"
    places: dict[str, Any] = {"here": {"type": "local", "config": {}}}
    work = {"/": ("here", folder / "work")}
    for site in [site for site in sites if site.host is not None]:
        node = connection(store.campaign, str(site.host))
        places[site.name] = {"type": "ssh", "config": {"nodes": [node], "retries": 3}}
        there = (homes[site.name] or Path()) / site.folder / WORK
        work[f"/train_{site.name}"] = (site.name, there)
    bindings = [
        {"step": step, "target": {"deployment": place, "workdir": str(path)}}
        for step, (place, path) in work.items()
    ]
    config = {"file": "round.cwl", "settings": "inputs.yml"}
    retries = {"max_retries": store.campaign.attempts, "retry_delay": 5}
    return {
        "version": "v1.0",
        "workflows": {"round": {"type": "cwl", "config": config, "bindings": bindings}},
        "deployments": places,
        "database": {"type": "sqlite", "config": {"connection": str(folder / "streamflow.db")}},
        "failureManager": {"enabled": True, "type": "rollback", "config": retries},
    }


def connection(campaign: Campaign, host: str) -> dict[str, Any]:
    """A host as ssh's own configuration has it, in StreamFlow's words."""
    options = ssh_options_of(campaign, host)
    keys = [Path(word).expanduser() for word in options.get("identityfile", [])]
    node: dict[str, Any] = {
        "hostname": f"{options['hostname'][0]}:{options['port'][0]}",
        "username": options["user"][0],
        "checkHostKey": True,
    }
    for key in [path for path in keys if path.is_file()][:1]:
        node["sshKey"] = str(key)
    jump = options.get("proxyjump", ["none"])[0]
    return node if jump == "none" else node | {"tunnel": connection(campaign, jump)}


def ssh_options_of(campaign: Campaign, host: str) -> dict[str, list[str]]:
    """What `ssh -G` says of a host: keyword -> values, in order."""
    done = run_command([*ssh(campaign), "-G", "--", host], timeout_seconds=SSH_SECONDS)
    if done.returncode:
        raise UserError(f"ssh -G {host}: {done.last_line}", "see ssh_options and ~/.ssh/config")
    options: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition(" ")
        options.setdefault(name, []).append(value)
    return options


def _keep_known_hosts(campaign: Campaign, sites: list[Site], into: Path) -> None:
    """StreamFlow looks for known hosts below HOME; it gets those that ssh knows."""
    lines: list[str] = []
    for host in [site.host for site in sites if site.host is not None]:
        options = ssh_options_of(campaign, host)
        values = options.get("userknownhostsfile", []) + options.get("globalknownhostsfile", [])
        for path in [Path(word).expanduser() for value in values for word in shlex.split(value)]:
            lines += path.read_text().splitlines() if path.is_file() else []
    run_dir.write_whole(into, "".join(f"{line}\n" for line in dict.fromkeys(lines)))
