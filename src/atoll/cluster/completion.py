"""`atoll completion SHELL`: the script by which bash, zsh or fish complete what is typed."""

import re
import shlex
from collections.abc import Callable

from atoll.cluster import listing
from atoll.cluster.status import runs_folders
from atoll.commands import COMMANDS, GROUPS, JOBS_OWN, CommandParser
from atoll.config.compose import config_tree, groups
from atoll.settings import setting_names

ABOUT = """\
Print a script that completes commands, the choices of each group, and the names of settings:
  bash   source <(atoll completion bash)
  zsh    source <(atoll completion zsh)
  fish   atoll completion fish | source
Write it into a file that your shell reads when it starts, to have it each time."""
OF_RUNS = ("status", "logs", "cancel", "report", "diff", "judge", "exclusions")

BASH = """\
_atoll() {
    local line=${COMP_LINE:0:COMP_POINT} words=@WORDS@ word before
    word=${line##* } before=${line% *}
    case "$before " in
        *"atoll ") words=@COMMANDS@ ;;
        *"atoll list ") words=@KINDS@ ;;
        @OF_RUNS@)
            words=$(for folder in @RUNS@; do (cd "$folder" 2> /dev/null && printf '%s ' *); done) ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
    [[ ${COMPREPLY[*]} != *= ]] || compopt -o nospace
    [[ $COMP_WORDBREAKS != *=* ]] || COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")
}
complete -o default -F _atoll atoll train.sbatch
"""
ZSH = """\
_atoll() {
    if [[ $service == atoll && $CURRENT == 2 ]]; then
        compadd -- @COMMANDS@
    elif [[ $service == atoll && ${words[2]} == list ]]; then
        compadd -- @KINDS@
    elif [[ $service == atoll && ${words[2]} == (@OF_RUNS@) ]]; then
        compadd -- @RUNS@
    else
        compadd -- @CHOICES@
        compadd -S '' -- @SETTINGS@
        _files
    fi
}
compdef _atoll atoll train.sbatch
"""
FISH = """\
complete -c atoll -n __fish_use_subcommand -f -a @COMMANDS@
complete -c atoll -n '__fish_seen_subcommand_from @OF_RUNS@' -f -a '(path basename @RUNS@)'
complete -c atoll -n '__fish_seen_subcommand_from list' -f -a @KINDS@
complete -c atoll -n '__fish_seen_subcommand_from @OTHERS@' -a @WORDS@
complete -c train.sbatch -a @WORDS@
"""


def main(argv: list[str]) -> int:
    """Print one script."""
    parser = CommandParser("completion", ABOUT)
    parser.add_argument("shell", choices=list(SHELLS), metavar="SHELL", help="bash, zsh or fish")
    print(SHELLS[parser.read(argv).shell](), end="")
    return 0


def commands() -> list[str]:
    """What a person types after `atoll`."""
    return [name for name in COMMANDS if name not in GROUPS[JOBS_OWN]]


def kinds() -> list[str]:
    """What a person types after `atoll list`."""
    return [*listing.GROUPS, *listing.HERE]


def choices() -> list[str]:
    """Every `group=choice` of the configuration tree."""
    offered = groups(config_tree())
    return [f"{group}={name}" for group, names in offered.items() for name in names]


def settings() -> list[str]:
    """Every setting up to its value; groups of settings are no words of their own."""
    names = list(setting_names())
    inner = {name.rpartition(".")[0] for name in names}
    return [f"{name}=" for name in names if name not in inner]


def bash() -> str:
    words = shlex.quote(" ".join([*choices(), *settings()]))
    of_runs = " | ".join(f'*"atoll {name} "*' for name in OF_RUNS)
    typed, listed = (shlex.quote(" ".join(words)) for words in (commands(), kinds()))
    runs = shlex.join(map(str, runs_folders()))
    return _filled(BASH, WORDS=words, COMMANDS=typed, KINDS=listed, OF_RUNS=of_runs, RUNS=runs)


def zsh() -> str:
    every = {"COMMANDS": commands(), "KINDS": kinds(), "CHOICES": choices(), "SETTINGS": settings()}
    texts = {name: shlex.join(words) for name, words in every.items()}
    runs = " ".join(f"{shlex.quote(str(folder))}/*(N:t)" for folder in runs_folders())
    return _filled(ZSH, **texts, OF_RUNS="|".join(OF_RUNS), RUNS=runs)


def fish() -> str:
    words = shlex.quote(" ".join([*choices(), *settings()]))
    typed, listed = (shlex.quote(" ".join(words)) for words in (commands(), kinds()))
    others = " ".join(name for name in commands() if name not in (*OF_RUNS, "list", "completion"))
    texts = {"WORDS": words, "COMMANDS": typed, "KINDS": listed, "OTHERS": others}
    # inside quotes: a folder of other letters is left out
    plain = [str(folder) for folder in runs_folders() if re.fullmatch(r"[\w./+-]+", str(folder))]
    runs = " ".join(f"{folder}/*" for folder in plain)
    return _filled(FISH, **texts, OF_RUNS=" ".join(OF_RUNS), RUNS=runs)


def _filled(script: str, **texts: str) -> str:
    for name, text in texts.items():
        script = script.replace(f"@{name}@", text)
    return script


SHELLS: dict[str, Callable[[], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
