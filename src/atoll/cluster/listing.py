"""`atoll list [WHAT]`, `atoll status [RUN …]`: what may be chosen, what is there, how it is."""

import json
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from atoll import run_dir
from atoll.cluster.accounting import keep_accounting
from atoll.cluster.jobs import Job, JobId, ask
from atoll.cluster.status import follow, queued_jobs, run_folder, runs_folders, status
from atoll.cluster.then import then_line
from atoll.commands import CommandParser
from atoll.config.compose import config_tree
from atoll.config.stated_folders import stated_folder
from atoll.errors import UserError
from atoll.tables import table

ABOUT = "List what a run may be made of, or what this folder holds; without WHAT: its runs."
STATUS = """\
Say of each run (its folder, or its name in folders.runs) where it stands, and why; without RUN of
all runs there: state, last step, its loss and age, and the job."""
# what a person types -> the group of the configuration tree
GROUPS = {
    "facilities": "facility",
    "models": "model",
    "data": "data",
    "shardings": "sharding",
    "experiments": "experiment",
    "tasks": "task",
    "optimizers": "optimizer",
    "launchers": "launcher",
    "federations": "federation",
}
Row = dict[str, str]
UNREADABLE = "unreadable"


def main(argv: list[str]) -> int:
    """Print one table, or one JSON list."""
    parser = CommandParser("list", ABOUT)
    what = [*GROUPS, *HERE]
    about = f"{', '.join(what)}; default: runs"
    parser.add_argument("what", nargs="?", default="runs", choices=what, metavar="WHAT", help=about)
    parser.add_argument("--json", action="store_true", help="as a JSON list of objects")
    arguments = parser.read(argv)
    kind = arguments.what
    rows = choices(GROUPS[kind]) if kind in GROUPS else HERE[kind]()
    _show(rows, arguments.json, kind)
    return 0


def status_of(argv: list[str]) -> int:
    """Print a line for each run; with --follow, of the first, until it has ended."""
    parser = CommandParser("status", STATUS)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="the folder of a run, or its name")
    lines = "of one run: loss, tokens/s and time left, line by line, until it has ended"
    parser.add_argument("--follow", action="store_true", help=lines)
    parser.add_argument("--json", action="store_true", help="as a JSON list of objects")
    arguments = parser.read(argv)
    if arguments.follow:
        if len(arguments.runs) != 1:
            raise UserError(f"--follow with {len(arguments.runs)} runs", "name one run to follow")
        folder = run_folder(arguments.runs[0])
        code = follow(folder)
        keep_accounting(folder)
        return code
    named = [run_folder(name) for name in arguments.runs]
    rows = runs(named or run_folders())
    if arguments.json or not named:
        _show(rows, arguments.json, "runs")
    for row in [] if arguments.json or not named else rows:
        print(f"{row['name']}: {row['state']}" + (f", {row['why']}" if row["why"] else ""))
    for line in filter(None, map(then_line, named)) if not arguments.json else ():
        print(line)
    for folder in named:
        keep_accounting(folder)
    return 2 if named and any(row["state"] == UNREADABLE for row in rows) else 0


def _show(rows: list[Row], as_json: bool, kind: str) -> None:
    if as_json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
    elif rows:
        print(table(list(rows[0]), [list(row.values()) for row in rows]))
    else:
        print(f"no {kind} here")


def choices(group: str) -> list[Row]:
    """The names that `group=NAME` takes, each with the first line of its file."""
    files = sorted((config_tree() / group).glob("*.yaml"))
    return [{"name": file.stem, "about": first_comment(file)} for file in files]


def first_comment(file: Path) -> str:
    """What a YAML file says of itself; hydra's own line, where one is, comes before that."""
    lines = file.read_text().splitlines()
    words = [line.lstrip("# ") for line in lines if line.startswith("#")]
    return next((line for line in words if not line.startswith("@package")), "")


def runs(folders: Sequence[Path]) -> list[Row]:
    """How these runs are; the schedulers are asked once for all."""
    answers = ask({job for folder in folders for job in _jobs_of(folder)})
    rows = []
    for folder in folders:
        state, why = _status(folder, answers)
        jobs = _jobs_of(folder)
        rows.append(
            {"name": folder.name, "state": state}
            | _progress(folder)
            | {"job": jobs[-1][1] if jobs else "", "why": why}
        )
    return rows


def _jobs_of(folder: Path) -> list[JobId]:
    """Those of a run that may be read."""
    try:
        return queued_jobs(folder)
    except OSError:
        return []


def _status(folder: Path, answers: Mapping[JobId, Job]) -> tuple[str, str]:
    """A run whose files cannot be read is one of a list, and hides none of the others."""
    try:
        return status(folder, answers)
    except UserError as error:
        return UNREADABLE, f"{error.found}; {error.hint}"
    except OSError as error:
        return UNREADABLE, f"{error.filename}: {error.strerror}"


def jobs() -> list[Row]:
    """The jobs of all runs of this folder, as their schedulers call them."""
    known = [(folder, job) for folder in run_folders() for job in _jobs_of(folder)]
    answers = ask({job for _, job in known})
    return [
        {
            "job": job[1],
            "scheduler": job[0],
            "run": folder.name,
            "state": answers[job].state if job in answers else "unknown",
            "why": answers[job].why if job in answers else "",
        }
        for folder, job in known
    ]


def images() -> list[Row]:
    """The image files of `folders.images`."""
    return [_image(file) for file in sorted(stated_folder("images").glob("*.sif"))]


def _image(file: Path) -> Row:
    """Its size and age; a link may lead to what a scratch's cleaning took."""
    try:
        facts = file.stat()
    except FileNotFoundError:
        return {"name": file.stem, "MiB": "", "built": f"gone: {file.resolve()}"}
    built = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.st_mtime))
    return {"name": file.stem, "MiB": f"{facts.st_size / 2**20:.0f}", "built": built}


HERE: Mapping[str, Callable[[], list[Row]]] = {
    "runs": lambda: runs(run_folders()),
    "jobs": jobs,
    "images": images,
}


def run_folders() -> list[Path]:
    """The folders of runs, in the order in which they were submitted."""
    times: dict[Path, float] = {}
    for path in (path for runs in runs_folders() for path in runs.glob("*")):
        with suppress(OSError):  # it may be somebody else's alone, or gone meanwhile
            facts = run_dir.settings_file(path).stat()
            if stat.S_ISREG(facts.st_mode):
                times[path] = facts.st_mtime
    return sorted(times, key=times.__getitem__)


def _progress(folder: Path) -> Row:
    """The last step of a run, its loss, and how long ago that was."""
    lines = []
    with suppress(OSError):
        lines = [line for line in run_dir.metrics(folder) if line.get("event") == "train"]
    if not lines:
        return {"step": "", "loss": "", "age": ""}
    last = lines[-1]
    age_minutes = max(0.0, time.time() - last.get("time", time.time())) / 60
    loss = last.get("loss")
    return {
        "step": str(last["step"]),
        "loss": "" if loss is None else f"{loss:.4f}",
        "age": f"{age_minutes:.0f} min" if age_minutes < 120 else f"{age_minutes / 60:.0f} h",
    }
