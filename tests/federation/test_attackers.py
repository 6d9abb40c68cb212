"""One facility against the others: what it may claim, and what it can never do to them."""

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import made_up
import pytest
import torch
from safetensors.torch import save_file
from test_aggregate import deltas, run, updates
from torch import Tensor

from atoll import run_dir
from atoll.errors import UserError
from atoll.federation import aggregate_command
from atoll.federation.aggregate import aggregate, verified
from atoll.federation.apply_delta import apply_delta
from atoll.federation.cohort import SmallCohort
from atoll.federation.global_model import begin, first_global, read_global, replace_folder
from atoll.federation.judge import Bound, Measured, judge
from atoll.federation.make_delta import make_delta
from atoll.federation.tensors import TensorReader
from atoll.federation.update import Update
from atoll.settings.exchange import read_manifest
from atoll.settings.federation import Rule


def scaled(delta: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: factor * x for name, x in delta.items()}


@pytest.mark.parametrize("factor", [0.0, 1e-9, -1e-9])
def test_a_tiny_update_never_expels_the_honest_one(tmp_path: Path, factor: float) -> None:
    base, honest = made_up.first(tmp_path), made_up.weights(5, 1e-3)
    outcome = run(base, updates(tmp_path, base, [honest, scaled(honest, factor)]), tmp_path / "n")
    assert outcome.rejected == {} and outcome.weights == {"f0": 0.5, "f1": 0.5}


def test_tiny_ones_in_a_majority_expel_nobody_either(tmp_path: Path) -> None:
    """Half of four are zero: the middle of the first round is the larger of two."""
    base, honest = made_up.first(tmp_path), made_up.weights(5, 1e-3)
    given = [honest, scaled(honest, 0.0), scaled(honest, 0.9), scaled(honest, 0.0)]
    assert run(base, updates(tmp_path, base, given), tmp_path / "n").rejected == {}


@pytest.mark.parametrize(
    "factors",
    [
        (1.0, 0.0, 0.9),
        (1.0, 0.0, 0.0),
        (1.0, 1e-9, 1e-9),
        (1.0, 1e-9, -1e-9),
        (1.0, 0.9, 0.0, 0.0, 0.0),
        (1.0, 0.9, 1e-9, -1e-9, 1e-8),
        (1.0, 0.9, 0.8, 0.0, 0.0, 0.0, 0.0),
        (0.0, 0.0, 0.0),
        (1e-9, 0.0, 0.0),
    ],
)
def test_tiny_ones_in_any_majority_expel_nobody(tmp_path: Path, factors: tuple[float, ...]) -> None:
    base, honest = made_up.first(tmp_path), made_up.weights(5, 1e-3)
    given = [scaled(honest, factor) for factor in factors]
    outcome = run(base, updates(tmp_path, base, given), tmp_path / "n")
    assert outcome.rejected == {} and len(outcome.weights) == len(factors)


@pytest.mark.parametrize("factors", [(1.0, 0.0, 1e-9), (1.0, 1e-9, 1e-9), (1.0, 1e-6, 0.0)])
def test_nor_where_the_model_is_zero(tmp_path: Path, factors: tuple[float, ...]) -> None:
    """Its length says nothing then, and no round has been."""
    honest = made_up.weights(5, 1e-3)
    made_up.write_model(tmp_path / "start", scaled(honest, 0.0))
    first_global(tmp_path / "start", base := tmp_path / "global-0", {})
    given = [scaled(honest, factor) for factor in factors]
    outcome = run(base, updates(tmp_path, base, given), tmp_path / "n")
    assert outcome.rejected == {} and len(outcome.weights) == len(factors)


@pytest.mark.parametrize(
    "factors",
    [(1.0, 0.9, 40.0), (1.0, 0.0, 40.0), (1.0, 0.9, 0.0, 0.0, 40.0), (1.0, 0.9, 0.8, 40.0, 40.0),
     (1.0, 0.0, 0.0, 1e5), (1.0, 0.9, 0.8, 0.0, 0.0, 0.0, 0.0, 40.0)],
)  # fmt: skip
def test_beside_tiny_ones_a_long_one_is_known_too(
    tmp_path: Path, factors: tuple[float, ...]
) -> None:
    base, honest = made_up.first(tmp_path), made_up.weights(5, 1e-3)
    given = [scaled(honest, factor) for factor in factors]
    outcome = run(base, updates(tmp_path, base, given), tmp_path / "n")
    assert list(outcome.rejected) == [f"f{n}" for n, x in enumerate(factors) if x > 1.0]


