"""`atoll site FOLDER`: one round at one facility, a step further each time it is asked.

FOLDER (the campaign, at the facility)/
  site.allow                 what a request may change, and sign with (allow.py)
  campaign.json              the one campaign that this folder is of
  incoming/round-000/        the first global model, whole; of later rounds the delta alone
  bases/round-000/           the global model a round begins from; bit for bit the coordinator's
  base/                      of adapters, if the facility puts it there: the model they are for,
                             else its bundle's, or what the settings name; base.json: its digest
  rounds/round-001/          journal.jsonl (journal.py), update/, and residual/: what encoding the
                             update left out, added to the next one (error feedback)
  starts/round-003/          where the model travels in fragments: what the round's run begins with
  losses/round-003/          the journal of a measurement of the model before that round
  runs/ prepared/ tokenizer/
  .streamflow/               scratch of the workflow system, emptied each round
What is decided is read from whole folders and the journal: asking twice does nothing twice.
"""

import argparse
import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.allow import refuse_folder, refuse_key, refuse_outside, refuse_settings
from atoll.campaign.inner_state import inner_state_words, prune_states
from atoll.campaign.journal import Journal, alone, round_name, round_number
from atoll.campaign.kept_request import (
    attempts,
    is_refused_lately,
    keep_campaign,
    keep_request,
    kept_request,
)
from atoll.campaign.own_weights import begins_with, needless_residuals, residual_round
from atoll.campaign.signing import sign
from atoll.campaign.site_models import (
    container_of,
    container_side,
    make_bases,
    model_words,
    refuse_other_frozen,
    refuse_wrong_base,
)
from atoll.campaign.suited import refuse_unsuited
from atoll.campaign.transfer import atoll_here, complaint, run_atoll
from atoll.cluster.accounting import slurm_ids, slurm_records
from atoll.cluster.compare import expected_wait_seconds
from atoll.cluster.goodput import goodput, span
from atoll.cluster.status import remembered_status, status
from atoll.commands import CommandParser, run_command
from atoll.config.compose import compose, path_word
from atoll.errors import UserError
from atoll.settings import Run, load_run
from atoll.settings.exchange import SiteRequest, read_request

ANOTHER_IS_AT_IT = "is running already"
WORK = ".streamflow"
LIFE_SECONDS = 3.0
# whatever a coordinator asks for: nobody may be waiting any more
MOST_WAIT_SECONDS, LEAST_POLL_SECONDS = 3600.0, 0.05
MOST_JOBS = 100  # of a round's run, that the coordinator is told of
# states of a round that come to another one by themselves
WAITING = ("queued", "running", "retry", "unknown")
AT_WORK = ("queued", "running", "unknown")  # of a job that is not to be submitted again


