"""The launcher with real processes: ranks meet, fail together, hear signals, end as they say."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.errors import UserError
from atoll.launch import main, preload

SET_BY_OTHERS = re.compile(
    r"SLURM_|PMI|PALS_|PBS_|OMPI_|MASTER_|OMP_NUM|PYTHONUNBUFFERED|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)$"
)
CORES = len(os.sched_getaffinity(0))
# The same launcher for what is not about importing torch first, nor about how long it waits.
LIGHT = (
    "import sys; from atoll.launch import main, preload, processes;"
    "preload.PRELOADED_MODULES = (); processes.GRACE_SECONDS = 1.0; sys.exit(main(sys.argv[1:]))"
)
# Each of the two ways in which one task starts the ranks of its node.
LOCAL = pytest.mark.parametrize("option", ["--local-ranks", "--fork"])


def environment(**stated: str) -> dict[str, str]:
    """This process's environment without what a scheduler or a shell set, and what is stated."""
    kept = {name: value for name, value in os.environ.items() if not SET_BY_OTHERS.match(name)}
    source = Path(atoll.__file__).parents[1]
    kept["PYTHONPATH"] = os.pathsep.join([str(source), str(Path(__file__).parent)])
    return {**kept, **stated}


def start(
    *arguments: object, words: tuple[str, ...] = ("-m", "atoll", "launch"), **stated: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words, *map(str, arguments)],
        env=environment(**stated),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_light(*arguments: object, **stated: str) -> subprocess.Popen[str]:
    """With a thread count, for which no rank has to import torch."""
    return start(*arguments, words=("-c", LIGHT), OMP_NUM_THREADS="1", **stated)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, output, errors


def launched(*arguments: object, **stated: str) -> tuple[int, str, str]:
    return ended(start(*arguments, **stated))


def launched_light(*arguments: object, **stated: str) -> tuple[int, str, str]:
    return ended(start_light(*arguments, **stated))


def seen_by(run_folder: Path, rank: int) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads((run_folder / f"rank-{rank}.json").read_text())
    return seen


def pids(run_folder: Path, count: int) -> list[int]:
    """The processes of the sleeping ranks, once `count` of them sleep."""
    deadline = time.monotonic() + 60
    while len(found := sorted(run_folder.glob("pid-*"))) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} ranks started"
        time.sleep(0.02)
    return [int(path.read_text()) for path in found]


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone before, or while, it is read
        return True
    return state == "Z"