def test_rounds_of_tiny_ones_alone_expel_nobody_later(tmp_path: Path) -> None:
    """The honest one was late for two rounds, in which the others said what is usual."""
    base, honest = made_up.first(tmp_path), made_up.weights(5, 1e-3)
    tiny = [scaled(honest, 1e-9), scaled(honest, 0.9e-9)]
    for number, given in enumerate([tiny, tiny, [*tiny, honest], [honest, tiny[0]]]):
        out = tmp_path / f"n{number}"
        outcome = run(base, updates(tmp_path / str(number), base, given), out)
        assert outcome.rejected == {}, number
        base = out
    given = [honest, scaled(honest, 1e5)]
    outcome = run(base, updates(tmp_path / "last", base, given), tmp_path / "last")
    assert list(outcome.rejected) == ["f1"]


@pytest.mark.parametrize("factor", [40.0, 1e6])
def test_of_two_the_long_one_is_known_by_the_rounds_before(tmp_path: Path, factor: float) -> None:
    base, honest = made_up.first(tmp_path), made_up.weights(5, 1e-3)
    run(base, updates(tmp_path, base, [honest, scaled(honest, 0.8)]), tmp_path / "n")
    assert len(read_global(tmp_path / "n")["norms_before"]) == 1
    later = updates(tmp_path / "b", tmp_path / "n", [honest, scaled(honest, factor)])
    outcome = run(tmp_path / "n", later, tmp_path / "m")
    assert list(outcome.rejected) == ["f1"] and outcome.weights == {"f0": 1.0}


def test_of_two_that_grow_behind_a_warm_up_none_becomes_too_long(tmp_path: Path) -> None:
    base, honest = made_up.first(tmp_path), made_up.weights(5, 1e-4)
    for number, factor in enumerate([1.0, 4.0, 9.0, 30.0, 50.0]):
        given = [scaled(honest, factor), scaled(honest, 0.9 * factor)]
        out = tmp_path / f"n{number}"
        outcome = run(base, updates(tmp_path / str(number), base, given), out)
        assert outcome.rejected == {}, factor
        base = out


@pytest.mark.parametrize("others", [(0.0,), (1e-9,), (5e-3,), (0.0, 0.0), (0.0, 0.0, 1e-9)])
def test_zeros_beside_one_that_grows_do_not_make_it_too_long(
    tmp_path: Path, others: tuple[float, ...]
) -> None:
    base, honest = made_up.first(tmp_path), made_up.weights(5, 1e-4)
    for number in range(12):
        given = [scaled(honest, factor) for factor in (2.0 * number + 1.0, *others)]
        out = tmp_path / f"n{number}"
        outcome = run(base, updates(tmp_path / str(number), base, given), out)
        assert outcome.rejected == {}, number
        base = out


@pytest.mark.parametrize("factor", [2e-3, 5e-3, 2e-2])
def test_a_short_one_alone_in_a_first_round_does_not_make_others_too_long(
    tmp_path: Path, factor: float
) -> None:
    base, honest = made_up.first(tmp_path), made_up.weights(5, 1e-3)
    short = scaled(honest, factor)
    for number, given in enumerate([[short], [honest, short], [scaled(honest, 1.5), short]]):
        out = tmp_path / f"n{number}"
        outcome = run(base, updates(tmp_path / str(number), base, given), out)
        assert outcome.rejected == {}, number
        base = out
    given = [honest, scaled(honest, 40.0)]
    outcome = run(base, updates(tmp_path / "last", base, given), tmp_path / "last")
    assert list(outcome.rejected) == ["f1"]


def test_of_two_one_alone_does_not_change_what_is_usual(tmp_path: Path) -> None:
    """It grows by itself, round by round, or shrinks: the other one is judged as before."""
    base, honest = made_up.first(tmp_path), made_up.weights(5, 1e-3)
    usual = []
    for number, factor in enumerate([1.0, 9.0, 9.0, 1e-6, 9.0]):
        out = tmp_path / f"n{number}"
        given = [honest, scaled(honest, factor)]
        assert run(base, updates(tmp_path / str(number), base, given), out).rejected == {}
        usual.append(read_global(out)["norms_before"]["0"][-1])
        base = out
    assert usual == pytest.approx([usual[0]] * 5)


