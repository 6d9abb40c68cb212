"""What may come in an update's folder instead of an update, and that all of it is named."""

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_up
import pytest

from atoll import run_dir
from atoll.errors import UserError
from atoll.federation.aggregate import verified
from atoll.federation.global_model import read_global
from atoll.federation.tensors import TensorReader
from atoll.federation.update import Update


@pytest.fixture
def given(tmp_path: Path) -> tuple[Update, str]:
    base = made_up.first(tmp_path)
    update = made_up.update(tmp_path, base, "reef", made_up.weights(1, 1e-3))
    return update, read_global(base)["digest"]


def first_file(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def change(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    run_dir.write_whole(path, json.dumps(manifest))


def truncate(folder: Path) -> None:
    path = first_file(folder)
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_bit(folder: Path) -> None:
    path = first_file(folder)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def pickled(folder: Path) -> None:
    (folder / "model.bin").write_bytes(pickle.dumps({"a": 1}))


def outside(folder: Path) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        manifest["files"]["../outside.safetensors"] = next(iter(manifest["files"].values()))

    change(folder, edit)


def linked(folder: Path) -> None:
    path = first_file(folder)
    path.rename(folder.parent / "elsewhere.safetensors")
    path.symlink_to(folder.parent / "elsewhere.safetensors")


def another_base(folder: Path) -> None:
    change(folder, lambda manifest: manifest.update(base="0" * 64))


def no_loss(folder: Path) -> None:
    change(folder, lambda manifest: manifest.update(loss=float("nan")))


def unknown_key(folder: Path) -> None:
    change(folder, lambda manifest: manifest.update(_target_="os.system"))


def not_json(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100_000)


ATTACKS = [
    (truncate, r"bytes, not"),
    (flip_a_bit, "the manifest says"),
    (pickled, "is not in the manifest"),
    (outside, "names the file '../outside.safetensors'"),
    (linked, "or no plain file"),
    (another_base, "began from 000000000000"),
    (no_loss, "is no manifest: loss"),
    (unknown_key, "is no manifest: _target_"),
    (not_json, "is no manifest"),
]


@pytest.mark.parametrize(("attack", "found"), ATTACKS, ids=lambda x: getattr(x, "__name__", ""))
def test_attacks_are_named(given: tuple[Update, str], attack: Any, found: str) -> None:
    update, base = given
    assert verified(update.folder, [base]).manifest == update.manifest
    attack(update.folder)
    with pytest.raises(UserError, match=found):
        verified(update.folder, [base])


def header(content: Any, length: int | None = None) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


def tensor(begin: int, end: int, shape: list[int]) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "is no safetensors file"),
        (header({}, length=1 << 60), "its header claims"),
        (header(b"{" * 100), "header that is not safetensors"),
        (header([1, 2]), "header that is not safetensors"),
        (header({"a": tensor(0, 8, [1])}) + b"\0" * 8, "header that is not safetensors"),
        (header({"a": tensor(0, -4, [-1])}), "header that is not safetensors"),
        (header({"a": tensor(0, 4, [1]), "b": tensor(0, 4, [1])}) + b"\0" * 4, "overlaps"),
        (header({"a": tensor(0, 4, [1])}) + b"\0" * 9, "its header says"),
        (header({"../../a": tensor(0, 4, [1])}) + b"\0" * 4, r"names a tensor '../../a'"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "delta.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=found):
        TensorReader(path.parent, [path.name])
