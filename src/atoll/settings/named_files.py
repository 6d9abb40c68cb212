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
        inside = sorted(
            file.relative_to(path).as_posix()
            for file in path.rglob("*")
            if file.suffix in SUFFIXES and file.is_file() and not file.name.startswith(".")
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


def refuse_no_text(paths: list[Path], setting: str) -> None:
    """Raise `UserError` where all files together have not a byte."""
    if not any(path.stat().st_size for path in paths):
        raise UserError(
            f"{setting} holds no text: {len(paths)} files, 0 bytes", "give files that are not empty"
        )