def test_of_two_in_a_first_round_none_is_longer_than_the_model(tmp_path: Path) -> None:
    base, honest = made_up.first(tmp_path), made_up.weights(5, 1e-3)
    outcome = run(base, updates(tmp_path, base, [honest, scaled(honest, 1e6)]), tmp_path / "n")
    assert list(outcome.rejected) == ["f1"] and outcome.weights == {"f0": 1.0}


def test_a_long_one_does_not_turn_the_others_into_its_opponents(tmp_path: Path) -> None:
    """Five times as long and opposite, it is the sum of the others of each honest one."""
    base, common = made_up.first(tmp_path), made_up.weights(5, 1e-3)
    given = [scaled(common, 1.0), scaled(common, 1.1), scaled(common, -5.0)]
    assert list(run(base, updates(tmp_path, base, given), tmp_path / "n").rejected) == ["f2"]


def mixed(a: dict[str, Tensor], b: dict[str, Tensor], x: float, y: float) -> dict[str, Tensor]:
    return {name: x * a[name] + y * b[name] for name in a}


@pytest.mark.parametrize(("x", "y"), [(-0.98, 0.196), (-1.0, 0.0), (-1.0, 0.01), (-0.9, 0.43)])
def test_one_does_not_turn_the_others_against_one_of_them(
    tmp_path: Path, x: float, y: float
) -> None:
    """Two honest ones without a direction in common: it opposes one and sides with the other."""
    base, one, other = made_up.first(tmp_path), made_up.weights(5, 1e-3), made_up.weights(6, 1e-3)
    given = [one, other, mixed(one, other, x, y)]
    assert "f0" in run(base, updates(tmp_path, base, given), tmp_path / "n").weights


