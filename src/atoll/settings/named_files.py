"""The text files that a setting names: files, folders and globs."""

from pathlib import Path

from atoll.errors import UserError

SUFFIXES = (".txt", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow")


def named_files(entry: str, setting: str) -> list[tuple[str, Path]]:
    """The files behind one entry, each with a name that does not depend on the machine.

    Raises `UserError` where there is none.
    """
    path = Path(entry).expanduser()
    if path.is_dir():
        there = [found for found in path.rglob("*") if not _is_hidden(found, path)]
        _refuse_linked_folders(there, path, setting)
        inside = sorted(
            file.relative_to(path).as_posix()
            for file in there
            if file.suffix in SUFFIXES and file.is_file()
        )
        if not inside:
            raise UserError(
                f"{setting}: the folder {entry} holds no file that ends in {', '.join(SUFFIXES)}",
                "give a folder that does, or name the files",
            )
        return [(name, path / name) for name in inside]
    if path.is_file():
        return [(path.name, path)]
    root = Path(path.anchor)
    pattern = str(path.relative_to(root))
    matches = sorted(match for match in root.glob(pattern) if match.is_file())
    if not matches:
        kind = "no file matches" if set("*?[") & set(entry) else "no such file or folder:"
        raise UserError(
            f"{setting}: {kind} {entry} (from {Path.cwd()})",
            "check the spelling; relative paths start where the command was typed",
        )
    return [(match.name, match) for match in matches]


def _is_hidden(found: Path, folder: Path) -> bool:
    """It, or a folder that it is in, as the copies that notebooks keep of files."""
    return any(part.startswith(".") for part in found.relative_to(folder).parts)


def _refuse_linked_folders(there: list[Path], folder: Path, setting: str) -> None:
    """Links to folders are not followed: text of a folder elsewhere would be left out."""
    inside = folder.resolve()
    for link in there:
        if not (link.is_symlink() and link.is_dir()) or link.resolve().is_relative_to(inside):
            continue
        if any(file.suffix in SUFFIXES for file in link.rglob("*")):
            raise UserError(
                f"{setting}: {link} is a link to a folder with text, and links to folders are not "
                "followed",
                f"name both: {setting}=[{folder},{link}], or take the link out",
            )


def refuse_no_text(paths: list[Path], setting: str) -> None:
    """Raise `UserError` where all files together have not a byte."""
    if not any(path.stat().st_size for path in paths):
        raise UserError(
            f"{setting} holds no text: {len(paths)} files, 0 bytes", "give files that are not empty"
        )
