"""The command line: a command is a module, imported only when it is typed."""

import codecs
import errno
import importlib
import locale
import os
import sys
from pathlib import Path

from atoll.commands import COMMANDS, GROUPS, JOBS_OWN, close_stdin
from atoll.errors import UserError, keep_failure
from atoll.examples import FIRST
from atoll.imports import imported

# of others, with libraries that may ask
LOADS = {"tokenize", "fetch", "untrained", "adapter", "generate", "scores"}

# what a command was called before -> its name
RENAMED = {"difference": "make-delta", "rebase": "apply-delta"}

INTERRUPTED = 130  # as a shell says of Ctrl-C
# errors of the file system that a person can do something about -> how
NO_LOCKS = "its file system has no locks: give a place on one that has them"
FILE_HINTS = {
    errno.EACCES: "give a place that you may read and write, or change its permissions",
    errno.EPERM: "give a place that you may read and write, or change its permissions",
    errno.EROFS: "give a place that is not mounted read-only",
    errno.ENOSPC: "free some space, or give another place",
    errno.EDQUOT: "free some of your quota, or give another place",
    errno.EIO: "its disk, or the line to it, fails: give another place",
    errno.ENOLCK: NO_LOCKS,
    errno.ENOSYS: NO_LOCKS,
    errno.EOPNOTSUPP: NO_LOCKS,
    errno.ENOTDIR: "a file is where a folder should be: give another place",
}
# what a login node's own environment leaves out
TRAINING_PACKAGES = {"torch", "numpy", "transformers", "datasets", "tokenizers", "safetensors"}


def main(argv: list[str]) -> int:
    """Run one command; a `UserError` becomes two lines on stderr and exit code 2."""
    try:
        code = _call(argv)
        sys.stdout.flush()  # here, where what is wrong with it can still be said
        return code
    except UserError as error:
        sys.stderr.write(error.shown())
        _keep(error, argv)
    except BrokenPipeError:  # whoever reads our words has had enough, as `head` does
        _forget_output()
        return 1
    except OSError as error:
        if error.errno not in FILE_HINTS:
            raise
        sys.stderr.write(_of_files(error, FILE_HINTS[error.errno]).shown())
        if error.filename is None:
            _forget_output()
    except RuntimeError as error:
        if "home directory" not in str(error):  # pathlib's, of a folder of ~somebody
            raise
        hint = "give the whole path: ~NAME is the home of a user of this machine"
        sys.stderr.write(UserError("a path begins with ~ and a name that is no user", hint).shown())
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in TRAINING_PACKAGES:
            raise
        sys.stderr.write(_of_packages(argv[0], str(error.name)).shown())
    except KeyboardInterrupt:
        if argv[0] not in GROUPS[JOBS_OWN]:  # their job says it
            again = "; the same command goes on" if argv[0] == "federate" else ""
            sys.stderr.write(f"atoll: stopped{again}\n")
        return INTERRUPTED
    return 2


def _call(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if argv[0] == "--version":
        print(f"atoll {importlib.import_module('atoll.proof.statement').own_version()}")
        return 0
    if argv[0] in RENAMED:
        raise UserError(f"unknown command: {argv[0]}", f"it is called {RENAMED[argv[0]]} now")
    if argv[0] not in COMMANDS:
        raise _unknown(argv[0])
    module, _, function = COMMANDS[argv[0]][0].partition(":")
    return int(getattr(imported(module), function or "main")(argv[1:]) or 0)


def _keep(error: UserError, argv: list[str]) -> None:
    """In the folder of the run that a job's command was about, for `atoll status`."""
    if argv[:1] and argv[0] in GROUPS[JOBS_OWN]:
        folders = [path for path in map(Path, argv[1:]) if os.path.isfile(path / "run.yaml")]
        if folders:  # os.path: words may be longer than any name of a file, as a request is
            keep_failure(error, folders[0])


def _unknown(name: str) -> UserError:
    if name.startswith("-") or "=" in name:
        command = "compose" if name.startswith("-") else "submit"
        return UserError(
            f"{name} is no command, and a command comes first",
            f"atoll {command} {name} …; atoll --help lists the commands",
        )
    near = importlib.import_module("difflib").get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    typed = [word for heading, group in GROUPS.items() if heading != JOBS_OWN for word in group]
    return UserError(f"unknown command: {name}", f"{hint}choose from: {', '.join(typed)}")


def _of_files(error: OSError, hint: str) -> UserError:
    what = "what this command prints" if error.filename is None else error.filename
    return UserError(f"cannot use {what}: {error.strerror}", hint)


def _of_packages(command: str, name: str) -> UserError:
    return UserError(
        f"{sys.executable} has no {name}, which atoll {command} needs: a login node's side alone",
        "make setup installs it (a wheel: pip install 'WHEEL[train]'); or run in an image: "
        "image=cpu, after make image-cpu",
    )


def _forget_output() -> None:
    """What is still buffered has nowhere to go, and shall not fail once more at the end."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def process() -> None:
    """A command in a process of its own: what it writes is for nobody else to change."""
    _speak_utf8()
    os.umask(os.umask(0o022) | 0o002)
    if sys.argv[1:2] and sys.argv[1] in LOADS:
        close_stdin()
    sys.exit(main(sys.argv[1:]))


def _speak_utf8() -> None:
    """Begin again where a locale has other letters: files are UTF-8, and so is what we say."""
    if codecs.lookup(locale.getpreferredencoding(False)).name != "utf-8":
        os.environ["PYTHONUTF8"] = "1"  # of what this process starts
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def entry() -> None:
    """The `atoll` of an environment: a PYTHONPATH, as a site's modules set it, shadows nothing."""
    foreign = {os.path.abspath(path) for path in os.environ.pop("PYTHONPATH", "").split(":")}
    sys.path[:] = [path for path in sys.path if path not in foreign]
    process()


def _usage() -> str:
    lines = ["usage: atoll COMMAND …      atoll COMMAND --help      atoll --version", ""]
    for heading, group in GROUPS.items():
        lines += [f"{heading}:", *(f"  {name:11} {about}" for name, (_, about) in group.items())]
        lines.append("")
    return "\n".join([*lines, FIRST.rstrip()])


if __name__ == "__main__":
    process()