def directions(seed: int, honest: int, common: float) -> Tensor:
    """Honest updates of a cosine to each other, then one that is anything between them."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.eye(honest + 1, dtype=torch.float64)
    values = (1 - common) ** 0.5 * own[1:] + common**0.5 * own[0]
    wrong = torch.randn(honest, generator=generator, dtype=torch.float64) @ values
    long = [0.11, 1.0, 9.0][seed % 3]
    return torch.cat([values, long * wrong[None] / wrong.norm()])


def judged(values: Tensor) -> list[str]:
    """Who is left out, one after the other, as in a round."""
    names = [f"h{n}" for n in range(len(values) - 1)] + ["wrong"]
    out: list[str] = []
    bound = Bound([1.0], lambda: 100.0)
    while True:
        left = [n for n, name in enumerate(names) if name not in out]
        measured = Measured((values @ values.T), [0] * len(values)).only(left)
        refused = judge(measured, [names[n] for n in left], Rule(), bound)
        if not refused:
            return out
        out += refused


@pytest.mark.parametrize("common", [0.0, 0.2, 0.4, 0.8])
@pytest.mark.parametrize("honest", [2, 3, 4])
def test_no_direction_of_one_expels_another(honest: int, common: float) -> None:
    for seed in range(300):
        assert judged(directions(seed, honest, common)) in ([], ["wrong"]), seed


@pytest.mark.parametrize("common", [0.2, 0.4, 0.8])
@pytest.mark.parametrize("honest", [2, 3, 4])
def test_who_opposes_one_of_those_that_agree_is_left_out(honest: int, common: float) -> None:
    values = directions(0, honest, common)
    for wrong in (-values[0], -values[:-1].mean(dim=0)):
        values[-1] = wrong
        assert judged(values) == ["wrong"]


def test_by_default_nobody_has_more_than_half(tmp_path: Path) -> None:
    base, given = made_up.first(tmp_path), deltas(3)
    claims = [made_up.update(tmp_path, base, f"f{n}", d, tokens=10 ** (3 + 6 * (n == 1)))
              for n, d in enumerate(given)]  # fmt: skip
    outcome = run(base, claims, tmp_path / "n", min_cosine=-1.0)
    assert outcome.weights == pytest.approx({"f0": 0.25, "f1": 0.5, "f2": 0.25})


def test_nor_where_the_others_are_late(tmp_path: Path) -> None:
    base, given = made_up.first(tmp_path), deltas(3)
    claims = [made_up.update(tmp_path, base, f"f{n}", d) for n, d in enumerate(given)]
    late = [Update(claim.manifest, claim.folder, 3 * (n > 0)) for n, claim in enumerate(claims)]
    outcome = run(base, late, tmp_path / "n", max_staleness=3, min_cosine=-1.0)
    assert outcome.weights == pytest.approx({"f0": 0.5, "f1": 0.25, "f2": 0.25})


def test_two_of_three_make_a_round_whatever_the_cap_is(tmp_path: Path) -> None:
    base = made_up.first(tmp_path)
    found = updates(tmp_path, base, deltas(2))
    assert run(base, found, tmp_path / "n", cap=0.34).weights == {"f0": 0.5, "f1": 0.5}


def one(folder: Path, codec: str = "fp32") -> tuple[Path, Path]:
    base = made_up.first(folder)
    return base, made_up.update(folder, base, "reef", made_up.weights(1, 1e-3), codec).folder


def claim(folder: Path, **claims: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | claims))


def seal(folder: Path) -> None:
    facts = {
        path.name: {"bytes": path.stat().st_size, "sha256": run_dir.sha256_of(path)}
        for path in folder.glob("*.safetensors")
    }
    claim(folder, files=facts)


def refused(base: Path, folder: Path, found: str, out: Path) -> None:
    """By itself: whether its files or its tensors give it away."""
    began = time.process_time()
    with pytest.raises(UserError, match=found):
        update = verified(folder, [read_global(base)["digest"]])
        aggregate(base, [update], Rule(), "fp32", out, {})
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    "claims",
    [
        {"tokens": 10**400}, {"tokens": 10**18}, {"tokens": "1000"}, {"steps": True},
        {"steps": 1e3}, {"loss": 1e400}, {"image": "x" * 10**5}, {"files": []},
        {"files": {f"{n}.safetensors": {"bytes": 0, "sha256": "0" * 64} for n in range(5000)}},
        {"files": {"a.safetensors\n": {"bytes": 0, "sha256": "0" * 64}}},
    ],
    ids=lambda claims: str(claims)[:40],
)  # fmt: skip
def test_a_manifest_has_types_and_bounds(tmp_path: Path, claims: dict[str, Any]) -> None:
    base, folder = one(tmp_path)
    claim(folder, **claims)
    refused(base, folder, "is no manifest|names the file", tmp_path / "n")


@pytest.mark.parametrize("content", [b"[" * 900_000, b"\xff\xfe{}", b"", b"[]", b'"x"'])
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    base, folder = one(tmp_path)
    (folder / "manifest.json").write_bytes(content)
    refused(base, folder, "is no manifest", tmp_path / "n")


@pytest.mark.parametrize("kind", ["absent", "folder", "pipe", "link", "huge"])
def test_a_manifest_is_a_plain_file_of_some_size(tmp_path: Path, kind: str) -> None:
    base, folder = one(tmp_path)
    path = folder / "manifest.json"
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "huge":
        with open(path, "wb") as file:
            file.truncate(200 << 20)
    refused(base, folder, "cannot read|no plain file", tmp_path / "n")


def rewrite(folder: Path, edit: Any) -> None:
    """Change the header of the first file, and the manifest with it."""
    path = sorted(folder.glob("*.safetensors"))[0]
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    edit(next(about for name, about in header.items() if name != "__metadata__"))
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    seal(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [float("inf")]}, {"shape": [10**400]}, {"shape": [9] * 300_000},
        {"shape": [1.0]}, {"shape": [True]}, {"shape": {"1": 2}}, {"dtype": ["F32"]},
        {"data_offsets": [0, float("inf")]}, {"data_offsets": [-4, 0]}, {"data_offsets": [0]},
        {"data_offsets": [0, 10**400]},
    ],
    ids=lambda x: str(x)[:40],
)  # fmt: skip
def test_numbers_of_a_header_are_whole_and_few(tmp_path: Path, change: dict[str, Any]) -> None:
    base, folder = one(tmp_path)
    rewrite(folder, lambda about: about.update(change))
    refused(base, folder, "header that is not safetensors|is no safetensors", tmp_path / "n")


def test_a_tensor_has_few_dimensions_however_long_a_header_may_be(tmp_path: Path) -> None:
    """Of a model with many tensors: 300,000 of them are numbers that no tensor has."""
    _, folder = one(tmp_path)
    rewrite(folder, lambda about: about.update(shape=[*about["shape"], *[1] * 300_000]))
    with pytest.raises(UserError, match="header that is not safetensors"):
        TensorReader(folder, most=100_000)


def test_what_is_usual_grows_slowly_and_of_few_rounds() -> None:
    bound = Bound([1.0])
    assert bound.after([9.0]) == [1.0, 2.0], "on the word of one alone"
    assert bound.after([9.0, 5.0]) == [1.0, 5.0] and bound.after([9.0, 0.1]) == [1.0, 1.0]
    assert bound.after([]) == [1.0]
    assert bound.after([9.0, 0.009]) == [1.0, 2.0], "who sends nothing does not say"
    assert bound.after([9.0, 5.0, 0.0, 0.0]) == [1.0, 5.0]
    assert Bound().after([9.0]) == [] and Bound().after([9.0, 5.0]) == [9.0]
    for _ in range(40):
        bound = Bound(bound.after([1.0]))
    assert len(bound.before) == 16


@pytest.mark.parametrize("kind", [torch.float16, torch.uint8, torch.float32])
def test_a_tensor_is_there_once_in_all_files(tmp_path: Path, kind: torch.dtype) -> None:
    base, folder = one(tmp_path)
    name = next(iter(TensorReader(folder).entries))
    save_file({name: torch.zeros(1, dtype=kind)}, folder / "zzz.safetensors")
    seal(folder)
    refused(base, folder, "zzz.safetensors has", tmp_path / "n")


def test_more_tensors_than_the_model_has_are_not_read(tmp_path: Path) -> None:
    base, folder = one(tmp_path)
    for number in range(20):
        name = f"x{number}"
        save_file({f"{name}.{n}": torch.zeros(1) for n in range(9)}, folder / f"{name}.safetensors")
    seal(folder)
    refused(base, folder, "more tensors than the 4 of the model", tmp_path / "n")


def test_an_update_is_in_no_more_files_than_the_model(tmp_path: Path) -> None:
    """All files of all updates are open at once: one tensor in each takes them from the others."""
    base, folder = one(tmp_path)
    tensors = made_up.read(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    for number, (name, values) in enumerate(tensors.items()):
        save_file({name: values}, folder / f"{number}.safetensors")
    seal(folder)
    refused(base, folder, "has 4 files, the global model has what is asked in 2", tmp_path / "n")


def header_of(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


LISTS = b'{"__metadata__":{"x":[' + b",".join([b"[]"] * 1_390_000) + b"]}}"
FEW_LISTS = b'{"__metadata__":{"x":[[],[]]}}'
STAYS = b'{"__metadata__":{"stays":"' + b" ".join(b"%x" % n for n in range(600_000)) + b'"}}'
NO_VALUES = b'"dtype":"U8","shape":[0],"data_offsets":[0,0]'
TENSORS = b"{" + b",".join(b'"%x":{%b}' % (n, NO_VALUES) for n in range(70_000)) + b"}"
ODD_METADATA = b'{"a":{%b},"__metadata__":{"format":1}}' % NO_VALUES
NO_METADATA = b'{"a":{%b},"__metadata__":[]}' % NO_VALUES


@pytest.mark.parametrize(
    ("text", "files", "found"),
    [
        (LISTS, 1, "no safetensors file of 8 tensors: too long a header"),
        (LISTS, 6, "too long a header"),
        (STAYS, 6, "too long a header"),
        (TENSORS, 1, "too long a header"),
        (FEW_LISTS, 1, "header that is not safetensors"),
        (ODD_METADATA, 1, "header that is not safetensors"),
        (NO_METADATA, 1, "header that is not safetensors"),
        (b"{}", 1, "header that is not safetensors"),
        (FEW_LISTS, 4000, "4,002 files: empty ones, or more tensors than the 8 of the model"),
    ],
    ids=range(9),
)
def test_headers_are_no_longer_than_the_models_tensors_need(
    tmp_path: Path, text: bytes, files: int, found: str
) -> None:
    base, folder = one(tmp_path, "int8")
    for number in range(files):
        (folder / f"zzz{number}.safetensors").write_bytes(header_of(text))
    seal(folder)
    refused(base, folder, found, tmp_path / "n")


def test_a_folder_of_ones_own_may_have_other_metadata(tmp_path: Path) -> None:
    for number, text in enumerate((FEW_LISTS, ODD_METADATA, b"{}")):
        (tmp_path / f"{number}.safetensors").write_bytes(header_of(text))
    assert list(TensorReader(tmp_path).entries) == ["a"]


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        ({"update": "nesterov", "learning_rate": 4.0}, 3e38),
        ({"learning_rate": 10.0}, 3e38),
        ({"update": "adam", "learning_rate": 0.003}, 1e25),  # its square: no step ever again
        ({"update": "yogi", "learning_rate": 0.003}, 1e25),
    ],
)
def test_finite_values_that_overflow_in_the_step_are_left_out(
    tmp_path: Path, rule: dict[str, Any], value: float
) -> None:
    base, given = made_up.first(tmp_path), deltas(3)
    given[1] = {name: torch.full_like(x, value) for name, x in given[1].items()}
    loose = {"max_norm_ratio": 1e300, "min_cosine": -1.0}
    outcome = run(base, updates(tmp_path, base, given), tmp_path / "n", **loose, **rule)
    assert list(outcome.weights) == ["f0", "f2"] and "overflow" in outcome.rejected["f1"]
    for part in ("master", *(f"memory/{path.name}" for path in (tmp_path / "n").glob("memory/*"))):
        after = made_up.read(tmp_path / "n" / part)
        assert all(bool(torch.isfinite(x).all()) for x in after.values())
    with pytest.raises(SmallCohort, match="overflow"):
        run(base, updates_of(tmp_path, "f1"), tmp_path / "m", **loose, **rule)


def updates_of(folder: Path, name: str) -> list[Update]:
    path = folder / f"update-{name}"
    return [Update(read_manifest(path), path)]


def test_two_updates_of_one_facility_are_not_both_taken(tmp_path: Path) -> None:
    base, given = made_up.first(tmp_path), deltas(2)
    first, other = updates(tmp_path, base, given)
    outcome = run(base, [first, first, other], tmp_path / "n", min_cosine=-1.0)
    assert "two updates" in outcome.rejected["f0"]


def test_what_a_cohort_of_none_leaves_is_said_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The coordinator decides by its rule; `--hold` makes a model that stays as it was."""
    base, folder = one(tmp_path)
    claim(folder, loss="x")
    words = ["--base", str(base), "--out", str(tmp_path / "n")]
    assert aggregate_command.main([str(folder), *words]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["short"].startswith("0 updates are left") and outcome["unreadable"]
    assert not (tmp_path / "n").exists()
    assert aggregate_command.main(["--hold", *words, "--codec", "int8"]) == 0
    assert json.loads(capsys.readouterr().out)["weights"] == {}
    for name, values in made_up.read(base / "master").items():
        assert torch.equal(values, made_up.read(tmp_path / "n" / "master")[name])
    assert (
        apply_delta(base, tmp_path / "n" / "delta", "int8", tmp_path / "theirs")
        == read_global(tmp_path / "n")["digest"]
    )


def test_counts_and_masks_stay_as_they_are(tmp_path: Path) -> None:
    buffers = {"steps": torch.tensor([2**40 + 1]), "mask": torch.tensor([True, False, True])}
    start = made_up.weights(0) | buffers
    first_global(made_up.write_model(tmp_path / "start", start), tmp_path / "base", {})
    trained = {n: x + 1e-3 if x.is_floating_point() else x for n, x in start.items()}
    out, residual = tmp_path / "reef" / "update", tmp_path / "residual"
    made_up.write_model(tmp_path / "trained", trained, files=1)
    make_delta(
        tmp_path / "base", tmp_path / "trained", None, "int8", out, residual, made_up.about("reef")
    )
    update = verified(out, [read_global(tmp_path / "base")["digest"]])
    aggregate(tmp_path / "base", [update], Rule(), "int8", tmp_path / "n", {})
    delta = tmp_path / "n" / "delta"
    digest = apply_delta(tmp_path / "base", delta, "int8", tmp_path / "theirs")
    assert digest == read_global(tmp_path / "n")["digest"]
    for part in ("n/master", "n/export", "theirs/master"):
        values = made_up.read(tmp_path / part)
        assert torch.equal(values["steps"], buffers["steps"]), part
        assert torch.equal(values["mask"], buffers["mask"]), part


def test_a_folder_gets_its_name_whatever_two_kills_left(tmp_path: Path) -> None:
    out = tmp_path / "left"
    for folder in (out, tmp_path / ".left.old"):
        folder.mkdir()
        (folder / "x").touch()
    made = begin(out)
    (made / "new").touch()
    replace_folder(made, out)
    assert [path.name for path in out.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["left"]
