"""A campaign whose facilities are reached over real ssh and train through a real Slurm."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from testbed_site import ROOT, TINY, Site

from atoll.errors import UserError
from atoll.host import federate
from atoll.host import round as one_round
from atoll.host.campaign import Held, checked_campaign
from atoll.host.transfer import Unreachable, ask


class Door(NamedTuple):
    """How to get in: a port of this machine, a key, and the hosts that are known."""

    port: int
    key: Path
    known_hosts: Path

    @property
    def options(self) -> list[str]:
        known = f"UserKnownHostsFile={self.known_hosts}"
        return ["-p", str(self.port), "-i", str(self.key), "-o", known, "-o", "IdentityAgent=none"]


@pytest.fixture(scope="module")
def door(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """An ssh server of our own, with keys of its own."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    assert server is not None, "make testbed installs openssh-server"
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user"):
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(argv, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "ListenAddress": "127.0.0.1",
        "Port": port,
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
        "PidFile": "none",
    }
    config = folder / "sshd_config"
    config.write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    Path("/run/sshd").mkdir(exist_ok=True)
    known = folder / "known_hosts"
    kind, key, *_ = (folder / "host.pub").read_text().split()
    known.write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
    running = subprocess.Popen([server, "-D", "-f", str(config)])
    try:
        for _ in range(100):
            with socket.socket() as knock:
                if knock.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield Door(port, folder / "user", known)
    finally:
        running.terminate()
        running.wait()


def settings(site: Site, door: Door, folder: Path) -> dict[str, Any]:
    model = [word for word in TINY if word.startswith(("model", "tokenizer"))]
    rest = [word for word in site.settings if word not in model]
    rest = [word.replace("texts/", f"{site.clone}/texts/") for word in rest]
    rest = [word for word in rest if not word.startswith(("data.files", "training.global"))]
    slurm = ["facility=testbed", "nodes=1", f"image.file={site.image}"]
    command = ["env", f"PYTHONPATH={ROOT / 'src'}", sys.executable, "-m", "atoll"]
    texts = {"north": "data-*.txt", "south": "host-*.txt"}
    sites = [
        {
            "name": name,
            "host": "root@127.0.0.1",
            "folder": str(folder / name),
            "command": command,
            "overrides": [*slurm, f"data.files=[{site.clone}/texts/{text}]"],
        }
        for name, text in texts.items()
    ]
    laptop = ["facility=laptop", "ranks_per_node=1", "sharding=single"]
    start = [word for word in rest if not word.startswith("image.")]
    return {
        "name": "over-ssh",
        "rounds": 1,
        "folder": str(folder / "campaigns"),
        "sites": sites,
        "start": [*laptop, *start, *model, f"data.files=[{site.clone}/texts/data-*.txt]"],
        "train": [*rest, "checkpoint.every_steps=0"],
        "steps": 4,
        "batch_samples": 8,
        "poll_seconds": 1,
        "rule": {"max_norm_ratio": 100, "quorum": 2},
        "ssh_options": door.options,
    }


@pytest.fixture
def folder(site: Site) -> Path:
    """One that the nodes' containers may bind."""
    made = site.clone.parent / f"federation-{time.monotonic_ns()}"
    made.mkdir()
    return made


def test_a_round_over_ssh_through_slurm(
    site: Site, door: Door, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at its first answer and asked again: each facility has queued one job."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.chdir(folder)
    campaign = checked_campaign(settings(site, door, folder))
    held = Held(campaign, folder / "campaigns" / campaign.name)
    one_round.begin(held)
    for _ in range(2):  # as a coordinator that was killed after it had asked everyone
        for one in campaign.sites:
            one_round.go_on(held, 1, one)
    assert federate.run(held) == 0
    manifest = json.loads((held.model(1) / "manifest.json").read_text())
    assert set(manifest["weights"]) == {"north", "south"} and not manifest["rejected"]
    for one in campaign.sites:
        [jobs] = Path(one.folder).glob("runs/*/jobs.txt")
        assert len(jobs.read_text().splitlines()) == 1
        assert jobs.read_text().startswith("slurm ")


def test_a_cancelled_job_is_queued_again_and_no_more(
    site: Site, door: Door, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.chdir(folder)
    values = settings(site, door, folder)
    values["sites"] = values["sites"][:1]
    values["rule"]["quorum"] = 1
    campaign = checked_campaign(values)
    held = Held(campaign, folder / "campaigns" / campaign.name)
    one_round.begin(held)
    one_round.go_on(held, 1, campaign.sites[0])
    [jobs] = Path(campaign.sites[0].folder).glob("runs/*/jobs.txt")
    first = jobs.read_text().split()[1]
    subprocess.run(["scancel", first], check=True)
    assert federate.run(held) == 0
    assert len(jobs.read_text().splitlines()) == 2


def test_an_unknown_host_key_is_refused(site: Site, door: Door, folder: Path) -> None:
    empty = folder / "known_hosts"
    empty.touch()
    stranger = door._replace(known_hosts=empty)
    campaign = checked_campaign(settings(site, stranger, folder))
    with pytest.raises(Unreachable, match="north does not answer: Host key verification failed"):
        ask(campaign, campaign.sites[0], ["status", "x"])


def test_what_a_verb_there_refuses_is_told_here(site: Site, door: Door, folder: Path) -> None:
    campaign = checked_campaign(settings(site, door, folder))
    with pytest.raises(UserError, match="north: no run at nothing"):
        ask(campaign, campaign.sites[0], ["status", "nothing"])
