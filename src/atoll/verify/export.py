"""The files of an export against its statement, and who signed that."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.campaign.signing import OF_MODELS, refuse_changed_since_signed, refuse_unsigned
from atoll.errors import UserError
from atoll.proof.statement import MAX_BYTES, NAME, SCORES, SIGNATURE
from atoll.verify.lines import Line, differs, refuse_changed


def files(export: Path, statement: dict[str, Any]) -> Iterator[Line]:
    """Every file that is stated, and no other beside them."""
    stated = {entry["name"]: entry for entry in statement["subject"]}
    present = {path.relative_to(export).as_posix() for path in files_in(export)}
    for name in sorted(stated.keys() | present - {NAME, SIGNATURE}):
        if name not in stated and name == SCORES:
            yield Line("not at hand", f"{name}: who measured it, since the export was made")
            continue
        if name not in stated:
            raise differs(f"{export / name} is not of this export: nothing states it")
        if name not in present:
            raise differs(f"{export / name} is missing")
        size = int(stated[name]["annotations"]["bytes"])
        refuse_changed(export / name, size, stated[name]["digest"]["sha256"])
    total = sum(int(entry["annotations"]["bytes"]) for entry in stated.values())
    yield Line("as stated", f"export: {len(stated)} files, {total:,} bytes")


def files_in(folder: Path) -> list[Path]:
    """All files below a folder; a link to a folder is one, whatever is behind it.

    Raises `UserError` where a folder cannot be listed: who knows a name may open a file there.
    """
    found = []
    for top, folders, files in os.walk(folder, onerror=_refuse_unlisted):
        links = [name for name in folders if os.path.islink(os.path.join(top, name))]
        found += [Path(top) / name for name in (*links, *files)]
    return found


def _refuse_unlisted(error: OSError) -> None:
    raise differs(f"{error.filename} cannot be listed: {error.strerror}")


def signature(export: Path, allowed_signers: Path | None, identity: str) -> Iterator[Line]:
    """Raise `UserError` unless `identity` signed the statement, where signers are given.

    Without them a signature that is there has to be one of this statement, whoever's it is.
    """
    is_signed = (export / SIGNATURE).is_file()
    if allowed_signers is None:
        if is_signed:
            refuse_changed_since_signed(export / NAME, OF_MODELS, MAX_BYTES)
        who = "nobody was asked who may sign it: --signers FILE" if is_signed else "it is unsigned"
        yield Line("not at hand", f"who wrote {NAME}: {who}")
        return
    if not is_signed:
        hint = "whoever made it signs it: atoll verify EXPORT --sign KEY"
        raise UserError(f"{export / NAME} is not signed", hint)
    refuse_unsigned(export / NAME, allowed_signers, identity, OF_MODELS, MAX_BYTES)
    yield Line("as stated", f"{NAME}: signed by {identity}")
