"""`atoll exclusions RUN`: the nodes that a run leaves out, and why; its file is `excluded.json`.

A person may delete an entry, or add one; jobs of the run that are queued later keep to it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from atoll import run_dir
from atoll.commands import CommandParser
from atoll.errors import UserError
from atoll.settings import Run, load_run

ABOUT = "Nodes that jobs of this run leave out. Delete an entry to take its node back."


@dataclass(frozen=True)
class Exclusion:
    """Why a node is left out; all is empty where a person wrote its name alone."""

    kind: str = ""
    evidence: str = ""
    job: str = ""
    since: str = ""


def main(argv: list[str]) -> int:
    """Print the nodes that a run leaves out, or take some of them back."""
    parser = CommandParser("exclusions", __doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run")
    undo = "let jobs of the run use this node again"
    parser.add_argument("--take-back", metavar="NODE", action="append", default=[], help=undo)
    names = "print the names alone, as a job's shell and sbatch take them"
    parser.add_argument("--names", action="store_true", help=names)
    arguments = parser.read(argv)
    folder = arguments.run
    if not run_dir.settings_file(folder).is_file():
        raise UserError(f"no run at {folder}", "give the folder of a run, as runs/NAME")
    if arguments.take_back:
        take_back(folder, arguments.take_back)
    if arguments.names:
        print(f"@atoll {left_out(load_run(run_dir.settings_file(folder)), folder)}")
        return 0
    nodes = excluded(folder)
    for node, why in nodes.items():
        print(f"{node}: {why.evidence or 'no reason given'} (job {why.job or '?'}, {why.since})")
    print("" if nodes else f"run {folder.name} leaves no node out\n", end="")
    return 0


def excluded(run_folder: Path) -> dict[str, Exclusion]:
    """Node -> why it is left out.

    Raises `UserError` where the file is not what it should be.
    """
    file = run_dir.excluded_file(run_folder)
    if not file.exists():
        return {}
    names = {field.name for field in fields(Exclusion)}
    try:
        nodes = json.loads(file.read_text())["nodes"]
        reasons = {node: why or {} for node, why in nodes.items()}
        return {
            node: Exclusion(**{name: str(text) for name, text in why.items() if name in names})
            for node, why in reasons.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} cannot be read: {type(error).__name__}: {error}",
            'it is {"nodes": {"n1": {}, "n2": {}}}: mend it, or delete it to leave no node out',
        ) from None


def left_out(run: Run, run_folder: Path) -> str:
    """As sbatch takes it: the nodes that the run leaves out, and those that its settings do."""
    also = run.facility.submit.get("exclude")
    return ",".join([*([str(also)] if also else []), *excluded(run_folder)])


def exclude(run_folder: Path, nodes: Mapping[str, Exclusion]) -> None:
    """Leave more nodes out; one that is left out already keeps its reason."""
    _write(run_folder, {**nodes, **excluded(run_folder)})


def take_back(run_folder: Path, nodes: Iterable[str]) -> None:
    """Let jobs of the run use these nodes again.

    Raises `UserError` for one that is not left out.
    """
    left_out = excluded(run_folder)
    for node in nodes:
        if node not in left_out:
            raise UserError(
                f"{node} is not left out of run {run_folder.name}",
                f"these are: {', '.join(left_out) or 'none'}",
            )
        del left_out[node]
    _write(run_folder, left_out)


def _write(run_folder: Path, nodes: Mapping[str, Exclusion]) -> None:
    file = run_dir.excluded_file(run_folder)
    if not nodes:
        file.unlink(missing_ok=True)
        return
    content = {"about": ABOUT, "nodes": {node: asdict(nodes[node]) for node in sorted(nodes)}}
    run_dir.write_whole(file, json.dumps(content, indent=2) + "\n")
