"""Joules of jobs: asked of sacct once for all, and none where Slurm measures none."""

import stat

import pytest

from atoll.cluster.status import slurm_energy

JOBS = [("slurm", "8"), ("pbs", "7.host"), ("slurm", "9")]


@pytest.fixture
def sacct(tmp_path, monkeypatch):
    """A sacct that prints these lines and notes what it was asked."""

    def say(text: str | None) -> None:
        path = tmp_path / "sacct"
        words = f"echo \"$@\" >> {tmp_path}/asked; printf '{text}'"
        path.write_text(f"#!/bin/sh\n{words if text is not None else 'exit 1'}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path))

    return say


def test_all_starts_of_all_jobs_add_up(sacct, tmp_path):
    sacct("1200\\n300\\n0\\n4500\\n")
    assert slurm_energy(JOBS) == (6000.0, "measured: Slurm")
    asked = (tmp_path / "asked").read_text().splitlines()
    [argv] = (line.split() for line in asked)
    flags = ["--noheader", "--parsable2", "--allocations", "--duplicates", "--jobs=8,9"]
    assert sorted(argv) == sorted([*flags, "--format=ConsumedEnergyRaw"])


@pytest.mark.parametrize("text", ["", "0\\n0\\n", "\\n\\n", "18446744073709551614\\n", None])
def test_no_figure(sacct, text):
    sacct(text)
    assert slurm_energy(JOBS) is None


def test_what_is_not_known_is_not_counted(sacct):
    sacct("18446744073709551614\\n\\n25\\n")
    assert slurm_energy(JOBS) == (25.0, "measured: Slurm")


def test_nobody_is_asked_about_other_jobs(sacct, tmp_path):
    sacct("5\\n")
    assert slurm_energy([("pbs", "7.host")]) is None
    assert slurm_energy([]) is None
    assert not (tmp_path / "asked").exists()


def test_a_machine_without_sacct(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm_energy(JOBS) is None
