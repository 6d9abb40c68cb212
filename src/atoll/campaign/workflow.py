"""A round as a CWL v1.2 workflow, and streamflow.yml: files for StreamFlow, and for a person.

round.cwl                       send -> train -> take for each facility, then average
send.cwl take.cwl average.cwl   steps here; train_FACILITY.cwl: at the facility's login node
inputs.yml streamflow.yml       the round, and where each step runs
Files of a campaign are moved by our own steps, through rsync; StreamFlow carries their words alone.
"""

import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml

from atoll import run_dir
from atoll.campaign import store as state
from atoll.campaign.site import WORK
from atoll.campaign.store import CampaignStore
from atoll.campaign.transfer import atoll_here, ssh
from atoll.errors import UserError
from atoll.settings.federation import Campaign, Site

WAIT_SECONDS = 1800.0  # a verb at a facility outlives a coordinator that is killed by no more
ONE_OR_MORE = ["File", {"type": "array", "items": "File"}]


def write(held: CampaignStore, number: int, homes: dict[str, Path | None], everyone: bool) -> None:
    """The workflow of a round, with the facilities in `homes`, each with its home folder there.

    everyone: nobody else is awaited, so the round's last step averages.
    """
    folder = held.folder / "streamflow"
    sites = [site for site in held.campaign.sites if site.name in homes]
    files = {
        "send.cwl": _our_step(held, "send", "Bring the global model to a facility, by rsync."),
        "take.cwl": _our_step(held, "take", "Fetch a facility's update, and check it."),
        "round.cwl": round_of([site.name for site in sites], everyone),
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


def round_of(names: list[str], everyone: bool) -> dict[str, Any]:
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


def _our_step(held: CampaignStore, step: str, about: str) -> dict[str, Any]:
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


def _train(held: CampaignStore, site: Site, home: Path | None) -> dict[str, Any]:
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


def _inputs(held: CampaignStore, number: int, sites: list[Site]) -> dict[str, Any]:
    return {
        "number": number,
        "until": min(state.deadline(held, number), time.time() + WAIT_SECONDS),
        "poll_seconds": held.campaign.poll_seconds,
        **{f"facility_{site.name}": site.name for site in sites},
        **{f"asked_{site.name}": state.asked_round(held, number, site) for site in sites},
    }


def deployments(
    held: CampaignStore, sites: list[Site], homes: dict[str, Path | None]
) -> dict[str, Any]:
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


def _keep_known_hosts(held: CampaignStore, sites: list[Site], home: Path) -> None:
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