def main(argv: list[str]) -> int:
    """Go on with a round, and print where it stands as JSON."""
    parser = CommandParser("site", main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("round", type=int)
    parser.add_argument("--request", help="JSON; the first time a round is asked for")
    parser.add_argument("--receive", action="store_true", help="stop when the models are here")
    parser.add_argument("--until", type=float, default=0.0, help="wait for the job up to this time")
    parser.add_argument("--poll-seconds", type=float, default=30.0)
    about = "the held-out loss of the model that the round would begin with, and no training"
    parser.add_argument("--measure", action="store_true", help=about)
    arguments = parser.read(argv)
    folder, number = arguments.folder.absolute(), arguments.round
    if ".." in folder.parts:  # the list that judges a request is that of the folder it is about
        folder = folder.resolve()
    refuse_folder(folder)
    if arguments.request is not None:
        request, here = read_request(arguments.request), _place(folder, number, arguments)
        is_allowed = _is_allowed(folder, here, request)
        with alone(folder):  # two campaigns may come at one instant
            keep_campaign(folder, request.campaign)
            if is_allowed:
                keep_request(here, number, request.model_dump())
    if arguments.receive:
        shutil.rmtree(folder / WORK, ignore_errors=True)
    answer = wait if arguments.until else advance
    with signs_of_life():
        text = json.dumps(answer(folder, number, arguments))
    print(text)
    return 0


def _is_allowed(folder: Path, here: Path, request: SiteRequest) -> bool:
    """By the facility; False: a job that is at work does what was asked before it."""
    try:
        refuse_settings(request.overrides, folder)
        refuse_key(request.signing_key, folder)
    except UserError:
        if _job(here)[0] in (*AT_WORK, "finished"):
            return False
        raise
    return True


@contextmanager
def signs_of_life() -> Iterator[None]:
    """An empty line of errors every few seconds: whoever waits knows that this is no hang."""
    ended = threading.Event()

    def speak() -> None:
        while not ended.wait(LIFE_SECONDS):
            print(file=sys.stderr, flush=True)

    speaking = threading.Thread(target=speak, daemon=True)
    if not sys.stderr.isatty():
        speaking.start()
    try:
        yield
    finally:
        ended.set()


def wait(folder: Path, number: int, how: argparse.Namespace) -> dict[str, Any]:
    """Ask until the job has ended or the time is over; what is refused is an answer too."""
    try:
        answer = advance(folder, number, how)
        until = min(how.until, time.time() + MOST_WAIT_SECONDS)
        while answer["state"] in WAITING and time.time() < until:
            left_seconds = until - time.time()
            time.sleep(max(LEAST_POLL_SECONDS, min(how.poll_seconds, left_seconds)))
            answer = advance(folder, number, how)
    except UserError as error:
        answer = {"state": "refused", "why": error.in_a_line}
    return answer


def advance(folder: Path, number: int, how: argparse.Namespace) -> dict[str, Any]:
    """Do the next thing of a round that can be done now; say where it stands."""
    here = _place(folder, number, how)
    if not (here / "update" / "manifest.json").is_file():
        try:
            with alone(here, wait=False):
                answer = _advance(folder, number, kept_request(here), how)
        except BlockingIOError:
            handed = bool(Journal(here).records("submitted"))
            why = "another `atoll site` is at it"
            answer = {"state": "running" if handed else "retry", "why": why}
        if answer["state"] != "ready":
            return answer
    return {"state": "ready", **_measured(here)}


def _advance(
    folder: Path, number: int, request: dict[str, Any], how: argparse.Namespace
) -> dict[str, Any]:
    here, newest = _place(folder, number, how), request["global_round"]
    have = make_bases(folder, newest + 1, request["overrides"], number)
    if have < newest:
        container_side(folder, request["overrides"])  # whatever it lacks is said before models come
        return {"state": "needs", "have": have}
    base = folder / "bases" / round_name(newest)
    refuse_wrong_base(base, request)
    state, why = ("", "") if how.receive else _job(here)
    if state in AT_WORK:  # it does what was asked before, whatever is asked now
        return {"state": state, "why": why}
    if state == "finished":
        return _ended(folder, here, request, base, how)
    lines = _overrides(folder, here, request, base, base / "export")
    if request["frozen"]:
        refuse_other_frozen(folder, request, lines)
    if how.receive:
        return {"state": "received"}
    refuse_settings(request["overrides"], folder)  # site.allow may be another since it was kept
    refuse_key(request["signing_key"], folder)
    prune_states(folder, number, request["keep_checkpoints"])
    if not how.measure:
        begin = begins_with(folder, here, request, base)
        lines = _overrides(folder, here, request, base, begin)
        lines += inner_state_words(folder, here, request, lines)
    run = compose(lines).run
    refuse_unsuited(run, request["frozen"] is not None)
    refuse_outside(run, request["overrides"], folder)
    state, why = _submitted(here, run, lines, request, why)
    if state != "finished":
        return {"state": state, "why": why}
    return _ended(folder, here, request, base, how)


def _ended(
    folder: Path, here: Path, request: dict[str, Any], base: Path, how: argparse.Namespace
) -> dict[str, Any]:
    """Of a job that is done; its update says of the run what the run says of itself."""
    if not how.measure:
        run = load_run(run_dir.settings_file(Path(Journal(here).last("submitted")["run"])))
        _make_update(folder, here, run, request, base)
    return {"state": "ready"}


def _job(here: Path) -> tuple[str, str]:
    """State of the round's job and why; empty: there is none."""
    job = Journal(here).last("submitted")
    if not job or not run_dir.settings_file(Path(job["run"])).is_file():
        return "", ""
    return remembered_status(Path(job["run"]))


def _place(folder: Path, number: int, how: argparse.Namespace) -> Path:
    """Of a round, or of a measurement: its number may be that of a round to come."""
    return folder / ("losses" if how.measure else "rounds") / round_name(number)


def _overrides(
    folder: Path, here: Path, request: dict[str, Any], base: Path, begin: Path
) -> list[str]:
    """Of the facility's run of this round; its name is the same whenever it is asked."""
    what = {"rounds": here.name, "losses": f"losses-{here.name}"}[here.parent.name]
    tokenizer = folder / "tokenizer"
    if not tokenizer.is_dir():
        partial = folder / f".tokenizer.{os.getpid()}"
        others = shutil.ignore_patterns("*.safetensors*", "adapter_config.json")
        copied = run_dir.copy_synced
        shutil.copytree(base / "export", partial, ignore=others, copy_function=copied)
        run_dir.sync_folder(partial)
        partial.rename(tokenizer)
        run_dir.sync_folder(folder)
    return [
        *request["overrides"],
        f"name={request['campaign']}-{what}-{request['facility']}",
        *model_words(folder, request, begin),
        path_word("tokenizer.path", tokenizer),
        path_word("folders.runs", folder / "runs"),
        path_word("folders.prepared", folder / "prepared"),
        "export.dtype=float32",
        "generation.prompt=null",
    ]


def _submitted(
    here: Path, run: Run, lines: list[str], request: dict[str, Any], why: str
) -> tuple[str, str]:
    """State of the round's job, submitted again if it failed, as `why` says.

    Where the scheduler refused it, later and later.
    """
    folder, journal = run_dir.folder(run), Journal(here)
    why = why or journal.last("refused").get("why", "")
    tried = attempts(journal)
    if tried >= request["attempts"]:
        return "failed", f"{tried} attempts: {why or 'no reason was given'}"
    queues = run.facility.scheduler != "none"  # whose restart takes some minutes
    if queues and is_refused_lately(journal, time.time()):
        return "retry", why
    journal.append("submitted", run=str(folder))
    threads = threads_of_ranks(run, request["facilities_here"], len(os.sched_getaffinity(0)))
    done = run_command([*atoll_here(), "submit", *lines], environment=threads | os.environ)
    if done.returncode:
        why = UserError(*complaint(done.stderr)).in_a_line
        if ANOTHER_IS_AT_IT in done.stderr:
            return "running", why
        journal.append("refused", why=why)
        return "retry", why
    journal.append("accepted")
    state, why = status(folder)
    return "retry" if state == "failed" else state, why  # the next question submits it again


def threads_of_ranks(run: Run, facilities_here: int, cores: int) -> dict[str, str]:
    """Facilities of one machine without a scheduler share its cores; empty: they need not."""
    if facilities_here == 1 or run.facility.scheduler != "none":
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores // (facilities_here * run.ranks_per_node)))}


def _make_update(folder: Path, here: Path, run: Run, request: dict[str, Any], base: Path) -> None:
    """What training changed, encoded with the residual of the last update; signed, then named."""
    partial = here / "made"
    numbers = {round_number(path.parent): path for path in (folder / "rounds").glob("*/residual")}
    number, fragments = round_number(here), request["fragments"]
    earlier = [n for n in numbers if n < number and (n - number) % fragments == 0]
    previous = residual_round(base, request, earlier)
    about = {
        "campaign": request["campaign"],
        "round": request["round"],
        "facility": request["facility"],
        "image": run.image.file.name if run.image.file else run.image.name,
        "configuration": run_dir.digest(run.model_dump(mode="json", exclude={"folders"})),
        "data": run_dir.prepared_digest(run),
    }
    argv = [*container_of(run, folder), "make-delta", "--base", str(base)]
    argv += ["--adapter"] if request["frozen"] else []
    argv += ["--run", str(run_dir.folder(run)), "--codec", request["codec"], "--out", str(partial)]
    argv += ["--residual", str(here / "residual"), "--about", json.dumps(about)]
    argv += ["--fragments", str(fragments), "--fragment", str(request["fragment"])]
    argv += ["--fragment-pattern", request["fragment_pattern"]]
    if previous is not None:
        argv += ["--previous-residual", str(numbers[previous])]
    run_atoll(argv, "the update")
    if request["signing_key"]:
        sign(partial / "manifest.json", Path(request["signing_key"]).expanduser())
    partial.rename(here / "update")
    run_dir.sync_folder(here)
    for old in needless_residuals(base, request, earlier, previous):
        shutil.rmtree(numbers[old], ignore_errors=True)


def _measured(here: Path) -> dict[str, Any]:
    """What the coordinator wants to know beside the update: losses, and where the time went."""
    job = Journal(here).last("submitted")
    records = run_dir.metrics(Path(job["run"])) if job else []
    run = load_run(run_dir.settings_file(Path(job["run"]))) if records else None
    first = next(iter(Journal(here).records("submitted")), {})  # it may have been queued again
    started, ended = span(Path(job["run"])) if records else (None, None)
    is_queued = run is not None and run.facility.scheduler != "none"
    return {
        "losses": [
            r["loss"] for r in records if r["event"] == "evaluation" and math.isfinite(r["loss"])
        ],
        "submitted": first.get("time") if is_queued else None,  # else it waited in no queue
        "started": started,
        "ended": ended,
        "node_seconds": goodput(Path(job["run"])) if records else {},
        "expected_wait_seconds": expected_wait_seconds(run) if run is not None else None,
        "jobs": slurm_records(slurm_ids(Path(job["run"])))[-MOST_JOBS:] if records else [],
    }
