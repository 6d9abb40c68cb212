"""Mutations of valid updates: each is taken or refused, soon and in little memory."""

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import made_up
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll import run_dir
from atoll.errors import UserError
from atoll.federation.aggregate import aggregate, verified
from atoll.federation.codec import CODECS
from atoll.federation.cohort import SmallCohort
from atoll.federation.global_model import read_global
from atoll.federation.tensors import TensorReader
from atoll.settings.federation import Rule

MOST_SECONDS, MOST_BYTES = 1.0, 256 << 20
SCALARS: list[Any] = [
    None, True, 0, -1, 1, 7, 10**400, 2**63, 2**53, 0.5, 1e308, float("inf"), float("nan"), "", "a",
    "\x1b[2J", "../x.safetensors", "0" * 64, [], {}, [[[]]], {"a": {"b": 1}}, [9] * 300, "F16",
]  # fmt: skip
WHERE = ("manifest", "header")
CHANGES = st.tuples(st.sampled_from(WHERE), st.integers(0, 10**6), st.sampled_from(SCALARS))
BYTES = st.tuples(
    st.sampled_from(["manifest", "file"]),
    st.sampled_from(["cut", "flip", "insert", "repeat"]),
    st.integers(0, 10**6),
    st.binary(min_size=1, max_size=16),
)
BESIDE = st.sampled_from(
    ["pipe", "link", "folder", "other", "none", "twice", "gone", "lists", "names", "files"]
)
LISTS = b'{"__metadata__":{"x":[' + b",".join([b"[]"] * 1_390_000) + b"]}}"
NAMES = b'{"__metadata__":{"stays":"' + b" ".join(b"%x" % n for n in range(600_000)) + b'"}}'


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A global model, and the folder of an update of it in each encoding."""
    folder = tmp_path_factory.mktemp("fuzz")
    base = made_up.first(folder)
    for codec in CODECS:
        made_up.update(folder / codec, base, "reef", made_up.weights(1, 1e-3), codec)
    return base, folder


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in a JSON value."""
    if not isinstance(value, dict | list):
        return []
    children = value.items() if isinstance(value, dict) else enumerate(value)
    return [
        place
        for name, child in children
        for place in [(*path, name), *places(child, (*path, name))]
    ]


def changed(value: Any, number: int, new: Any) -> None:
    """Put another value at one of the places, or a new name beside it."""
    every = places(value)
    if not every:
        return
    *path, last = every[number % len(every)]
    for name in path:
        value = value[name]
    value[last] = new
    if isinstance(value, dict) and number % 5 == 0:
        value[f"{last}x"] = new


def header_of(content: bytes) -> tuple[Any, bytes]:
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header: Any, rest: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + rest


def scarred(content: bytes, how: str, place: int, more: bytes) -> bytes:
    at = place % max(1, len(content))
    return {
        "cut": content[:at],
        "flip": content[:at] + bytes(b ^ 0xA5 for b in content[at : at + 1]) + content[at + 1 :],
        "insert": content[:at] + more + content[at:],
        "repeat": content[:at] + content[at : at + 4000] * 3 + content[at:],
    }[how]


def with_files(folder: Path, count: int, text: bytes) -> None:
    for number in range(count):
        path = folder / f"zzz{number}.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text)


def put_beside(folder: Path, what: str) -> None:
    target = sorted(folder.glob("*.safetensors"))[0]
    acts: dict[str, Callable[[], Any]] = {
        "pipe": lambda: (target.unlink(), os.mkfifo(target)),
        "link": lambda: (target.unlink(), target.symlink_to("/dev/zero")),
        "folder": lambda: (target.unlink(), target.mkdir()),
        "other": lambda: (folder / "a.bin").write_bytes(b"x"),
        "twice": lambda: shutil.copy(target, folder / "zzz.safetensors"),
        "gone": target.unlink,
        "lists": lambda: with_files(folder, 3, LISTS),
        "names": lambda: with_files(folder, 3, NAMES),
        "files": lambda: with_files(folder, 300, b"{}"),
        "none": lambda: None,
    }
    acts[what]()


def sealed(folder: Path) -> None:
    """Sizes and digests as they are, so that what is behind them is reached."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        paths = [path for path in sorted(folder.glob("*.safetensors")) if path.is_file()]
        facts = {p.name: {"bytes": p.stat().st_size, "sha256": run_dir.sha256_of(p)} for p in paths}
        manifest["files"] = facts
        (folder / "manifest.json").write_text(json.dumps(manifest))
    except (ValueError, TypeError, RecursionError):
        return


def mutate(folder: Path, changes: list[Any], scars: list[Any], beside: str, seal: bool) -> None:
    target = sorted(folder.glob("*.safetensors"))[0]
    for where, number, new in changes:
        path = folder / "manifest.json"
        if where == "manifest":
            manifest = json.loads(path.read_text())
            changed(manifest, number, new)
            path.write_text(json.dumps(manifest))
        else:
            header, rest = header_of(target.read_bytes())
            changed(header, number, new)
            target.write_bytes(with_header(header, rest))
    for where, *how in scars:
        path = folder / "manifest.json" if where == "manifest" else target
        path.write_bytes(scarred(path.read_bytes(), *how))
    if beside != "pipe" and seal:
        put_beside(folder, beside)
        sealed(folder)
    else:
        put_beside(folder, beside)


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def judged(base: Path, folder: Path, out: Path) -> None:
    """Taken or refused, within the bounds; any other exception goes up."""
    Path("/proc/self/clear_refs").write_text("5")
    before, began = peak_bytes(), time.process_time()
    with suppress(UserError), TensorReader(folder, most=1000):
        pass  # `aggregate` takes whatever a file raises for a refusal
    try:
        update = verified(folder, [read_global(base)["digest"]])
        aggregate(base, [update], Rule(), "int8", out, {})
    except SmallCohort as error:
        assert error.found
    except UserError as error:
        assert error.found
    assert time.process_time() - began < MOST_SECONDS
    assert peak_bytes() - before < MOST_BYTES


def fuzzed(count: int) -> Callable[..., None]:
    @settings(
        max_examples=count, deadline=None, database=None, derandomize=count < 1000,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(
        st.sampled_from(sorted(CODECS)), st.lists(CHANGES, max_size=3), st.lists(BYTES, max_size=2),
        BESIDE, st.booleans(),
    )  # fmt: skip
    def attack(
        original: tuple[Path, Path], codec: str, changes: Any, scars: Any, beside: str, seal: bool
    ) -> None:
        base, updates = original
        update = updates / codec / "update-reef"
        folder = update.parent / "mutated"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(update, folder)
        mutate(folder, changes, scars, beside, seal)
        judged(base, folder, updates / "next")

    return attack


def test_hundreds_of_mutations_are_taken_or_refused(original: tuple[Path, Path]) -> None:
    fuzzed(200)(original)


@pytest.mark.full
def test_ten_thousand_mutations_are_taken_or_refused(original: tuple[Path, Path]) -> None:
    fuzzed(10_000)(original)
