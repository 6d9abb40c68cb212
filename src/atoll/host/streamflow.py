"""`engine=streamflow`: each round is a CWL workflow, which StreamFlow carries out.

campaigns/NAME/streamflow/
  round.cwl  send.cwl  train_FACILITY.cwl  take.cwl  average.cwl   the workflow, for a person too
  streamflow.yml  inputs.yml  streamflow.log
What a step does is a verb of ours that is done once however often it is started, and files are
moved by rsync. StreamFlow starts the steps where they belong, over ssh, and again if they fail; it
has no resume, no deadline, and ends with a facility that does not answer. So each round is a run of
its own, of those facilities that answer now.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from atoll import run_dir
from atoll.errors import UserError
from atoll.host import campaign as state
from atoll.host.campaign import Held
from atoll.host.round import average
from atoll.host.site import WORK
from atoll.host.transfer import Unreachable, atoll_here, home_of, ssh
from atoll.settings.federation import Campaign, Site

CLONE = Path(__file__).resolve().parents[3]
ONE_OR_MORE = ["File", {"type": "array", "items": "File"}]
GRACE_SECONDS = 900.0  # for updates that were ready at the deadline, and are on their way


def one_round(held: Held, number: int) -> None:
    """Start StreamFlow for those that are missing and answer, until the round is settled."""
    program, folder = found_program(), held.folder / "streamflow"
    end_older(folder)
    while waiting := state.unsettled(held, number):
        homes = _answering(held, number, waiting)
        if homes:
            write(held, number, homes, everyone=len(homes) == len(waiting))
            code = carry_out(program, held, number)
            for site in [s for s in waiting if code and s.name in homes]:
                _blame(held, number, site)
        if time.time() > state.deadline(held, number):
            state.leave_out_late(held, number)
        elif state.unsettled(held, number):
            time.sleep(held.campaign.poll_seconds)
    average(held, number)


def found_program() -> str:
    """StreamFlow has an environment of its own: it needs another antlr4 than Hydra does."""
    own = CLONE / ".venv-streamflow" / "bin" / "streamflow"
    program = str(own) if own.is_file() else shutil.which("streamflow")
    if program is None:
        raise UserError(
            "engine=streamflow, and there is no StreamFlow here", "install it: make streamflow"
        )
    return program


def write(held: Held, number: int, homes: dict[str, Path | None], everyone: bool) -> None:
    """The workflow of a round, with the facilities in `homes`, each with its home folder there.

    everyone: nobody else is awaited, so the round's last step averages.
    """
    folder = held.folder / "streamflow"
    sites = [site for site in held.campaign.sites if site.name in homes]
    files = {
        "send.cwl": _our_step(held, "send", "Bring the global model to a facility, by rsync."),
        "take.cwl": _our_step(held, "take", "Fetch a facility's update, and check it."),
        "round.cwl": workflow([site.name for site in sites], everyone),
        "inputs.yml": _inputs(held, number, sites),
        "streamflow.yml": deployments(held, sites, homes),
    }
    if everyone:
        about = "The updates become the next global model."
        files["average.cwl"] = _our_step(held, "average", about)
    for site in sites:
        files[f"train_{site.name}.cwl"] = _train(held, site, homes[site.name])
    _keep_known_hosts(held, sites, folder / "home")
    for name, content in files.items():
        text = yaml.safe_dump(content, sort_keys=False, width=100)
        run_dir.write_whole(folder / name, text)


def workflow(names: list[str], everyone: bool) -> dict[str, Any]:
    """send -> train -> take for each facility, beside each other; then average."""
    steps: dict[str, Any] = {}
    for name in names:
        told = {"number": "number", "facility": f"facility_{name}"}
        steps[f"send_{name}"] = {"run": "send.cwl", "in": told, "out": ["said"]}
        steps[f"train_{name}"] = {
            "run": f"train_{name}.cwl",
            "in": {
                "asked": f"asked_{name}",
                "until": "until",
                "poll_seconds": "poll_seconds",
                "after": f"send_{name}/said",
            },
            "out": ["said"],
        }
        takes = told | {"said": f"train_{name}/said"}
        steps[f"take_{name}"] = {"run": "take.cwl", "in": takes, "out": ["done"]}
    taken = [f"take_{name}/done" for name in names]
    if everyone:
        after = {"number": "number", "after": {"source": taken}}
        steps["average"] = {"run": "average.cwl", "in": after, "out": ["done"]}
        taken = ["average/done"]
    own = {f"facility_{name}": "string" for name in names} | {f"asked_{n}": "int" for n in names}
    return {
        "cwlVersion": "v1.2",
        "class": "Workflow",
        "doc": "One round: every facility trains the global model, and the updates are averaged.",
        "requirements": {"MultipleInputFeatureRequirement": {}},
        "inputs": {"number": "int", "until": "double", "poll_seconds": "double", **own},
        "steps": steps,
        "outputs": {"done": {"type": ONE_OR_MORE, "outputSource": taken}},
    }


def _our_step(held: Held, step: str, about: str) -> dict[str, Any]:
    """A step on this machine: `atoll round FOLDER NUMBER STEP …`."""
    here = _at_home(Path.cwd(), Path.home())
    inputs: dict[str, Any] = {"number": {"type": "int", "inputBinding": {"position": 1}}}
    words = [*here, *atoll_here(), "round", str(held.folder)]
    outputs = {"said" if step == "send" else "done": "stdout"}
    if step == "average":
        inputs["after"] = ONE_OR_MORE
    else:
        inputs["facility"] = {"type": "string", "inputBinding": {"position": 3}}
    if step == "take":
        inputs["said"] = {"type": "File", "inputBinding": {"position": 4, "prefix": "--said"}}
    tool = _tool(about, words, inputs, f"{step}.txt", outputs)
    return tool | {"arguments": [{"valueFrom": step, "position": 2}]}


def _train(held: Held, site: Site, home: Path | None) -> dict[str, Any]:
    """The step at a facility: `atoll site` waits for the batch job, and says how it ended."""
    words = [*(site.command or atoll_here()), "site", site.folder]
    inputs = {
        "asked": {"type": "int", "inputBinding": {"position": 1}},
        "until": {"type": "double", "inputBinding": {"position": 2, "prefix": "--until"}},
        "poll_seconds": {
            "type": "double",
            "inputBinding": {"position": 3, "prefix": "--poll-seconds"},
        },
        "after": "File",
    }
    there = _at_home(home or Path.cwd(), home or Path.home())
    about = f"Train at {site.name}, through its own batch system."
    return _tool(about, [*there, *words], inputs, "said.json", {"said": "stdout"})


def _tool(
    about: str, words: list[str], inputs: dict[str, Any], stdout: str, outputs: dict[str, str]
) -> dict[str, Any]:
    return {
        "cwlVersion": "v1.2",
        "class": "CommandLineTool",
        "doc": about,
        "baseCommand": words,
        "inputs": inputs,
        "stdout": stdout,
        "outputs": outputs,
    }


def _at_home(folder: Path, home: Path) -> list[str]:
    """StreamFlow gives each step a HOME and TMPDIR of its own; ours are a person's."""
    return ["env", "-u", "TMPDIR", "-C", str(folder), f"HOME={home}"]


