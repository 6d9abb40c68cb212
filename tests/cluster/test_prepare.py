"""`atoll prepare` in a facility's container, on a login node where no run has been."""

import subprocess

from atoll.cluster import prepare


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