def all_gone(found: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not all(map(is_gone, found)):
        time.sleep(0.02)
    return all(map(is_gone, found))


@pytest.fixture
def free_port() -> Iterator[str]:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield str(holder.getsockname()[1])


def test_importing_the_launcher_leaves_torch_alone() -> None:
    code = "import sys, atoll.launch; print(sorted({'torch', 'numpy', 'yaml'} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.image
@LOCAL
def test_local_ranks_meet(option: str, tmp_path: Path) -> None:
    assert launched(option, 2, tmp_path, "launch_collective:all_reduce")[0] == 0
    ranks = [seen_by(tmp_path, rank) for rank in range(2)]
    forked = option == "--fork"
    for rank, seen in enumerate(ranks):
        assert seen["total"] == 3
        assert seen["placement"]["rank"] == seen["placement"]["local_rank"] == rank
        assert seen["environment"]["WORLD_SIZE"] == seen["environment"]["LOCAL_WORLD_SIZE"] == "2"
        assert seen["threads"] == int(seen["omp_num_threads"]) == max(1, CORES // 2)
        assert seen["openblas_num_threads"] == os.environ.get("OPENBLAS_NUM_THREADS")
        # Forked ranks find torch imported by their parent; the others import it themselves.
        assert seen["imported_by"] == seen["parent" if forked else "pid"]
    assert ranks[0]["pid"] != ranks[1]["pid"]
    assert ranks[0]["placement"]["master_port"] == ranks[1]["placement"]["master_port"] > 0


def test_a_stated_thread_count_stays(tmp_path: Path) -> None:
    stated = str(CORES + 1)
    arguments = ("--fork", 1, tmp_path, "launch_collective:all_reduce")
    assert launched(*arguments, OMP_NUM_THREADS=stated)[0] == 0
    assert seen_by(tmp_path, 0)["omp_num_threads"] == stated


def test_ranks_from_an_explicit_environment(tmp_path: Path, free_port: str) -> None:
    ranks = [
        start(
            tmp_path,
            "launch_collective:all_reduce",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=free_port,
        )
        for rank in range(2)
    ]
    assert [ended(rank)[0] for rank in ranks] == [0, 0]
    assert [seen_by(tmp_path, rank)["total"] for rank in range(2)] == [3, 3]
    assert seen_by(tmp_path, 1)["placement"]["source"] == "explicit"


@pytest.mark.parametrize("option", [(), ("--fork", 2)])
def test_ranks_from_a_slurm_step_over_two_nodes(
    option: tuple[object, ...], tmp_path: Path, free_port: str
) -> None:
    tasks = [
        start(
            "--port",
            free_port,
            *option,
            tmp_path,
            "launch_collective:all_reduce",
            SLURM_JOB_ID="4711",
            SLURM_STEP_ID="0",
            SLURM_STEP_NUM_TASKS="2",
            SLURM_STEP_NODELIST="localhost,localhost",
            SLURM_STEP_TASKS_PER_NODE="1(x2)",
            SLURM_PROCID=str(task),
            SLURM_NODEID=str(task),
            SLURM_LOCALID="0",
        )
        for task in range(2)
    ]
    assert [ended(task)[0] for task in tasks] == [0, 0]
    world_size = 4 if option else 2
    for rank in range(world_size):
        seen = seen_by(tmp_path, rank)
        assert seen["total"] == sum(range(1, world_size + 1))
        assert seen["placement"]["node_rank"] == rank // (world_size // 2)
        assert seen["environment"]["MASTER_ADDR"] == "localhost"
        assert seen["environment"]["GROUP_RANK"] == str(seen["placement"]["node_rank"])


@pytest.mark.parametrize(
    ("option", "entrypoint"), [("--local-ranks", "ignore_sigterm"), ("--fork", "fail_on_rank_1")]
)
def test_a_failing_rank_ends_the_others(option: str, entrypoint: str, tmp_path: Path) -> None:
    process = start_light(option, 3, tmp_path, f"launch_entrypoints:{entrypoint}")
    sleeping = pids(tmp_path, 2)
    assert ended(process)[0] == 7
    assert all_gone(sleeping)


@LOCAL
def test_a_users_mistake_is_two_lines_from_every_rank(option: str, tmp_path: Path) -> None:
    exit_code, _, errors = launched_light(
        option, 2, tmp_path, "launch_entrypoints:raise_user_error"
    )
    assert exit_code == 2
    for rank in range(2):
        message = f"atoll: rank {rank} found 3 apples\n       give it 4"
        assert message in errors
        errors = errors.replace(message, "")
    assert errors.strip() == ""


@LOCAL
def test_any_other_error_is_a_traceback(option: str, tmp_path: Path) -> None:
    exit_code, _, errors = launched_light(option, 2, tmp_path, "launch_entrypoints:raise_error")
    assert exit_code == 1
    assert "Traceback" in errors
    # The lines of two tracebacks may be mixed, not the words of a message.
    assert "rank 0 fell" in errors and "rank 1 fell" in errors


@LOCAL
def test_a_rank_ends_after_its_threads_and_writes_what_it_printed(
    option: str, tmp_path: Path
) -> None:
    exit_code, output, _ = launched_light(option, 2, tmp_path, "launch_entrypoints:finish_late")
    assert exit_code == 0
    assert sorted(output.splitlines()) == ["printed by rank 0", "printed by rank 1"]
    assert [(tmp_path / f"late-{rank}").read_text() for rank in range(2)] == ["done", "done"]


@LOCAL
def test_signals_reach_the_ranks_and_their_exit_code_comes_back(
    option: str, tmp_path: Path
) -> None:
    process = start_light(option, 2, tmp_path, "launch_entrypoints:end_on_sigusr2")
    pids(tmp_path, 2)
    process.send_signal(signal.SIGUSR2)
    assert ended(process)[0] == 75


def test_a_terminated_launcher_ends_its_ranks(tmp_path: Path) -> None:
    process = start_light("--local-ranks", 2, tmp_path, "launch_entrypoints:end_on_sigusr2")
    sleeping = pids(tmp_path, 2)
    process.terminate()
    assert ended(process)[0] == 128 + signal.SIGTERM
    assert all_gone(sleeping)


@LOCAL
def test_a_killed_launcher_takes_its_ranks_along(option: str, tmp_path: Path) -> None:
    process = start_light(option, 2, tmp_path, "launch_entrypoints:end_on_sigusr2")
    sleeping = pids(tmp_path, 2)
    process.kill()
    assert ended(process)[0] == -signal.SIGKILL
    assert all_gone(sleeping)


def test_two_launchers_on_one_machine_take_different_ports(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    runs = [start("--local-ranks", 2, run, "launch_collective:all_reduce") for run in folders]
    assert [ended(run)[0] for run in runs] == [0, 0]
    ports = {seen_by(folder, 0)["placement"]["master_port"] for folder in folders}
    assert len(ports) == 2


def test_an_import_that_starts_a_thread_is_refused_before_the_fork(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "def entrypoint(run, placement): print('ran')\n"
    )
    path = os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path)])
    exit_code, output, errors = launched(
        "--fork", 2, tmp_path, "threaded:entrypoint", PYTHONPATH=path
    )
    assert exit_code == 2
    assert "2 threads run after the imports" in errors
    assert "launcher=static" in errors
    assert output == ""


def test_a_thread_of_jemalloc_is_no_reason_against_a_fork(tmp_path: Path) -> None:
    """It has this name, and ends before a fork by itself."""
    (tmp_path / "threaded.py").write_text(
        "import threading\n"
        "from pathlib import Path\n"
        "named, forked = threading.Event(), threading.Event()\n"
        "def as_jemalloc_s():\n"
        "    task = Path(f'/proc/self/task/{threading.get_native_id()}/comm')\n"
        "    task.write_text('jemalloc_bg_thd')\n"
        "    named.set()\n"
        "    forked.wait()\n"
        "threading.Thread(target=as_jemalloc_s, daemon=True).start()\n"
        "named.wait()\n"
        "def entrypoint(run, placement): print('ran')\n"
    )
    path = os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path)])
    exit_code, output, errors = launched(
        "--fork", 2, tmp_path, "threaded:entrypoint", PYTHONPATH=path
    )
    assert exit_code == 0, errors
    assert output.splitlines() == ["ran", "ran"]


def test_a_device_opened_by_an_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "_DEVICE_FILES", ("/dev/zero",))
    preload.refuse_open_devices()
    with Path("/dev/zero").open("rb"), pytest.raises(UserError, match="opened /dev/zero"):
        preload.refuse_open_devices()


def test_task_folders_of_two_users_of_a_node_share_no_folder(tmp_path: Path) -> None:
    """A parent that one user's job made could not be written by another's."""
    shared = tmp_path / "caches" / "kernels"
    folders = [f"--task-folder={name}={shared}" for name in ("CACHE_DIR", "DATABASE")]
    names = "launch_entrypoints:name_task_folder"
    exit_code, _, errors = launched_light(*folders, "--fork", 2, tmp_path, names)
    assert exit_code == 0, errors
    own = [Path((tmp_path / f"cache-{rank}").read_text()) for rank in (0, 1)]
    private = Path(f"{shared}-{os.getuid()}")
    assert [folder.parent for folder in own] == [private, private] and own[0] != own[1]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (private, *own)} == {0o700}
    assert not shared.exists()


def test_a_task_folder_may_be_the_job_s_own(tmp_path: Path) -> None:
    """It has the job's number, and is there when it begins."""
    folder = f"--task-folder=CACHE_DIR={tmp_path}/$SLURM_JOB_ID/kernels"
    names = "launch_entrypoints:name_task_folder"
    exit_code, _, errors = launched_light(folder, "--fork", 1, tmp_path, names, SLURM_JOB_ID="7")
    assert exit_code == 0, errors
    own = Path((tmp_path / "cache-0").read_text())
    assert own.parent == tmp_path / "7" / f"kernels-{os.getuid()}"


def test_slurm_tasks_do_not_start_ranks_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_TASKS_PER_NODE": "4",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "1",
    }
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="--local-ranks 2 in a task that is rank 1 of 4"):
        main(["--local-ranks", "2", str(tmp_path)])
    with pytest.raises(UserError, match="--fork 2 with 4 tasks on 1 nodes"):
        main(["--fork", "2", str(tmp_path)])


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["nowhere"], "no run folder nowhere"),
        ([".", "launch_entrypoints"], "entrypoint 'launch_entrypoints'"),
        ([".", "no_such_module:main"], "no module no_such_module"),
        (
            [".", "launch_entrypoints:no_such_function"],
            "launch_entrypoints has no no_such_function",
        ),
        (["--address-suffix=-hsn", "nowhere"], "no run folder nowhere"),
        (["--local-ranks", "0", "."], "--local-ranks 0"),
        (["--fork", "-1", "."], "--fork -1"),
        (["--port", "70000", "."], "port 70000"),
    ],
)
def test_bad_arguments(arguments: list[str], found: str, tmp_path: Path) -> None:
    exit_code, _, errors = launched(*arguments)
    assert exit_code == 2
    assert len(errors.splitlines()) == 2
    assert found in errors


@pytest.mark.parametrize(("task", "is_host"), [(0, 1), (1, 0)])
def test_torchrun_meets_on_a_faster_network(
    task: int, is_host: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch knows no machine by its name there: without is_host each agent waits for another."""
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": "0",
        "SLURMD_NODENAME": f"n{task + 1}",
    }
    for name in filter(SET_BY_OTHERS.match, list(os.environ)):
        monkeypatch.delenv(name)
    for name, text in step.items():
        monkeypatch.setenv(name, text)
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, argv: became.append(argv))
    monkeypatch.setattr("atoll.launch.command.close_stdin", lambda: None)
    main(["--torchrun", "2", "--address-suffix=i", str(tmp_path)])
    [argv] = became
    assert f"--rdzv-conf=is_host={is_host}" in argv
    assert f"--local-addr=n{task + 1}i" in argv
    assert any(word.startswith("--rdzv-endpoint=n1i:") for word in argv)
