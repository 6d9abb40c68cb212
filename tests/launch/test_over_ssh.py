"""Ranks on machines without a scheduler: two ssh servers of this machine stand in for them."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_launch import LIGHT, all_gone, environment, pids, seen_by

from atoll.errors import UserError
from atoll.launch.over_ssh import place, read_hosts, ssh_argv

HOSTS = ("127.0.0.1", "127.0.0.2")


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two servers with keys of their own; the file that tells ssh how to reach them."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if server is None:
        pytest.skip("no sshd here")
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user"):
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(argv, check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    client, running = [], []
    for host in HOSTS:
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        options = {"ListenAddress": host, "Port": port, "HostKey": folder / "host"}
        options |= {"AuthorizedKeysFile": folder / "user.pub", "StrictModes": "no"}
        options |= {"UsePAM": "no", "PasswordAuthentication": "no", "PidFile": "none"}
        config = folder / f"sshd-{host}"
        config.write_text("".join(f"{name} {value}\n" for name, value in options.items()))
        running.append(subprocess.Popen([server, "-D", "-f", str(config)]))
        client.append(f"Host {host}\n  Port {port}\n")
    known = "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    client.append(f"Host *\n  IdentityFile {folder / 'user'}\n  IdentityAgent none\n{known}")
    (folder / "config").write_text("".join(client))
    try:
        for host in HOSTS:
            argv = ["ssh", "-F", str(folder / "config"), "-o", "BatchMode=yes", host, "true"]
            for _ in range(50):
                if subprocess.run(argv, capture_output=True).returncode == 0:
                    break
                time.sleep(0.1)
            else:
                pytest.skip("this machine's sshd lets nobody in")
        yield folder / "config"
    finally:
        for process in running:
            process.terminate()
            process.wait()


TASK = ("-c", LIGHT, "--fork", "2", "--follow-stdin")
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(doors: Path, tmp_path: Path) -> Start:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("# two machines\n127.0.0.1 slots=2\n\n127.0.0.2 slots=2  # the other\n")
    ssh = [f"--ssh-option={word}" for word in ("-F", str(doors))]
    own = [f"--variable={name}" for name in ("PYTHONPATH", "OMP_NUM_THREADS", "NCCL_TEST")]

    def begin(*words: object) -> "subprocess.Popen[str]":
        head = [sys.executable, "-m", "atoll", "over-ssh", f"--hosts={hosts}", "--nodes=2"]
        return subprocess.Popen(
            [*head, "--ranks=2", *own, *ssh, "--", sys.executable, *map(str, words)],
            env=environment(OMP_NUM_THREADS="1", NCCL_TEST="a 'b' $c"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return begin


def test_ranks_on_two_machines_meet(start: Start, tmp_path: Path):
    process = start(*TASK, tmp_path, "launch_collective:all_reduce")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, output + errors
    assert [seen_by(tmp_path, rank)["total"] for rank in range(4)] == [10] * 4
    assert seen_by(tmp_path, 3)["environment"]["MASTER_ADDR"] == HOSTS[0]
    assert [seen_by(tmp_path, rank)["placement"]["node_rank"] for rank in range(4)] == [0, 0, 1, 1]


def test_variables_are_passed_as_they_are(start: Start):
    output, _ = start("-c", "import os; print(os.environ['NCCL_TEST'])").communicate(timeout=60)
    assert output == "a 'b' $c\n" * 2


def test_a_rank_that_dies_ends_all_machines(start: Start, tmp_path: Path):
    process = start(*TASK, tmp_path, "launch_entrypoints:fail_on_rank_1")
    asleep = pids(tmp_path, 3)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 7
    assert "atoll: 127.0.0.1 ended with 7" in errors
    assert all_gone(asleep)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_remote_ranks(number: signal.Signals, start: Start, tmp_path: Path):
    process = start(*TASK, tmp_path, "launch_entrypoints:sleep_as")
    asleep = pids(tmp_path, 4)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert all_gone(asleep)


def test_usr2_reaches_the_ranks_which_end_as_they_say(start: Start, tmp_path: Path):
    process = start(*TASK, tmp_path, "launch_entrypoints:end_on_sigusr2")
    pids(tmp_path, 4)
    process.send_signal(signal.SIGUSR2)
    process.communicate(timeout=60)
    assert process.returncode == 75


def test_nothing_is_left_where_the_head_is_killed(start: Start, tmp_path: Path):
    process = start(*TASK, tmp_path, "launch_entrypoints:sleep_as")
    asleep = pids(tmp_path, 4)
    process.kill()
    process.communicate()
    assert all_gone(asleep)


@pytest.mark.parametrize(
    ("text", "nodes", "found"),
    [
        ("n1\n", 2, "names 1 machines, the run asks for 2"),
        ("n1\nn1\n", 2, "'n1'"),
        ("n1 slots=1\nn2\n", 2, "n1 has 1 slots for 2 ranks"),
        ("n1 n2\n", 1, "'n1 n2'"),
        ("-F/tmp/config\n", 1, "'-F/tmp/config'"),  # an option of ssh
        ("-oProxyCommand=true\n", 1, "'-oProxyCommand=true'"),
        ("-o ProxyCommand=true\n", 1, "'-o ProxyCommand=true'"),
    ],
)
def test_a_host_file_that_does_not_fit_is_refused(text, nodes, found, tmp_path):
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read_hosts(file, nodes, 2)
    assert found in caught.value.found
    with pytest.raises(UserError, match="No such file"):
        read_hosts(tmp_path / "none", nodes, 2)


def test_the_words_for_a_machine():
    variables = place(1, ["n1", "n2"], "n1i", 20001)
    argv = ssh_argv("n2", ["-p", "22"], {"A": "x y", **variables})
    assert argv[-3:-1] == ["22", "n2"]
    stated = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=n1i MASTER_PORT=20001"
    assert argv[-1] == f"exec env 'A=x y' {stated}"