def _inputs(held: Held, number: int, sites: list[Site]) -> dict[str, Any]:
    return {
        "number": number,
        "until": state.deadline(held, number),
        "poll_seconds": held.campaign.poll_seconds,
        **{f"facility_{site.name}": site.name for site in sites},
        **{f"asked_{site.name}": state.asked_round(held, number, site) for site in sites},
    }


def deployments(held: Held, sites: list[Site], homes: dict[str, Path | None]) -> dict[str, Any]:
    """Where each step runs: ours here, each facility's at its login node over ssh."""
    folder = held.folder / "streamflow"
    here = {"deployment": "here", "workdir": str(folder / "work")}
    bindings: list[dict[str, Any]] = [{"step": "/", "target": here}]
    found: dict[str, Any] = {"here": {"type": "local", "config": {}}}
    for site in sites:
        if site.host is not None:
            found[site.name] = {
                "type": "ssh",
                "config": {"nodes": [connection(held.campaign, site.host)], "retries": 3},
            }
            work = (homes[site.name] or Path()) / site.folder / WORK
            target = {"deployment": site.name, "workdir": str(work)}
            bindings.append({"step": f"/train_{site.name}", "target": target})
    config = {"file": "round.cwl", "settings": "inputs.yml"}
    retries = {"max_retries": held.campaign.attempts, "retry_delay": 5}
    return {
        "version": "v1.0",
        "workflows": {"round": {"type": "cwl", "config": config, "bindings": bindings}},
        "deployments": found,
        "database": {"type": "sqlite", "config": {"connection": str(folder / "streamflow.db")}},
        "failureManager": {"enabled": True, "type": "rollback", "config": retries},
    }


def connection(campaign: Campaign, host: str) -> dict[str, Any]:
    """A host as ssh's own configuration has it, in StreamFlow's words."""
    told = resolved(campaign, host)
    keys = [Path(word).expanduser() for word in told.get("identityfile", [])]
    key = next((str(path) for path in keys if path.is_file()), None)
    found: dict[str, Any] = {
        "hostname": f"{told['hostname'][0]}:{told['port'][0]}",
        "username": told["user"][0],
        "checkHostKey": True,
    }
    if key is not None:
        found["sshKey"] = key
    jump = told.get("proxyjump", ["none"])[0]
    return found if jump == "none" else found | {"tunnel": connection(campaign, jump)}


def resolved(campaign: Campaign, host: str) -> dict[str, list[str]]:
    """What `ssh -G` says of a host: keyword -> values, in order."""
    done = subprocess.run([*ssh(campaign), "-G", host], capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"ssh -G {host}: {done.stderr.strip()}", "see ssh_options and ~/.ssh/config"
        )
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition(" ")
        found.setdefault(name, []).append(value)
    return found


def _keep_known_hosts(held: Held, sites: list[Site], home: Path) -> None:
    """StreamFlow looks for known hosts below HOME; it gets those that ssh knows."""
    lines: list[str] = []
    for host in [site.host for site in sites if site.host is not None]:
        told = resolved(held.campaign, host)
        values = told.get("userknownhostsfile", []) + told.get("globalknownhostsfile", [])
        for path in [Path(word).expanduser() for value in values for word in shlex.split(value)]:
            lines += path.read_text().splitlines() if path.is_file() else []
    text = "".join(f"{line}\n" for line in dict.fromkeys(lines))
    (home / ".ssh").mkdir(parents=True, exist_ok=True)
    run_dir.write_whole(home / ".ssh" / "known_hosts", text)


def carry_out(program: str, held: Held, number: int) -> int:
    """Run StreamFlow to its end; it is stopped when the deadline is long over."""
    folder = held.folder / "streamflow"
    shutil.rmtree(folder / "work", ignore_errors=True)  # it never cleans up itself
    argv = [program, "run", str(folder / "streamflow.yml"), "--outdir", str(folder / "out")]
    argv += ["--name", f"round-{number:03d}-{time.time_ns()}", "--quiet"]
    with open(folder / "streamflow.log", "ab") as log:
        process = subprocess.Popen(
            argv, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(folder / "home")}, start_new_session=True,
        )  # fmt: skip
    run_dir.write_whole(folder / "running.json", json.dumps({"pid": process.pid}))
    left = state.deadline(held, number) - time.time()
    try:
        return process.wait(timeout=max(left, 0.0) + GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return 1
    finally:
        end_older(folder)
        process.wait()


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


def _answering(held: Held, number: int, sites: list[Site]) -> dict[str, Path | None]:
    """Facility -> its home folder, of those that answer; None: on this machine."""
    found: dict[str, Path | None] = {}
    for site in sites:
        try:
            found[site.name] = home_of(held.campaign, site)
        except Unreachable as error:
            said = {"state": "unreachable", "why": error.found}
            state.remember(held, number, site, said)
    return found


def _blame(held: Held, number: int, site: Site) -> None:
    """A facility whose steps failed, each as often as StreamFlow may try, has failed once."""
    if not state.is_settled(held, number, site):
        log = held.folder / "streamflow" / "streamflow.log"
        state.count_failure(held, number, site, f"its steps failed, see {log}")
