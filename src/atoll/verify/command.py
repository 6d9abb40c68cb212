"""`atoll verify EXPORT`: compare a model and what made it with its provenance.json, offline."""

import argparse
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.signing import OF_MODELS, sign
from atoll.campaign.store import settings_file
from atoll.commands import CommandParser
from atoll.errors import UserError, printable
from atoll.proof.statement import (
    AVERAGE,
    LAST,
    NAME,
    UNREADABLE,
    kind_of,
    logs_of,
    materials_of,
    read_statement,
    weights_of,
)
from atoll.verify import export as exported
from atoll.verify import of_campaign, of_run
from atoll.verify.lines import Line, differs

ABOUT = """Compare an export with its provenance.json, and with all that made it and is at hand:
settings, checkpoint, tokens, logs; of a campaign every update and, once more, every aggregation.
Ends with code 2 and the name of the first thing that differs. Nothing is fetched."""


def main(argv: list[str]) -> int:
    """Print what is as stated and what is not at hand."""
    parser = CommandParser("verify", ABOUT)
    parser.add_argument("export", type=Path, metavar="EXPORT", help="a Hugging Face folder")
    parser.add_argument("--from", dest="source", type=Path, metavar="FOLDER", help="its run or "
                        "campaign, where the export was moved away from it")  # fmt: skip
    parser.add_argument("--signers", type=Path, metavar="FILE", help="ssh-keygen's allowed_signers")
    parser.add_argument("--identity", default="coordinator", help="who signed, in that file")
    parser.add_argument("--sign", type=Path, metavar="KEY", help="and sign it, if all is as stated")
    parser.add_argument("--quick", action="store_true", help="no shards, checkpoints, aggregation")
    about = "of a campaign: the updates and the aggregation of one round alone"
    parser.add_argument("--round", type=int, metavar="N", help=about)
    words = parser.read(argv)
    folder = words.export.absolute()
    statement = read_statement(folder)
    is_campaign = kind_of(statement) == "campaign"
    _refuse_other_kind(folder, kind_of(statement))
    _refuse_other_weights(folder, weights_of(statement))
    source = words.source.absolute() if words.source else _source(folder, statement, is_campaign)
    if words.source and not _is_source(words.source, is_campaign):
        raise UserError(f"{words.source} is no run or campaign", "--from FOLDER names the one")
    deep = not words.quick
    _refuse_round(words, statement, is_campaign)
    asked = words.signers
    if asked is None and is_campaign and not words.sign:  # who signs it now is not asked for before
        asked = of_campaign.own_signers(statement, source, words.identity)
    for line in exported.signature(folder, asked, words.identity):
        _print(line)
    for line in exported.files(folder, statement):
        _print(line)
    made_it = (
        of_campaign.made_it(statement, source, folder, words.signers, deep, words.round)
        if is_campaign
        else of_run.made_it(statement, source, deep)
    )
    try:
        for line in made_it:
            _print(line)
    except PermissionError:  # of which nobody but its owner is the cause
        raise
    except (OSError, *UNREADABLE) as error:  # JSON of others, that is as stated and makes no sense
        raise differs(f"{source} cannot be read: {type(error).__name__}: {error}") from None
    if words.sign:
        sign(folder / NAME, words.sign, OF_MODELS)
        print(f"signed: {words.export / NAME}")
    return 0


def _refuse_round(words: argparse.Namespace, statement: dict[str, Any], is_campaign: bool) -> None:
    """A round that there is none of, or nothing to do in."""
    if words.round is None:
        return
    if not is_campaign:
        raise UserError(f"--round {words.round}, of a run's export", "a campaign's has rounds")
    if words.quick or words.sign:
        other = "--quick" if words.quick else "--sign"
        raise UserError(f"--round and {other}", "leave one out: --round aggregates, and no more")
    numbers = of_campaign.rounds(statement)[1:]
    if words.round not in numbers:
        hint = f"--round {numbers[0]} to {numbers[-1]}" if numbers else "leave it out"
        raise UserError(f"no round {words.round} made this model", hint)


def _refuse_other_kind(export: Path, kind: str) -> None:
    """What is compared follows from where an export lies, not from what its statement calls it."""
    for each in (export, export.resolve()):
        if _kind_of_place(each) not in ("", kind):
            other = f"it lies in the folder of a {_kind_of_place(each)}"
            raise differs(f"{each / NAME} is the statement of a {kind}, and {other}")


def _refuse_other_weights(export: Path, stated: str) -> None:
    """In its run's folder an export has the name of what it is of: both have the same run."""
    for each in (export, export.resolve()):
        names = {run_dir.export(each.parent).name: LAST}
        names |= {run_dir.averaged_export(each.parent).name: AVERAGE}
        of_name = names.get(each.name) if _kind_of_place(each) == "run" else None
        if stated and of_name and stated != of_name:
            place = f"{each} is the place of the weights of the run's {of_name}"
            raise differs(f"{place}; its {NAME} is of the {stated}")


def _kind_of_place(export: Path) -> str:
    """campaign or run; empty: it was moved away from either."""
    if export.parent.name == "global" and of_campaign.ROUND.fullmatch(export.parent.parent.name):
        return "campaign"
    return "run" if _is_source(export.parent, is_campaign=False) else ""


def _source(export: Path, statement: dict[str, Any], is_campaign: bool) -> Path | None:
    """RUN of RUN/export; CAMPAIGN of CAMPAIGN/round-N/global/export: it has what is stated.

    Of a link, where it leads; but a round may itself be a link to another disk.
    """
    place = kind_of(statement)
    entries = [*materials_of(statement), *logs_of(statement)]
    names = [name for at, _, name in (e["name"].partition("/") for e in entries) if at == place]
    for each in (export, export.resolve()):
        source = each.parent.parent.parent if is_campaign else each.parent
        in_place = _kind_of_place(each) == place and _is_source(source, is_campaign)
        if in_place or any((source / name).is_file() for name in names):
            return source
    return None


def _is_source(folder: Path, is_campaign: bool) -> bool:
    file = settings_file(folder) if is_campaign else run_dir.settings_file(folder)
    return file.is_file()


def _print(line: Line) -> None:
    print(f"{line.state:12} {printable(line.what)}", flush=True)
