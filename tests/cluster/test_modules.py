"""Where the container's program is a module: what is typed outside of a job loads it, too."""

import shlex
import subprocess
import sys

import pytest

from atoll.__main__ import main
from atoll.cluster import modules, prepare
from atoll.cluster.launchers import atoll_command
from atoll.cluster.modules import atoll_outside_jobs
from atoll.errors import UserError

IMAGE = ("facility=meluxina", "model=llama_tiny", "image.file=/x.sif")


def test_a_command_outside_a_job_loads_the_containers_module(composed, tmp_path, monkeypatch):
    """Over ssh, as a campaign asks a facility, no profile has loaded it."""
    program = tmp_path / "Apptainer" / "apptainer"
    program.parent.mkdir()
    program.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    system = tmp_path / "profile"
    found = shlex.quote(str(tmp_path))
    system.write_text(f"module() {{ [[ $1 != load ]] || PATH={found}/${{2%/*}}:$PATH; }}\n")
    monkeypatch.setattr(modules, "MODULE_SYSTEM", f"source {shlex.quote(str(system))}\n")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(modules.shutil, "which", lambda name: None)
    run = composed(*IMAGE).run
    done = subprocess.run([*atoll_outside_jobs(run), "a b"], capture_output=True, text=True)
    assert done.stdout.splitlines() == [*atoll_command(run)[1:], "a b"], done.stderr


def test_where_the_program_is_there_nothing_is_loaded(composed, monkeypatch):
    monkeypatch.setattr(modules.shutil, "which", lambda name: f"/usr/bin/{name}")
    run = composed(*IMAGE).run
    assert atoll_outside_jobs(run) == atoll_command(run)
    without = composed("facility=meluxina", "model=llama_tiny", "image=none").run
    monkeypatch.setattr(modules.shutil, "which", lambda name: None)
    assert atoll_outside_jobs(without) == atoll_command(without)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_cache_is_made_before_a_container_binds_it(is_there, composed, tmp_path, monkeypatch):
    """One that only compute nodes have is left out: no container begins without what it binds."""
    monkeypatch.setattr(modules.shutil, "which", lambda name: name if is_there else None)
    monkeypatch.setattr(modules, "MODULE_SYSTEM", "module() { apptainer() { :; }; }\n")
    monkeypatch.setattr("atoll.config.binds.NODES_OWN", ())  # pytest's folders are in /tmp
    (tmp_path / "local_scratch").touch()
    caches = f"HF_HOME: {tmp_path}/own/hf, HF_HUB_CACHE: {tmp_path}/local_scratch/hf"
    node_folder = f"facility.node_folder={tmp_path}/node_scratch"
    argv = atoll_outside_jobs(composed(*IMAGE, node_folder, f"folders.caches={{{caches}}}").run)
    binds = [argv[at + 1] for at, word in enumerate(argv) if word == "--bind"]
    assert (tmp_path / "own" / "hf").is_dir() and f"{tmp_path}/own/hf" in binds
    assert not any("_scratch" in bind for bind in binds)


def test_without_an_image_no_cache_is_made(composed, tmp_path):
    words = ("facility=meluxina", "model=llama_tiny", "image=none")
    atoll_outside_jobs(composed(*words, f"folders.caches={{HF_HOME: {tmp_path}/hf}}").run)
    assert not (tmp_path / "hf").exists()


def test_a_program_that_is_nowhere_is_said_before_anything_is_written(
    composed, tmp_path, monkeypatch
):
    monkeypatch.setattr(modules, "MODULE_SYSTEM", "module() { :; }\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    run = composed(*IMAGE).run
    assert atoll_outside_jobs(run) == [sys.executable, "-m", "atoll"], "which has torch here"
    monkeypatch.setattr(modules, "find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        atoll_outside_jobs(run)
    said = "no apptainer on this machine's PATH, nor after module load Apptainer/1.3.6"
    assert error.value.found.startswith(said)
    monkeypatch.setattr(prepare, "check_image", lambda run: None)
    words = ["prepare", "--into", str(tmp_path / "b"), *IMAGE]
    assert main(words) == 2
    assert not (tmp_path / "b").exists()
