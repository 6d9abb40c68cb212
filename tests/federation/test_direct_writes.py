"""What is written around the page cache is what was given, wherever it lies in its file."""

import errno
import os
import random

import pytest
import torch

from atoll.federation import direct_writes
from atoll.federation.direct_writes import BLOCK_BYTES, PIECE_BYTES, DirectWrites, is_own_disk


@pytest.fixture
def path(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    return tmp_path / "file"


@pytest.mark.login_node  # images have no /dev/full
def test_a_full_disk_is_told_with_the_file():
    file = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match="No space left") as error:
        direct_writes.write_at(file, memoryview(b"12"), 0)
    os.close(file)
    assert error.value.filename == "/dev/full"


def in_parts(path, parts):
    """Write each of (place, bytes) in this order; the file's content afterwards."""
    file = os.open(path, os.O_RDWR)
    with DirectWrites({file: path}) as writes:
        for place, part in parts:
            writes.write(file, torch.frombuffer(bytearray(part), dtype=torch.uint8), place)
    os.close(file)
    return path.read_bytes()


def cut(content, places):
    ends = [*places, len(content)]
    return [(a, content[a:b]) for a, b in zip([0, *places], ends, strict=True)]


@pytest.mark.parametrize("seed", range(6))
def test_a_file_in_parts_of_any_size_in_any_order_is_whole(path, seed):
    drawn = random.Random(seed)
    content = drawn.randbytes(2 * PIECE_BYTES + 12345)
    places = {drawn.randrange(1, len(content)) for _ in range(30)}
    places |= {BLOCK_BYTES * drawn.randrange(1, 500) for _ in range(10)}
    places |= {BLOCK_BYTES * drawn.randrange(1, 500) + 1 for _ in range(10)}
    parts = cut(content, sorted(places))
    drawn.shuffle(parts)
    assert in_parts(path, parts) == content


def test_parts_larger_than_a_piece_and_smaller_than_a_block(path):
    content = random.Random(7).randbytes(3 * PIECE_BYTES + 7)
    assert in_parts(path, cut(content, [3, 5, 8])) == content


def test_what_was_waited_for_can_be_read(path):
    content, file = os.urandom(PIECE_BYTES + 99), os.open(path, os.O_RDWR)
    with DirectWrites({file: path}) as writes:
        writes.write(file, torch.frombuffer(bytearray(content), dtype=torch.uint8), 50)
        writes.wait()
        assert os.pread(file, len(content), 50) == content
    os.close(file)


def test_a_write_that_fails_is_told(path):
    file = os.open(path, os.O_RDONLY)
    content_B = torch.zeros(100, dtype=torch.uint8)
    with pytest.raises(OSError, match="Bad file descriptor"), DirectWrites({file: path}) as writes:
        for place in range(1, 10 * direct_writes.PIECES):
            writes.write(file, content_B, place)
    os.close(file)


def test_where_the_file_system_refuses_it_the_cache_is_used(path, monkeypatch):
    """At once, or with the first write."""
    content, tried = os.urandom(3 * BLOCK_BYTES), []

    def refused(direct, *rest):
        tried.append(direct)
        raise OSError(errno.EINVAL, "Invalid argument")

    original = direct_writes.write_at
    file = os.open(path, os.O_RDWR)
    with monkeypatch.context() as patched:
        patched.setattr(direct_writes.os, "open", refused)
        with DirectWrites({file: path}) as writes:
            writes.write(file, torch.frombuffer(bytearray(content), dtype=torch.uint8), 0)
    assert tried and path.read_bytes() == content
    os.truncate(path, 0)
    with DirectWrites({file: path}) as writes, monkeypatch.context() as patched:
        patched.setattr(
            direct_writes, "write_at", lambda to, *x: (original if to == file else refused)(to, *x)
        )
        writes.write(file, torch.frombuffer(bytearray(content), dtype=torch.uint8), 0)
        writes.wait()
    assert tried[1:] and path.read_bytes() == content
    os.close(file)


@pytest.mark.parametrize(("kind", "own"), [("ext4", True), ("xfs", True), ("nfs4", False)])
def test_a_disk_is_this_machines_own_by_its_file_system(tmp_path, kind, own):
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 0:99 / /else rw - lustre a@tcp:/b rw\n"
        f"22 1 {number} / / rw,noatime shared:1 master:2 - {kind} SOURCE rw\n"
    )
    assert is_own_disk(tmp_path, mounts) is own
