"""Records a line, when a disk was full in the middle of one."""

import errno
import resource
import signal
from pathlib import Path

import pytest

from atoll import run_dir


def test_a_record_behind_one_that_a_full_disk_cut_short_is_read(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    run_dir.append_record(file, {"step": 1})
    file.write_bytes(file.read_bytes() + b'{"step": 2, "seco')
    assert run_dir.records(file) == [{"step": 1}]
    run_dir.append_record(file, {"step": 3}, is_durable=True)
    run_dir.append_record(file, {"step": 4})
    assert run_dir.records(file) == [{"step": 1}, {"step": 3}, {"step": 4}]
    assert file.read_bytes().endswith(b'"seco\n{"step": 3}\n{"step": 4}\n')
    assert run_dir.records(tmp_path / "none") == []


def test_a_record_is_written_again_where_a_file_system_was_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, codes = run_dir._append, [errno.EIO, errno.ESTALE, errno.EACCES]
    monkeypatch.setattr(run_dir, "AGAIN_SECONDS", (0.0, 0.0))

    def away(path: Path, line: bytes, is_durable: bool) -> None:
        append(path, line[:5] if codes else line, is_durable)
        if codes:
            raise OSError(codes.pop(0), "is away")

    monkeypatch.setattr(run_dir, "_append", away)
    with pytest.raises(OSError, match="is away") as error:
        run_dir.append_record(tmp_path / "x", {"step": 1})
    assert error.value.errno == errno.EACCES, "that does not pass by itself"
    run_dir.append_record(tmp_path / "x", {"step": 2})
    assert run_dir.records(tmp_path / "x") == [{"step": 2}]


@pytest.mark.login_node  # images have no /dev/full
def test_a_full_disk_says_which_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write knows no name, and a person is told of one."""
    full = OSError(errno.ENOSPC, "No space left on device")

    def fails(*_: object) -> None:
        raise full

    with pytest.raises(OSError, match="No space left") as error:
        run_dir.append_record(Path("/dev/full"), {"step": 1})
    assert error.value.filename == "/dev/full"
    monkeypatch.setattr(run_dir.os, "fsync", fails)
    with pytest.raises(OSError, match="No space left") as error:
        run_dir.write_whole(tmp_path / "journal", "x")
    assert error.value.filename == str(tmp_path / "journal") and not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_also_after_a_part_of_a_record(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            run_dir.append_record(tmp_path / "x", {"step": 123456})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "x").stat().st_size == 10
