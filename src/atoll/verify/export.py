"""The files of an export against its statement, and who signed that."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.campaign.signing import OF_MODELS, refuse_unsigned
from atoll.errors import UserError
from atoll.proof.statement import MAX_BYTES, NAME, SIGNATURE
from atoll.verify.lines import Line, differs, refuse_changed


def files(export: Path, statement: dict[str, Any]) -> Iterator[Line]:
    """Every file that is stated, and no other beside them."""
    stated = {entry["name"]: entry for entry in statement["subject"]}
    present = {p.relative_to(export).as_posix() for p in export.rglob("*") if not p.is_dir()}
    for name in sorted(stated.keys() | present - {NAME, SIGNATURE}):
        if name not in stated:
            raise differs(f"{export / name} is not of this export: nothing states it")
        if name not in present:
            raise differs(f"{export / name} is missing")
        size = int(stated[name]["annotations"]["bytes"])
        refuse_changed(export / name, size, stated[name]["digest"]["sha256"])
    total = sum(int(entry["annotations"]["bytes"]) for entry in stated.values())
    yield Line("as stated", f"export: {len(stated)} files, {total:,} bytes")


def signature(export: Path, allowed_signers: Path | None, identity: str) -> Iterator[Line]:
    """Raise `UserError` unless `identity` signed the statement, where signers are given."""
    is_signed = (export / SIGNATURE).is_file()
    if allowed_signers is None:
        who = "nobody was asked who may sign it: --signers FILE" if is_signed else "it is unsigned"
        yield Line("not at hand", f"who wrote {NAME}: {who}")
        return
    if not is_signed:
        hint = "whoever made it signs it: atoll verify EXPORT --sign KEY"
        raise UserError(f"{export / NAME} is not signed", hint)
    refuse_unsigned(export / NAME, allowed_signers, identity, OF_MODELS, MAX_BYTES)
    yield Line("as stated", f"{NAME}: signed by {identity}")
