"""What to say about a name the configuration tree does not know."""

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping

from atoll.errors import UserError
from atoll.settings import RENAMED_SETTINGS, is_text, nearest_setting

# Hydra's own flags, and settings of its own -> what does it here
HYDRA_FLAGS = {
    **dict.fromkeys(("--cfg", "-c", "--resolve", "--package", "-p"), "atoll compose prints it"),
    **dict.fromkeys(("--info", "-i"), "atoll compose names the source of each value"),
    **dict.fromkeys(("--config-name", "-cn"), "choose parts, as experiment=NAME or model=NAME"),
    **dict.fromkeys(
        ("--config-path", "-cp", "--config-dir", "-cd"), "own files go to hydra_conf/local"
    ),
    **dict.fromkeys(("--shell-completion", "-sc"), "atoll completion bash, zsh or fish"),
    **dict.fromkeys(("--run", "-r"), "leave it out: one run is what is made"),
    "--hydra-help": "--help, or atoll list",
    "--experimental-rerun": "bash RUN/launch.sh, or the same line again",
}
HYDRA_SETTINGS = {
    "hydra.run": "the folder of a run is folders.runs=FOLDER and name=NAME",
    "hydra.sweep": "the folder of a run is folders.runs=FOLDER and name=NAME",
    "hydra.job": "a run is called name=NAME, its folder is folders.runs=FOLDER",
    "hydra.launcher": "where a run goes is facility=NAME, how its ranks start launcher=NAME",
    "hydra.sweeper": "--multirun with several values makes several runs",
    "hydra": "nothing of it is used here",
}
# letters beyond ASCII are letters to a person, and nothing to Hydra's grammar: not in quotes,
# as they stand in '...' or "..."; the word around them, up to what the grammar divides by
WORD = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^\[\]{},='"()]+""")


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
    offered = f"the groups are: {', '.join(sorted(groups))}"
    parts = name.replace("/", ".").split(".")
    if parts[0] == "hydra":
        about = HYDRA_SETTINGS.get(".".join(parts[:2]), HYDRA_SETTINGS["hydra"])
        return UserError(found, f"{about}; {offered}")
    if "/" in name:
        return UserError(found, offered)
    near = difflib.get_close_matches(name, groups, n=1, cutoff=0.7)
    best = near[0] if near else nearest_setting(name)
    return UserError(
        found,
        f"did you mean {best}?" if best else "`atoll compose facility=NAME` lists every setting",
    )


def quoted_letters(line: str) -> str:
    """The override with quotes around each word that holds letters beyond ASCII."""
    key, equals, value = line.partition("=")
    if not equals or line.isascii():
        return line
    return f"{key}={WORD.sub(_quoted_word, value)}"


def _quoted_word(word: re.Match[str]) -> str:
    text = word[0]
    return text if text.isascii() or text[0] in "'\"" else f"'{text.strip()}'"


def several_values(key: str, values: str) -> UserError:
    """Values between commas, where one is wanted."""
    if is_text(key):
        other = f"as one text quote it twice: {in_shell(f'{key}={_quoted(values)}')}"
    else:
        other = f"for a list write '{key}=[{values}]'"
    return UserError(
        f"several values for {key}: {values}", f"for one run each add --multirun; {other}"
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
    return UserError(found, f"quote it twice: {in_shell(inner)}")


def in_shell(word: str) -> str:
    """A word that has quotes of its own as a person types it into a shell."""
    return shlex.quote(word) if re.search(r'["$`!]', word) else f'"{word}"'


def _quoted(value: str) -> str:
    if value.startswith("[") and value.endswith("]"):
        return f"[{','.join(_quoted(item.strip()) for item in value[1:-1].split(','))}]"
    escaped = value.strip("'\"").replace("'", "\\'")
    return f"'{escaped}'"
