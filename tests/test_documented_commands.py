"""Every command of README and docs: ours run as far as a login node can, the rest are known.

Submissions are dry runs in a clone whose local file has an account; what would queue, build or
fetch is asked for its options; a setting or a choice that is named anywhere must be there.
"""

import functools
import importlib.util
import itertools
import re
import shlex
import shutil
from pathlib import Path

import pytest

from atoll.__main__ import LOADS, main
from atoll.commands import COMMANDS, GROUPS, JOBS_OWN
from atoll.config.compose import compose_all, groups
from atoll.examples import FIRST, LINES
from atoll.settings import is_setting

ROOT = Path(__file__).parents[1]
OTHER_TREES = {"federation.md", "testing.md"}  # settings of a campaign; code
# an image has the README alone, and collects this file too
PAGES = [ROOT / "README.md", *ROOT.glob("CONTRIBUTING.md"), *sorted(ROOT.glob("docs/*.md"))]
OURS = {"atoll": [], ".venv/bin/atoll": [], "sbatch/atoll": [], "./sbatch/atoll": []}
OURS |= {"sbatch/train.sbatch": ["submit"]}
OTHERS = {"cd", "git", "ssh", "rsync", "module", "source", "cat", "mkdir", "for", "do", "done"}
OTHERS |= {
    "pip",
    "uv",
    "conda",
    "pre-commit",
    "./configure",
    "./autogen.sh",
    "echo",
    "eval",
    "export",
}
OTHERS |= {"tensorboard", "wandb", "mlflow", "ssh-keygen", "hf"}  # show a run, make keys, fetch
DRY = {"submit", "evaluate"}  # commands that take --dry-run
COMPOSED = {"plan", "doctor", "prepare", "rehearse"}  # whose KEY=VALUE are a run's
STAND_INS = {"facility=X": "facility=leonardo", "facility=NAME": "facility=leonardo"}
IN_GENERAL = {"group=choice", "key=value", "sharding=auto"}


def commands(page: Path) -> list[str]:
    """The lines of its bash blocks, and the inline code that is a command of ours."""
    text = page.read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    inline = [code.replace("\\|", "or") for code in inline]  # as a table writes a bar
    ours = [code for code in inline if code.split()[0] in (*OURS, "make")]
    return list(dict.fromkeys(line.strip() for line in [*lines, *ours] if line.strip()))


def examples() -> list[tuple[str, str]]:
    """The lines at the end of each command's help, without what is said of them."""
    lines = [
        line for text in (FIRST.partition("\n")[2], *LINES.values()) for line in text.splitlines()
    ]
    return [("--help", re.split(" {2,}", line.strip())[0]) for line in lines]


CASES = [(page.name, line) for page in PAGES for line in commands(page)] + examples()


def words_of(line: str) -> list[list[str]]:
    """Each command of a line, in words, without comments and redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    parts: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("&|;<>"):
            parts.append([])
            if word in "<>>":  # the file behind it is no command
                parts.append(["cat"])
        else:
            parts[-1].append(word)
    return [part for part in parts if part]


@functools.cache
def make_targets() -> re.Pattern[str]:
    names = re.findall(r"^([a-z%-]+):", (ROOT / "Makefile").read_text(), re.M)
    return re.compile("|".join(name.replace("%", r"[\w-]+") for name in names))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documented")
    leave = shutil.ignore_patterns("local")
    for part in ("hydra_conf", "sbatch"):
        shutil.copytree(ROOT / part, folder / part, ignore=leave)
    local = folder / "hydra_conf" / "local" / "default.yaml"
    local.parent.mkdir()
    local.write_text("# @package _global_\nfacility: {account: my_project}\n")
    (folder / "hosts.txt").write_text("".join(f"host{n} slots=4\n" for n in range(4)))
    for name in ("book.txt", "talks.jsonl", "pairs.jsonl"):
        (folder / name).write_text('{"messages": []}\n')
    return folder


def overrides(words: list[str]) -> list[str]:
    """The words of a run, with stand-ins for what a reader puts in."""
    words = [STAND_INS.get(word, word).replace("$", "") for word in words]
    # a bundle must be there: tests/test_workloads.py makes one and trains from it
    return [word for word in words if not word.startswith("folders.bundle=")]


def try_ours(words: list[str], clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, *rest = words
    if command.startswith("-") or command == "COMMAND":
        return
    assert command in COMMANDS
    part = "…" in rest  # of a longer line: its names are tried below
    settings = [word for word in rest if "=" in word and not word.startswith("-") and not part]
    options = [word.partition("=")[0] for word in rest if word.startswith("-")]
    if command in DRY and settings:
        taken = [word for word in rest if word in ("-m", "--multirun", "--here")]
        argv = [command, "--dry-run", f"--clone={clone}", *taken, *overrides(settings)]
        assert main(argv) == 0, capsys.readouterr().err
    elif command in COMPOSED and settings:
        for facility in facilities(rest):
            compose_all(overrides([*settings, *facility]), False, clone=clone)
    if options:
        shown = options_of(command, capsys)
        assert all(option in shown for option in options), f"{command} has no {options}"


def facilities(words: list[str]) -> list[list[str]]:
    """The facility= of each that --facilities names; without it, the line's own."""
    if "--facilities" not in words:
        return [[]]
    names = words[words.index("--facilities") + 1].replace("OTHER", "lumi").split(",")
    return [[f"facility={name}"] for name in names]


