"""`atoll prepare` in a facility's container, on a login node where no run has been."""

import subprocess

import pytest

from atoll.cluster import prepare
from atoll.errors import UserError


def test_a_container_sees_the_bundle_and_nothing_that_is_not_there(here, monkeypatch):
    begun = []

    def run(argv, **_):
        begun.append(argv)
        return subprocess.CompletedProcess(argv, 1)

    monkeypatch.setattr(prepare.subprocess, "run", run)
    monkeypatch.setattr(prepare, "check_image", lambda _: None)
    words = ["facility=generic_slurm", "image=cpu", "image.file=/images/x.sif", "name=x"]
    assert prepare.main(["--into", str(here / "bundle"), *words]) == 1
    [argv] = begun
    binds = [argv[at + 1] for at, word in enumerate(argv) if word == "--bind"]
    assert binds == [str(here / "bundle")]
    assert argv[-2:] == ["fetch", str(here / "bundle")]
    assert not (here / "runs").exists() and not (here / "prepared").exists()


def test_the_same_line_goes_on_where_a_cache_has_appeared(here, monkeypatch):
    """A download makes the folder of its cache, which is bound from then on."""
    cache = here / "hf"
    monkeypatch.setenv("HF_HOME", str(cache))

    def run(argv, **_):
        cache.mkdir(exist_ok=True)
        return subprocess.CompletedProcess(argv, 1)

    monkeypatch.setattr(prepare.subprocess, "run", run)
    words = ["--into", str(here / "bundle"), "facility=laptop", "name=x"]
    assert prepare.main(words) == 1
    assert prepare.main(words) == 1
    with pytest.raises(UserError, match="begun with other settings"):
        prepare.main([*words, "training.steps=3"])
