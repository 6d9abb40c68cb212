"""`atoll diff RUN RUN`: the settings in which two runs differ."""

import json
from typing import Any

from atoll import run_dir
from atoll.cluster.status import run_folder
from atoll.commands import CommandParser
from atoll.settings import dumped, load_run

ABOUT = "Print the settings in which two runs differ; nothing, and code 0, where none does."


def main(argv: list[str]) -> int:
    """One line for each setting: its name, the first run's value, the second's."""
    parser = CommandParser("diff", ABOUT)
    parser.add_argument("runs", nargs=2, metavar="RUN", help="the folder of a run, or its name")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    arguments = parser.read(argv)
    before, after = (settings_of(name) for name in arguments.runs)
    changes = {
        name: [before.get(name), after.get(name)]
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    }
    if arguments.json:
        print(json.dumps(changes, indent=1, ensure_ascii=False))
        return 0
    for name, (old, new) in changes.items():
        print(f"{name}: {_shown(old)} -> {_shown(new)}")
    return 0


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def settings_of(name: str) -> dict[str, Any]:
    """A run's settings by their dotted names.

    Raises `UserError` where there is none, or none that can be read.
    """
    return flat(dumped(load_run(run_dir.settings_file(run_folder(name)))))


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level of dotted names; an empty group stands for itself."""
    pairs: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            pairs |= flat(value, f"{prefix}{name}.")
        else:
            pairs[f"{prefix}{name}"] = value
    return pairs
