"""Two facilities on this machine: two Slurms, each with its own user, reached over real ssh."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from testbed import CLUSTERS
from testbed_site import ROOT, TINY, Site

TEXTS = {"testbed": "data-*.txt", "east": "cluster-*.txt"}


class Door(NamedTuple):
    """How to get in: a port of this machine, a key, and the hosts that are known."""

    port: int
    key: Path
    known_hosts: Path
    server: int  # the process that listens

    @property
    def options(self) -> list[str]:
        known = f"UserKnownHostsFile={self.known_hosts}"
        return ["-p", str(self.port), "-i", str(self.key), "-o", known, "-o", "IdentityAgent=none"]


@contextmanager
def ssh_server(site: Site) -> Iterator[Door]:
    """An ssh server of our own, with keys of its own."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    assert server is not None, "make testbed installs openssh-server"
    folder = site.clone.parent / "ssh"  # sshd reads the allowed keys as the one who logs in
    folder.mkdir()
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
        "PidFile": "none",
    }
    lines = [f"{name} {value}\n" for name, value in options.items()]
    for cluster in CLUSTERS:  # as a login node's profile would
        lines.append(f"Match User {cluster.user}\n")
        lines.append(f"SetEnv SLURM_CONF={cluster.settings / 'slurm.conf'}\n")
    config = folder / "sshd_config"
    config.write_text("".join(lines))
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
        yield Door(port, folder / "user", known, running.pid)
    finally:
        running.terminate()
        running.wait()


def login_node_python(site: Site) -> Path:
    """A Python that every user may start, with what a login node needs: nothing of torch."""
    folder, locks = site.clone.parent / "host", ROOT / "containers" / "locks"
    steps = [["/usr/bin/python3", str(ROOT / "setup" / "virtual_environment.py"), str(folder)]]
    for lock in ("build", "host"):
        pip = [str(folder / "bin" / "python"), "-Im", "pip", "install", "--quiet", "--no-deps"]
        steps.append([*pip, "--no-build-isolation", "-r", str(locks / f"{lock}.txt")])
    for step in steps:
        subprocess.run(step, check=True)
    return folder / "bin" / "python"


@contextmanager
def two_facilities(site: Site, door: Door, host_python: Path) -> Iterator[dict[str, Any]]:
    """The settings of a campaign; each facility keeps its part in its user's home."""
    place = f"campaign-{time.monotonic_ns()}"
    texts = site.clone / "texts"
    own = [word for word in site.settings if not word.startswith(("data.files", "training.global"))]
    of_model = tuple(word for word in TINY if word.startswith(("model", "tokenizer")))
    train = [word for word in own if word not in of_model]
    start = [word for word in own if not word.startswith("image.")]
    laptop = ["facility=laptop", "ranks_per_node=1", "sharding=single"]
    sites = [
        {
            "name": cluster.name,
            "host": f"{cluster.user}@127.0.0.1",
            "folder": place,
            "command": ["env", f"PYTHONPATH={site.clone}/src", str(host_python), "-m", "atoll"],
            "overrides": [
                *("facility=testbed", "nodes=1", "launcher=static_node"),
                f"image.file={site.image}",
                f"data.files=[{texts}/{TEXTS[cluster.name]}]",
            ],
        }
        for cluster in CLUSTERS
    ]
    here = site.clone.parent / place
    here.mkdir()
    for cluster in CLUSTERS:  # what lies outside the campaign's folder is each facility's to allow
        own = home(cluster.user) / place
        own.mkdir()
        (own / "site.allow").write_text("default\nimage.*\ndata.files\nfacility.node.peak_tflops\n")
        for path in (own, own / "site.allow"):
            shutil.chown(path, cluster.user)
    yield {
        "name": "islands",
        "rounds": 1,
        "folder": str(here / "campaigns"),
        "sites": sites,
        "start": [*laptop, *start, f"data.files=[{texts}/data-*.txt]"],
        "train": [*train, "checkpoint.every_steps=0"],
        "steps": 4,
        "batch_samples": 8,
        "poll_seconds": 3,  # to ask takes the processors a second from the runs
        "rule": {"max_norm_ratio": 100, "quorum": 2},
        "ssh_options": door.options,
    }
    for cluster in CLUSTERS:
        subprocess.run(["pkill", "-u", cluster.user, "-f", "atoll site"])  # of one that was killed
        shutil.rmtree(home(cluster.user) / place, ignore_errors=True)


def home(user: str) -> Path:
    return Path(os.path.expanduser(f"~{user}"))


def coordinator(
    values: dict[str, Any], output: int | IO[str] = subprocess.PIPE
) -> subprocess.Popen[str]:
    """`atoll federate` with these settings, in a process that can be killed."""
    code = (
        "import json,sys; from pathlib import Path; from atoll.campaign.coordinator import run;"
        "from atoll.campaign.store import CampaignStore, checked_campaign;"
        "c=checked_campaign(json.loads(sys.argv[1]));"
        "sys.exit(run(CampaignStore(c,Path(c.folder)/c.name)))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(values)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )
