"""What to say about a name the configuration tree does not know."""

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping

from atoll.errors import UserError
from atoll.settings import RENAMED_SETTINGS, nearest_setting


def check_choice(group: str, choice: object, choices: Iterable[str]) -> None:
    """Refuse a choice a group does not offer."""
    offered = sorted(choices)
    if not isinstance(choice, str):
        raise UserError(f"{group} is a group, not {choice!r}", f"choose from: {', '.join(offered)}")
    if choice not in offered:
        near = difflib.get_close_matches(choice, offered, n=1, cutoff=0.5)
        hint = f"did you mean {group}={near[0]}? " if near else ""
        raise UserError(
            f"unknown {group}: {choice}", f"{hint}choose {group} from: {', '.join(offered)}"
        )


def unknown_setting(name: str, groups: Mapping[str, list[str]], where: str = "") -> UserError:
    """A name that is neither a setting nor a group."""
    found = f"unknown setting{where}: {name}"
    if name in RENAMED_SETTINGS:
        return UserError(found, f"it is called {RENAMED_SETTINGS[name]} now")
    if "/" in name or name.split(".")[0] == "hydra":
        return UserError(found, f"the groups are: {', '.join(sorted(groups))}")
    near = difflib.get_close_matches(name, groups, n=1, cutoff=0.7)
    best = near[0] if near else nearest_setting(name)
    return UserError(
        found,
        f"did you mean {best}?" if best else "`atoll compose facility=NAME` lists every setting",
    )


def unreadable(line: str) -> UserError:
    """An override outside Hydra's grammar; most often a value that needs its own quotes."""
    key, equals, value = line.partition("=")
    if not equals:
        return UserError(f"not an override: {line!r}", "write KEY=VALUE")
    found = f"cannot read the value of {key}: {value!r}"
    inner = f"{key}={_quoted(value)}"
    if not inner.isprintable():
        return UserError(found, "put the value in quotes of its own: KEY='VALUE'")
    quoted = shlex.quote(inner) if re.search(r'["$`!]', inner) else f'"{inner}"'
    return UserError(found, f"quote it twice: {quoted}")


def _quoted(value: str) -> str:
    if value.startswith("[") and value.endswith("]"):
        return f"[{','.join(_quoted(item.strip()) for item in value[1:-1].split(','))}]"
    escaped = value.strip("'\"").replace("'", "\\'")
    return f"'{escaped}'"
