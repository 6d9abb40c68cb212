"""What was looked at and what is not at hand, and the first thing that differs."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from atoll.errors import UserError, printable
from atoll.proof.statement import Resource, is_file, sha256_of_first


class Line(NamedTuple):
    """Something that is as the statement says, or that cannot be looked at from here."""

    state: Literal["as stated", "not at hand"]
    what: str


def refuse_changed(path: Path, size: int | None, sha256: str, grows: bool = False) -> None:
    """Raise `UserError` unless a file has this content; one that grows, at its beginning.

    size: in bytes; None where nobody wrote it down.
    """
    if not path.is_file():  # a pipe would be waited for
        raise differs(f"{path} is missing, or no plain file")
    now = path.stat().st_size
    size = now if size is None else size
    if now < size or (now > size and not grows):
        raise differs(f"{path} has {now:,} bytes, {size:,} were stated")
    digest = sha256_of_first(path, size)
    if digest != sha256:
        lines = f" within its first {size:,} bytes" if grows else ""
        raise differs(f"{path} has changed{lines}: sha256 {digest[:12]}…, not {sha256[:12]}…")


def differs(found: str) -> UserError:
    return UserError(printable(found), "it is not what made this model: get the original back")


def resources(entries: list[Resource], places: Mapping[str, Path | None]) -> Iterator[Line]:
    """Every file that is at hand is looked at; of each place one line, and one for each gap.

    A folder may be gone as a whole, an update's or a checkpoint's; one that is there has its files.
    """
    counts = dict[str, list[int]]()
    for entry in entries:
        place, _, name = entry["name"].partition("/")
        if not is_file(entry):
            yield Line("not at hand", _by_name(entry))
            continue
        folder, size = places.get(place), int(entry["annotations"]["bytes"])
        if folder is None or not (folder / name).parent.is_dir():
            yield Line("not at hand", f"{entry['name']} ({size:,} bytes)")
            continue
        grows = bool(entry["annotations"].get("grows"))
        refuse_changed(folder / name, size, entry["digest"]["sha256"], grows)
        counts.setdefault(place, []).append(size)
    for place, sizes in counts.items():
        yield Line("as stated", f"{place}: {len(sizes)} files, {sum(sizes):,} bytes")


def _by_name(entry: Resource) -> str:
    """Of an image, a commit: what the statement says, of which nothing here is the proof."""
    facts = {**entry.get("digest", {}), **entry.get("annotations", {})}
    stated = ", ".join(f"{name} {value}" for name, value in facts.items())
    return printable(f"{entry['name']}: said to be {stated}", 500)
