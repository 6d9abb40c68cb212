"""How many mutants of a module the tests of `make test` kill: `run.py [--most N] [MODULE ...]`.

Mutants are cosmic-ray's (operators.py). Each runs in a fork of a process that has imported torch
and pytest already, on a copy of the repository, so that a mutant costs what its tests cost, and an
interrupted run leaves the source as it is. A mutant is killed where a test fails, or ends too late.
"""

import argparse
import compileall
import contextlib
import importlib
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("src", "tests", "hydra_conf", "sbatch", "containers")
SEED, WANTED_PERCENT = 16, 85
WAITING_SECONDS = 180.0  # for tests that wait for what never comes


@dataclass(frozen=True)
class Target:
    """A module under src/atoll and the tests of it, the quickest first."""

    tests: tuple[str, ...]
    without: str = ""  # tests too slow to be run for each survivor, as pytest's -k names them


COMMANDS = Target(("tests/cluster/test_commands.py",), without="every_word or in_a_shell")
TARGETS = {
    "launch/ranks": Target(("tests/launch/test_placement.py", "tests/launch/test_hostlist.py")),
    "cluster/slurm": COMMANDS,
    "cluster/pbs": COMMANDS,
    "train/checkpoint": Target(("tests/train/test_checkpoint.py",), without="test_a_kill_at_any"),
    "data/pack": Target(("tests/data/test_pack.py", "tests/data/test_loader.py")),
    "models/loss": Target(("tests/models/test_loss.py",)),
    "federation/combine": Target(
        ("tests/federation/test_combine.py", "tests/federation/test_aggregate.py")
    ),
    "federation/codec": Target(
        ("tests/federation/test_codec.py", "tests/federation/test_update.py")
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=", ".join(TARGETS))
    parser.add_argument("--most", type=int, default=150, help="mutants of a module (150)")
    given = parser.parse_args()
    unknown = sorted(set(given.modules) - set(TARGETS))
    if unknown:
        parser.error(f"no target {', '.join(unknown)}; there are: {', '.join(TARGETS)}")
    return max(_in_fork(name, given.most) for name in given.modules or TARGETS)


def _in_fork(name: str, most: int) -> int:
    """Each module in a process of its own: what one imports is not there for the next."""
    child = os.fork()
    if child == 0:
        try:
            code = _measure(name, most)
        except BaseException as error:
            print(f"{name}: {error!r}", file=sys.stderr)
            code = 2
        sys.stdout.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _measure(name: str, most: int) -> int:
    from operators import mutants_of

    target, module = TARGETS[name], f"src/atoll/{name}.py"
    source = (ROOT / module).read_text()
    mutants, count = mutants_of(source, SEED, most)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        for part in COPIED:
            ignored = shutil.ignore_patterns("__pycache__", "local")
            shutil.copytree(ROOT / part, tree / part, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", tree)
        _preload(tree, target)
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        if _outcome(target, 600) != "survived":
            raise RuntimeError("its tests fail without a mutant")
        used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
        limit = 5 + int(2 * used)
        outcomes: Counter[str] = Counter()
        for mutant in mutants:
            _write(tree / module, mutant.source)
            outcome = _outcome(target, limit)
            outcomes[outcome] += 1
            if outcome == "survived":
                print(
                    f"{name}.py:{mutant.line} survives ({mutant.operator.split('_')[0]})\n"
                    f"  - {mutant.before}\n  + {mutant.after}",
                    flush=True,
                )
    killed = len(mutants) - outcomes["survived"]
    percent = 100 * killed / len(mutants)
    counts = f"{count} | {len(mutants)} | {killed} | {outcomes['late']}"
    print(f"| `{name}` | {counts} | {percent:.0f} % |", flush=True)
    return int(percent < WANTED_PERCENT)


def _preload(tree: Path, target: Target) -> None:
    """Import what the tests import, once for all mutants; ours is imported anew by each."""
    import pytest
    import torch
    from hypothesis import settings

    torch.set_num_threads(1)
    settings.register_profile("mutants", derandomize=True, database=None, deadline=None)
    settings.load_profile("mutants")
    os.environ["PYTHONPATH"] = str(tree / "src")
    sys.path.insert(0, str(tree / "src"))
    os.chdir(tree)
    compileall.compile_dir(tree / "src", quiet=2)
    _silently(lambda: pytest.main(["--collect-only", "-p", "no:cacheprovider", *target.tests]))
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tree)):
            del sys.modules[name]


def _write(path: Path, source: str) -> None:
    """By a new file, without the compiled one, which is told apart by size and second alone."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()
    path.write_text(source)


def _outcome(target: Target, cpu_seconds: int) -> str:
    """What the tests say, in a child and its group of processes, which end with it.

    The limit is of processor time, which other work on the machine does not use up.
    """
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
        code = 99
        try:
            _silently(lambda: _run_tests(target))
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            os._exit(code)
    deadline = time.monotonic() + WAITING_SECONDS
    ended, status = 0, 1
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status) if ended else -signal.SIGXCPU
    return {0: "survived", -signal.SIGXCPU: "late", -signal.SIGKILL: "late"}.get(code, "killed")


def _run_tests(target: Target) -> None:
    import pytest

    if any("ranks" in Path(test).read_text() for test in target.tests):
        _fork_ranks()
    chosen = ["-k", f"not ({target.without})"] if target.without else []
    sys.exit(pytest.main(["-x", "-p", "no:cacheprovider", *chosen, *target.tests]))


def _fork_ranks() -> None:
    """Ranks are forks of this process: they have the mutant, and torch."""
    pool = importlib.import_module("rank_pool")

    def start(self: object) -> None:
        self.context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [None] * pool.RANKS, [None] * pool.RANKS
        for rank in range(pool.RANKS):
            self._start(rank)

    pool.RankPool.__init__ = start


def _silently(call: object) -> None:
    with open(os.environ.get("MUTANTS_LOG", os.devnull), "ab") as nowhere:
        sys.stdout.flush()
        saved = os.dup(1), os.dup(2)
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        try:
            call()
        finally:
            sys.stdout.flush()
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)


if __name__ == "__main__":
    sys.exit(main())
