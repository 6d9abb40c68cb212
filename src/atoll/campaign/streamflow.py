"""`engine=streamflow`: each round is a CWL workflow, which StreamFlow carries out.

What a step does is a verb of ours that is done once however often it is started, and files are
moved by rsync. StreamFlow starts the steps where they belong, over ssh, and again if they fail; it
has no resume, no deadline, and ends with a facility that does not answer. So each round is a run of
its own, of those facilities that answer now.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from atoll import run_dir
from atoll.campaign import store as state
from atoll.campaign import workflow
from atoll.campaign.round import average
from atoll.campaign.store import CampaignStore
from atoll.campaign.transfer import Unreachable, home_of
from atoll.errors import UserError
from atoll.settings.federation import Site

CLONE = Path(__file__).resolve().parents[3]
GRACE_SECONDS = 900.0  # for updates that were ready at the deadline, and are on their way


def one_round(held: CampaignStore, number: int) -> None:
    """Start StreamFlow for those that are missing and answer, until the round is settled."""
    program, folder = found_program(), held.folder / "streamflow"
    end_older(folder)
    while waiting := state.unsettled(held, number):
        homes = _answering(held, number, waiting)
        if homes:
            workflow.write(held, number, homes, everyone=len(homes) == len(waiting))
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


def carry_out(program: str, held: CampaignStore, number: int) -> int:
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


def _answering(held: CampaignStore, number: int, sites: list[Site]) -> dict[str, Path | None]:
    """Facility -> its home folder, of those that answer; None: on this machine."""
    found: dict[str, Path | None] = {}
    for site in sites:
        try:
            found[site.name] = home_of(held.campaign, site)
        except Unreachable as error:
            said = {"state": "unreachable", "why": error.found}
            state.remember(held, number, site, said)
    return found


def _blame(held: CampaignStore, number: int, site: Site) -> None:
    """A facility whose steps failed, each as often as StreamFlow may try, has failed once."""
    if not state.is_settled(held, number, site):
        log = held.folder / "streamflow" / "streamflow.log"
        state.count_failure(held, number, site, f"its steps failed, see {log}")
