"""Which parameters go into which file, and how an export takes the place of an older one."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atoll.models import export
from atoll.models.safetensor_files import write_tensors

SIZES = {"a": 60, "b": 30, "c": 30, "d": 5, "e": 200}


def wide(_: str) -> torch.dtype:
    return torch.float32


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("limit", [10, 100, 1000])
def test_every_parameter_is_in_one_file_of_bounded_size(ranks: int, limit: int) -> None:
    files = export.plan_files(SIZES, limit, ranks)
    assert [name for names in files for name in names] == list(SIZES)
    assert all(len(names) == 1 or sum(SIZES[n] for n in names) <= limit for names in files)
    assert len(files) >= min(ranks, 3), "all ranks take part where there is enough to write"


def test_only_the_owner_writes(tmp_path: Path) -> None:
    parameters = {"a": torch.arange(6.0), "b": torch.ones(2, 2)}
    files = [["a"], ["b"]]
    numbered = export.Numbered(0, 2)
    types = {"a": torch.float32, "b": torch.float16}
    export.write_weights(tmp_path, parameters, types.__getitem__, files, numbered, rank=1, ranks=2)
    assert [p.name for p in tmp_path.iterdir()] == ["model-00002-of-00002.safetensors"]
    loaded = load_file(tmp_path / "model-00002-of-00002.safetensors")
    assert loaded["b"].dtype == torch.float16 and loaded["b"].tolist() == [[1, 1], [1, 1]]


def test_other_ranks_files_are_gathered_while_a_rank_writes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = {"own": torch.arange(6.0), "of_another": torch.ones(2, 2)}
    gathered = threading.Event()

    def whole(parameter: torch.Tensor) -> torch.Tensor:
        if parameter is parameters["of_another"]:
            gathered.set()
        return parameter

    def written_late(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        assert gathered.wait(20)
        return write_tensors(path, tensors)

    monkeypatch.setattr(export, "full_tensor", whole)
    monkeypatch.setattr(export, "write_tensors", written_late)
    files, numbered = [["own"], ["of_another"]], export.Numbered(0, 2)
    facts = export.write_weights(tmp_path, parameters, wide, files, numbered, 0, 2)
    assert list(facts) == ["model-00001-of-00002.safetensors"]
    assert load_file(tmp_path / "model-00001-of-00002.safetensors")["own"].tolist() == [*range(6)]


def test_a_new_export_replaces_the_old_one_whole(tmp_path: Path) -> None:
    final = tmp_path / "export"
    for content in ("one", "two"):
        partial = export.start(final)
        (partial / content).write_text(content)
        export.publish(partial, final)
        assert [p.name for p in final.iterdir()] == [content]
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_a_rank_that_cannot_write_goes_on_gathering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[int] = []

    def whole(parameter: torch.Tensor) -> torch.Tensor:
        gathered.append(parameter.numel())
        return parameter

    monkeypatch.setattr(export, "full_tensor", whole)
    parameters = {name: torch.ones(size) for name, size in SIZES.items()}
    files = [[name] for name in SIZES]
    missing, numbered = tmp_path / "missing", export.Numbered(0, len(files))
    with pytest.raises(OSError, match="missing"):
        export.write_weights(missing, parameters, wide, files, numbered, rank=0, ranks=1)
    assert gathered == list(SIZES.values())
