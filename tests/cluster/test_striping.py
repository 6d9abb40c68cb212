"""Advice on Lustre is given for large files, and only where it is of use."""

import json

import pytest

from atoll import run_dir
from atoll.cluster import prepare
from atoll.cluster.striping import after_copying, before_copying

GIB = 1 << 30
FILES = {"model/a.safetensors": {"bytes": 5 * GIB}, "tokens/0.bin": {"bytes": 2 * GIB}}
SMALL = {"bundle.txt": {"bytes": 100}}


@pytest.fixture
def lustre(tmp_path, monkeypatch):
    """An `lfs` that knows of so many stripes; none: a file on another file system."""

    def install(stripes):
        program = tmp_path / "lfs"
        answer = f"echo {stripes}" if stripes else "echo no Lustre >&2; exit 1"
        program.write_text(f"#!/bin/sh\n{answer}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


def test_before_copying():
    assert before_copying(SMALL) == ""
    advice = before_copying(FILES | SMALL)
    assert advice.startswith("2 of its files are larger than 1 GiB")
    assert advice.endswith("lfs setstripe -c 5 -S 4M FOLDER")
    assert "-c 16 " in before_copying({"a": {"bytes": 300 * GIB}})


@pytest.mark.parametrize(("stripes", "advised"), [(1, True), (8, False), (None, False)])
def test_after_copying(stripes, advised, lustre, tmp_path):
    lustre(stripes)
    advice = after_copying(tmp_path, FILES | SMALL)
    assert bool(advice) == advised
    if advised:
        assert f"lfs migrate -c 5 -S 4M {tmp_path}/model/a.safetensors" in advice
    assert after_copying(tmp_path, SMALL) == ""


def test_where_there_is_no_lfs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert after_copying(tmp_path, FILES) == ""


def test_a_bundle_that_is_verified_says_it(lustre, tmp_path, capsys, monkeypatch):
    lustre(1)
    monkeypatch.setattr("atoll.cluster.striping.LARGE_BYTES", 3)
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "tokens.bin").write_bytes(b"tokens")
    facts = {"bytes": 6, "sha256": run_dir.sha256_of(bundle / "tokens.bin")}
    manifest = {"files": {"tokens.bin": facts}, "made_for": {}}
    run_dir.write_whole(run_dir.bundle_manifest(bundle), json.dumps(manifest))
    assert prepare.main(["--verify", str(bundle)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "1 files match their sha256"
    assert "lfs migrate -c 2 -S 4M" in said[1]