def options_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Its help, or where that would import torch the source that says it."""
    if command in LOADS:
        spec = importlib.util.find_spec(COMMANDS[command][0])
        assert spec is not None and spec.origin is not None
        return Path(spec.origin).read_text()
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return capsys.readouterr().out


def first_read(page: str, line: str) -> bool:
    return page in ("README.md", "--help")


@pytest.mark.matrix(always=first_read)
@pytest.mark.parametrize(
    ("page", "line"), CASES, ids=[f"{p}-{n}" for n, (p, _) in enumerate(CASES)]
)
def test_a_command_is_what_it_says(page, line, clone, monkeypatch, capsys):
    monkeypatch.chdir(clone)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for words in words_of(line):
        if words[0] in OURS:
            argv = [*OURS[words[0]], *words[1:]]
            try_ours(argv, clone, capsys) if argv else None
        elif words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word and word.islower()]
            unknown = [name for name in targets if not make_targets().fullmatch(name)]
            assert unknown in ([], ["install"]), unknown
        else:
            assert words[0] in OTHERS, f"{words[0]} of {page} is no known program"


def test_each_command_that_a_person_types_ends_its_help_with_examples(capsys):
    typed = {name for heading, group in GROUPS.items() if heading != JOBS_OWN for name in group}
    assert set(LINES) == typed
    for name in typed - LOADS:
        assert f"examples:\n{LINES[name]}" in options_of(name, capsys)


@functools.cache
def choices() -> dict[str, list[str]]:
    return groups(ROOT / "hydra_conf")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in OTHER_TREES], ids=lambda page: page.name
)
def test_settings_and_choices_that_a_page_names_are_there(page):
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.S))
    words = itertools.chain.from_iterable(code.split() for code in inline)
    unknown = []
    for word in words:
        name, sign, value = word.strip("'\"+~").partition("=")
        if not sign or word in IN_GENERAL or not re.fullmatch(r"[a-z_]+(\.[A-Za-z_0-9]+)*", name):
            continue
        if name in choices():
            listed = [each for each in value.split(",") if re.fullmatch(r"[a-z0-9_]+", each)]
            unknown += [word for each in listed if each not in choices()[name]]
        elif not is_setting(name):
            unknown.append(word)
    assert unknown == []


def test_the_parts_of_a_wheel_that_a_page_or_a_hint_names_are_there():
    project = (ROOT / "pyproject.toml").read_text()
    given = set(
        re.findall(r"^(\w+) = \[", project.split("[project.optional-dependencies]")[1], re.M)
    )
    texts = [*PAGES, *(ROOT / "src").rglob("*.py")]
    named = {
        extra
        for path in texts
        for words in re.findall(r"(?:\.whl|WHEEL)\[([\w,]+)\]", path.read_text())
        for extra in words.split(",")
    }
    assert {"train", "scores"} <= named <= given
