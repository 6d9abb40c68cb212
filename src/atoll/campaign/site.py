"""`atoll site FOLDER`: one round at one facility, a step further each time it is asked.

FOLDER (the campaign, at the facility)/
  incoming/round-000/        the first global model, whole; of later rounds the difference alone
  bases/round-000/           the global model a round begins from; bit for bit the coordinator's
  rounds/round-001/          request.json, job.json, update/, left/
  runs/ prepared/ tokenizer/
  .streamflow/               scratch of the workflow system, emptied each round
Everything is decided by which files are whole, so asking twice does nothing twice.
"""

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.signing import sign
from atoll.campaign.transfer import atoll_here
from atoll.cluster.launchers import atoll_command
from atoll.cluster.status import status
from atoll.config.compose import compose
from atoll.errors import UserError
from atoll.settings import Run

ANOTHER_IS_AT_IT = "is running already"
WORK = ".streamflow"
WAITING = (
    "queued",
    "running",
    "retry",
    "unknown",
)  # answers that come to another one by themselves


def main(argv: list[str]) -> int:
    """Go on with a round, and print where it stands as JSON."""
    parser = argparse.ArgumentParser(prog="atoll site", description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("round", type=int)
    parser.add_argument("--request", help="JSON; the first time a round is asked for")
    parser.add_argument("--receive", action="store_true", help="stop when the models are here")
    parser.add_argument("--until", type=float, default=0.0, help="wait for the job up to this time")
    parser.add_argument("--poll-seconds", type=float, default=30.0)
    arguments = parser.parse_args(argv)
    folder, number = arguments.folder.absolute(), arguments.round
    if arguments.request is not None:
        _take_request(folder, number, arguments.request)
    if arguments.receive:
        shutil.rmtree(folder / WORK, ignore_errors=True)
    answer = wait if arguments.until else advance
    print(json.dumps(answer(folder, number, arguments)))
    return 0


def round_name(number: int) -> str:
    return f"round-{number:03d}"


def wait(folder: Path, number: int, how: argparse.Namespace) -> dict[str, Any]:
    """Ask until the job has ended or the time is over; what is refused is an answer too."""
    try:
        said = advance(folder, number, how)
        while said["state"] in WAITING and time.time() < how.until:
            time.sleep(how.poll_seconds)
            said = advance(folder, number, how)
    except UserError as error:
        said = {"state": "refused", "why": error.found}
    return said


def advance(folder: Path, number: int, how: argparse.Namespace) -> dict[str, Any]:
    """Do the next thing of a round that can be done now; say where it stands."""
    here = folder / "rounds" / round_name(number)
    if (here / "update" / "manifest.json").is_file():
        return {"state": "ready", **_told(here)}
    request = _request(here)
    with open(here / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return {"state": "running", "why": "another `atoll site` is at it"}
        return _advance(folder, number, request, how.receive)


def _advance(
    folder: Path, number: int, request: dict[str, Any], only_receive: bool
) -> dict[str, Any]:
    here = folder / "rounds" / round_name(number)
    have = _make_bases(folder, number)
    if have < number - 1:
        return {"state": "needs", "have": have}
    base = folder / "bases" / round_name(number - 1)
    _refuse_wrong_base(base, request)
    if only_receive:
        return {"state": "received"}
    run = _run_of(folder, number, request, base)
    state, why = _submitted(here, run, request)
    if state != "finished":
        return {"state": state, "why": why}
    _make_update(folder, here, run, request, base)
    return {"state": "ready", **_told(here)}


def _take_request(folder: Path, number: int, text: str) -> None:
    """Keep what the coordinator asks; the same round is never asked twice differently."""
    path = folder / "rounds" / round_name(number) / "request.json"
    asked = json.loads(text)
    before = json.loads(path.read_text()) if path.is_file() else asked
    for name in asked:
        if name != "attempts" and before.get(name) != asked[name]:
            raise UserError(
                f"{path} has {name}={before.get(name)}, and now {asked[name]} is asked for",
                "give the campaign another name=, or another folder at the facility",
            )
    if not path.is_file() or before != asked:
        run_dir.write_whole(path, json.dumps(asked, indent=1))


def _request(here: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((here / "request.json").read_text())
    except OSError:
        raise UserError(f"{here} was never asked for", "give --request") from None
    return found


def _make_bases(folder: Path, number: int) -> int:
    """The number of the newest global model that is here, up to the one this round needs; -1: none.

    Differences that have arrived are added, one after the other.
    """
    have = _newest(folder, number)
    for before in range(have + 1, number):
        came = folder / "incoming" / round_name(before)
        if not (came / "manifest.json").is_file():
            break
        _apply_delta(folder, before, came, folder / "bases" / round_name(before))
        have = before
    for old in range(have - 1):  # the one before the newest stays, should a round be done again
        shutil.rmtree(folder / "bases" / round_name(old), ignore_errors=True)
        shutil.rmtree(folder / "incoming" / round_name(old), ignore_errors=True)
    return have


def _newest(folder: Path, number: int) -> int:
    whole = [
        before
        for before in range(number)
        if (folder / "bases" / round_name(before) / "manifest.json").is_file()
    ]
    return whole[-1] if whole else -1


def _apply_delta(folder: Path, before: int, came: Path, base: Path) -> None:
    argv = [*_container_side(folder), "apply-delta", str(came), str(base)]
    if before:
        argv += ["--base", str(folder / "bases" / round_name(before - 1))]
    _call(argv, f"the global model of round {before}")


def _container_side(folder: Path) -> list[str]:
    """Atoll where there is torch: in the image that the runs use, or here."""
    requests = sorted((folder / "rounds").glob("*/request.json"))
    overrides = json.loads(requests[-1].read_text())["overrides"]
    own = [f"folders.runs={folder / 'runs'}", f"model.source={folder}", "name=site"]
    run = compose([*overrides, *own]).run
    bound = run.model_copy(update={"folders": run.folders.model_copy(update={"prepared": folder})})
    return atoll_command(bound)


def _refuse_wrong_base(base: Path, request: dict[str, Any]) -> None:
    found = json.loads((base / "manifest.json").read_text())["digest"]
    if found != request["base"]:
        raise UserError(
            f"the global model here is {found[:12]}, the coordinator's is {request['base'][:12]}",
            f"delete {base.parent} and its incoming/: the model is sent again",
        )


def _run_of(folder: Path, number: int, request: dict[str, Any], base: Path) -> Run:
    """The facility's run of this round; its name is the same whenever it is asked."""
    tokenizer = folder / "tokenizer"
    if not tokenizer.is_dir():
        partial = folder / f".tokenizer.{os.getpid()}"
        shutil.copytree(base / "export", partial, ignore=shutil.ignore_patterns("*.safetensors*"))
        partial.rename(tokenizer)
    own = {
        "name": f"{request['campaign']}-{round_name(number)}-{request['facility']}",
        "model.source": base / "export",
        "tokenizer.path": tokenizer,
        "folders.runs": folder / "runs",
        "folders.prepared": folder / "prepared",
        "export.dtype": "float32",
        "generation.prompt": "null",
    }
    lines = [*request["overrides"], *(f"{name}={value}" for name, value in own.items())]
    return compose(lines).run


def _submitted(here: Path, run: Run, request: dict[str, Any]) -> tuple[str, str]:
    """State of the round's job, submitted if it was not; one that failed is tried again."""
    folder, log = run_dir.folder(run), here / "job.json"
    job: dict[str, Any] = json.loads(log.read_text()) if log.is_file() else {"attempts": 0}
    if run_dir.settings_file(folder).is_file():
        state, why = status(folder)
        if state in ("queued", "running", "finished", "unknown"):
            return state, why
        if run.facility.scheduler == "none" and job["attempts"] == 0:
            job["attempts"] = 1  # it was started here, and whoever started it is gone
    if job["attempts"] >= request["attempts"]:
        return "failed", f"{job['attempts']} attempts: {job.get('why', '')}"
    job |= {"attempts": job["attempts"] + 1, "submitted": time.time(), "run": str(folder)}
    run_dir.write_whole(log, json.dumps(job, indent=1))
    done = subprocess.run(
        [*atoll_here(), "submit", *request["overrides"], *_own_lines(run)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        job["why"] = _reason(done.stderr)
        run_dir.write_whole(log, json.dumps(job, indent=1))
        state = "running" if ANOTHER_IS_AT_IT in done.stderr else "retry"
        return state, str(job["why"])
    state, why = status(folder)
    return "retry" if state == "failed" else state, why  # the next question submits it again


def _own_lines(run: Run) -> list[str]:
    return [
        f"name={run.name}",
        f"model.source={run.model.source}",
        f"tokenizer.path={run.tokenizer.path}",
        f"folders.runs={run.folders.runs}",
        f"folders.prepared={run.folders.prepared}",
        "export.dtype=float32",
        "generation.prompt=null",
    ]


def _make_update(folder: Path, here: Path, run: Run, request: dict[str, Any], base: Path) -> None:
    """What training changed, encoded; signed before it has its name."""
    ready, run_folder = here / "made", run_dir.folder(run)
    left = sorted((folder / "rounds").glob("*/left"))
    before = [path for path in left if path.parent.name < here.name][-1:]
    about = {
        "campaign": request["campaign"],
        "round": request["round"],
        "facility": request["facility"],
        "image": run.image.file.name if run.image.file else run.image.name,
        "configuration": run_dir.digest(run.model_dump(mode="json", exclude={"folders"})),
        "data": run_dir.prepared_digest(run),
    }
    argv = [*_container_side(folder), "make-delta", "--base", str(base)]
    argv += ["--run", str(run_folder), "--codec", request["codec"], "--out", str(ready)]
    argv += ["--left-after", str(here / "left"), "--about", json.dumps(about)]
    argv += [word for path in before for word in ("--previous-residual", str(path))]
    _call(argv, "the update")
    if request["signing_key"]:
        sign(ready / "manifest.json", Path(request["signing_key"]).expanduser())
    ready.rename(here / "update")
    run_dir.sync_folder(here)


def _told(here: Path) -> dict[str, Any]:
    """What the coordinator wants to know beside the update: losses, and when the job was what."""
    job = json.loads((here / "job.json").read_text()) if (here / "job.json").is_file() else {}
    records = run_dir.metrics(Path(job["run"])) if "run" in job else []
    held_out = [r["loss"] for r in records if r["event"] == "evaluation"]
    spent = [r["step_seconds"] * 1.0 for r in records if r["event"] == "train"]
    return {
        "losses": held_out,
        "submitted": job.get("submitted"),
        "started": records[0].get("time") if records else None,
        "ended": records[-1].get("time") if records else None,
        "step_seconds": sum(spent) / len(spent) if spent else None,
    }


def _call(argv: list[str], what: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise UserError(f"{what} cannot be made: {_reason(done.stderr)}", "see the lines above")


def _reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.strip().splitlines() if line.strip()]
    ours = [line.removeprefix("atoll: ") for line in lines if line.startswith("atoll: ")]
    return ours[-1] if ours else (lines[-1] if lines else "no reason was given")
