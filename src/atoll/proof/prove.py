"""What an export carries of its making: a model card, a crate, and last the statement of both."""

from collections.abc import Mapping
from pathlib import Path

from atoll import run_dir
from atoll.proof.crate import write_crate
from atoll.proof.statement import (
    CARD,
    CRATE,
    Made,
    Resource,
    remove_cut_off,
    resource,
    subjects_of,
    write_statement,
)


def prove(export: Path, made: Made, card: str, known: Mapping[str, Resource]) -> None:
    """Write all three into an export that is whole otherwise.

    known: files of the export whose digests were taken as they were written.
    """
    remove_cut_off(export)
    run_dir.write_whole(export / CARD, card)
    subjects = subjects_of(export, known)
    write_crate(export, made, subjects)
    write_statement(export, made, [*subjects, {**resource("", export, CRATE), "name": CRATE}])
