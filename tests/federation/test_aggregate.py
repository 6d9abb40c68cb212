"""The next global model against plain arithmetic and against torch.optim; attacks left out."""

import json
import math
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import made_up
import pytest
import torch
from torch import Tensor

from atoll.errors import UserError
from atoll.federation import aggregate as module
from atoll.federation.aggregate import Outcome, aggregate, hold, verified
from atoll.federation.apply_delta import apply_delta
from atoll.federation.global_model import first_global, read_global
from atoll.federation.next_model import not_finite
from atoll.federation.update import Update
from atoll.models.safetensor_files import INDEX
from atoll.settings.federation import Rule

LOOSE = {"max_norm_ratio": 1e9, "min_cosine": -1.0}


def deltas(count: int) -> list[dict[str, Tensor]]:
    return [made_up.weights(seed + 10, 1e-3) for seed in range(count)]


def updates(folder: Path, base: Path, given: list[dict[str, Tensor]], **more: Any) -> list[Update]:
    return [
        made_up.update(folder, base, f"f{n}", delta, tokens=1000 * (n + 1), steps=n + 1, **more)
        for n, delta in enumerate(given)
    ]


def run(base: Path, found: list[Update], out: Path, codec: str = "fp32", **rule: Any) -> Outcome:
    return aggregate(base, found, Rule(**rule), codec, out, {"round": 1})


def stacked(given: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([d[name] for d in given]).double() for name in given[0]}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({}, lambda x: (x * shares(1, 2, 3, x)).sum(0)),
        ({"weigh": "steps"}, lambda x: (x * shares(1, 2, 3, x)).sum(0)),
        ({"weigh": "equal"}, lambda x: x.mean(0)),
        ({"weigh": "capped", "cap": 0.4}, lambda x: (x * shares(1, 2, 2, x)).sum(0)),
        ({"combine": "median"}, lambda x: x.median(0).values),
        ({"combine": "trimmed_mean", "trim": 1}, lambda x: x.median(0).values),
        ({"learning_rate": 0.5, "weigh": "equal"}, lambda x: 0.5 * x.mean(0)),
    ],
)
def test_rules_against_plain_arithmetic(
    tmp_path: Path, rule: dict[str, Any], expected: Any
) -> None:
    base, given = made_up.first(tmp_path), deltas(3)
    run(base, updates(tmp_path, base, given), tmp_path / "next", **LOOSE, **rule)
    start, found = made_up.read(base / "master"), made_up.read(tmp_path / "next" / "master")
    half = made_up.read(tmp_path / "next" / "export")
    for name, values in stacked(given).items():
        wanted = start[name].double() + expected(values)
        torch.testing.assert_close(found[name].double(), wanted, atol=2e-8, rtol=1e-6)
        assert torch.equal(half[name], found[name].to(torch.bfloat16))


def shares(a: float, b: float, c: float, like: Tensor) -> Tensor:
    weights = torch.tensor([a, b, c], dtype=torch.float64)
    if (a, b, c) == (1, 2, 2):  # a third and a half are capped at 0.4, the rest is a sixth's
        weights = torch.tensor([0.2, 0.4, 0.4], dtype=torch.float64)
    return (weights / weights.sum()).view(3, *[1] * (like.ndim - 1))


def test_clipping_shortens_the_long_one(tmp_path: Path) -> None:
    base, given = made_up.first(tmp_path), deltas(2)
    given[1] = {name: 5 * x for name, x in given[1].items()}
    lengths = [torch.cat([x.flatten() for x in one.values()]).norm() for one in given]
    limit = float(lengths[0]) * 1.5
    found = run(
        base, updates(tmp_path, base, given), tmp_path / "next", weigh="equal", clip_norm=limit
    )
    assert not found.rejected
    start, after = made_up.read(base / "master"), made_up.read(tmp_path / "next" / "master")
    for name in start:
        wanted = (given[0][name] + given[1][name] * (limit / lengths[1])) / 2
        torch.testing.assert_close(after[name] - start[name], wanted, atol=1e-8, rtol=1e-3)


def test_clipping_has_the_same_bits_on_other_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose library adds up products in another order; else a proof made elsewhere would fail."""
    base, given = made_up.first(tmp_path), deltas(2)
    found = updates(tmp_path, base, given)
    run(base, found, tmp_path / "here", clip_norm=0.01)
    measured = module._measured

    def elsewhere(values_KN: Tensor) -> tuple[Tensor, Tensor]:
        gram_KK, not_finite_K = measured(values_KN)
        return gram_KK * (1 + 1e-6), not_finite_K

    monkeypatch.setattr(module, "_measured", elsewhere)
    run(base, found, tmp_path / "there", clip_norm=0.01)
    here, there = read_global(tmp_path / "here"), read_global(tmp_path / "there")
    assert here["digest"] == there["digest"] and here["norms"] != there["norms"]
    run(base, found, tmp_path / "unclipped")
    assert read_global(tmp_path / "unclipped")["digest"] != here["digest"]


def test_krum_takes_the_one_in_the_middle(tmp_path: Path) -> None:
    base, common = made_up.first(tmp_path), made_up.weights(5, 1e-3)
    given = [
        {name: x + spread * made_up.weights(20 + n, 1e-3)[name] for name, x in common.items()}
        for n, spread in enumerate((0.1, 0.01, 0.1, 2.0))
    ]
    found = run(
        base, updates(tmp_path, base, given), tmp_path / "next", combine="krum", krum_bad=0, **LOOSE
    )
    assert found.weights == {"f0": 0.0, "f1": 1.0, "f2": 0.0, "f3": 0.0}
    with pytest.raises(UserError, match="krum needs at least 5 updates, 4 are there"):
        run(base, updates_again(tmp_path), tmp_path / "x", combine="krum", krum_bad=1, **LOOSE)


def updates_again(folder: Path) -> list[Update]:
    from atoll.federation.update import read_manifest

    return [Update(read_manifest(path), path) for path in sorted(folder.glob("update-*"))]


@pytest.mark.parametrize("server", ["momentum", "nesterov", "adam", "yogi"])
def test_server_steps_over_rounds(tmp_path: Path, server: str) -> None:
    """Against torch.optim.SGD where it has the step, else against the paper's lines."""
    base, rule = made_up.first(tmp_path), {"update": server, "learning_rate": 0.7, "beta1": 0.9}
    start = made_up.read(base / "master")
    parameters = {name: x.double().clone().requires_grad_() for name, x in start.items()}
    oracle = torch.optim.SGD(
        list(parameters.values()), lr=0.7, momentum=0.9, nesterov=server == "nesterov"
    )
    m = {name: torch.zeros_like(p) for name, p in parameters.items()}
    v = {name: torch.full_like(p, 1e-6) for name, p in parameters.items()}
    for number in range(3):
        folder = tmp_path / f"round-{number}"
        given = [made_up.weights(50 + number, 1e-3)]
        out = folder / "next"
        run(base, updates(folder, base, given), out, **rule)
        for name, p in parameters.items():
            delta = given[0][name].double()
            p.grad = -delta
            m[name] = 0.9 * m[name] + 0.1 * delta
            if server == "adam":
                v[name] = 0.99 * v[name] + 0.01 * delta**2
            else:
                v[name] = v[name] - 0.01 * delta**2 * torch.sign(v[name] - delta**2)
        if server in ("momentum", "nesterov"):
            oracle.step()
        else:
            with torch.no_grad():
                for name, p in parameters.items():
                    p += 0.7 * m[name] / (v[name].sqrt() + 1e-3)
        base = out
    for name, found in made_up.read(base / "master").items():
        torch.testing.assert_close(found.double(), parameters[name].detach(), atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize(("name", "codec"), [("momentum", "fp32"), ("residual", "int8")])
@pytest.mark.parametrize("gone", ["folder", "files"])
def test_a_memory_that_is_gone_does_not_begin_anew(
    tmp_path: Path, name: str, codec: str, gone: str
) -> None:
    base, rule = made_up.first(tmp_path), {"update": "nesterov"}
    run(base, updates(tmp_path, base, deltas(2)), tmp_path / "global-1", codec, **rule)
    folder = tmp_path / "global-1" / "memory" / name
    for path in folder.iterdir():
        path.unlink()
    if gone == "folder":
        folder.rmdir()
    found = updates(tmp_path / "2", tmp_path / "global-1", deltas(2))
    with pytest.raises(UserError, match=f"memory/{name} is gone"):
        run(tmp_path / "global-1", found, tmp_path / "global-2", codec, **rule)
    with pytest.raises(UserError, match=f"memory/{name} is gone"):
        hold(tmp_path / "global-1", Rule(**rule), codec, tmp_path / "global-2", {})
    assert not (tmp_path / "global-2").exists()


def test_an_export_says_its_own_number_format_and_size(tmp_path: Path) -> None:
    """By the names of both generations of transformers."""
    start = made_up.write_model(tmp_path / "start", made_up.weights(0))
    config = {"model_type": "llama", "dtype": "float32", "torch_dtype": "float32"}
    (start / "config.json").write_text(json.dumps(config))
    values = sum(x.numel() for x in made_up.weights(0).values())
    index = {"metadata": {"total_size": 4 * values, "format": "pt"}, "weight_map": {"x": "y"}}
    (start / INDEX).write_text(json.dumps(index))
    first_global(start, tmp_path / "global-0", {})
    assert (tmp_path / "global-0" / "export" / INDEX).read_bytes() == (start / INDEX).read_bytes()
    given = updates(tmp_path, tmp_path / "global-0", deltas(2))
    run(tmp_path / "global-0", given, tmp_path / "global-1", dtype="bfloat16")
    export = tmp_path / "global-1" / "export"
    sizes = {x.dtype for x in made_up.read(export).values()}
    assert sizes == {torch.bfloat16}
    config |= {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    assert json.loads((export / "config.json").read_text()) == config
    index["metadata"] |= {"total_size": 2 * values}  # type: ignore[operator]
    assert json.loads((export / INDEX).read_text()) == index


def test_a_configuration_without_the_older_name_gets_none(tmp_path: Path) -> None:
    base = made_up.first(tmp_path)
    run(base, updates(tmp_path, base, deltas(1)), tmp_path / "global-1", dtype="float16")
    config = json.loads((tmp_path / "global-1" / "export" / "config.json").read_text())
    assert config == {"model_type": "llama", "dtype": "float16"}


def test_what_a_rule_did_not_need_before_begins_with_it(tmp_path: Path) -> None:
    base = made_up.first(tmp_path)
    run(base, updates(tmp_path, base, deltas(2)), tmp_path / "global-1")
    found = updates(tmp_path / "2", tmp_path / "global-1", deltas(2))
    run(tmp_path / "global-1", found, tmp_path / "global-2", "int8", update="momentum")
    assert (tmp_path / "global-2" / "memory" / "residual").is_dir()


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_the_difference_alone_gives_the_same_model(tmp_path: Path, codec: str) -> None:
    base = made_up.first(tmp_path)
    run(base, updates(tmp_path, base, deltas(2)), tmp_path / "next", codec=codec)
    digest = apply_delta(base, tmp_path / "next" / "delta", codec, tmp_path / "theirs")
    assert digest == read_global(tmp_path / "next")["digest"]
    wide = sum(p.stat().st_size for p in (tmp_path / "next" / "master").iterdir())
    sent = sum(p.stat().st_size for p in (tmp_path / "next" / "delta").iterdir())
    assert codec == "fp32" or sent < 0.6 * wide


def test_the_same_updates_give_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    base = made_up.first(tmp_path)
    found = updates(tmp_path, base, deltas(3), codec="int8")
    run(base, found, tmp_path / "one")
    run(base, found[::-1], tmp_path / "two")
    for path in sorted((tmp_path / "one").rglob("*")):
        if path.is_file():
            other = tmp_path / "two" / path.relative_to(tmp_path / "one")
            assert path.read_bytes() == other.read_bytes(), path


def poisoned(kind: str, delta: dict[str, Tensor]) -> dict[str, Tensor]:
    if kind == "long":
        return {name: 1e6 * x for name, x in delta.items()}
    return {name: -x for name, x in delta.items()}


@pytest.mark.parametrize(
    ("kind", "reason"), [("long", "its norm .* times the median"), ("flipped", "its cosine")]
)
def test_poisoned_updates_are_left_out(tmp_path: Path, kind: str, reason: str) -> None:
    base, common = made_up.first(tmp_path), made_up.weights(5, 1e-3)
    given = [
        {name: x + 0.3 * made_up.weights(n, 1e-3)[name] for name, x in common.items()}
        for n in range(4)
    ]
    given[2] = poisoned(kind, given[2])
    found = updates(tmp_path, base, given)
    outcome = run(base, found, tmp_path / "next")
    assert list(outcome.rejected) == ["f2"] and list(outcome.weights) == ["f0", "f1", "f3"]
    import re

    assert re.search(reason, outcome.rejected["f2"])
    run(base, [one for one in found if one.manifest.facility != "f2"], tmp_path / "without")
    for path in (tmp_path / "next" / "master").iterdir():
        assert path.read_bytes() == (tmp_path / "without" / "master" / path.name).read_bytes()


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    base = made_up.first(tmp_path)
    found = updates(tmp_path, base, deltas(3))
    path = next(found[1].folder.glob("*00002-of*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-4:] = b"\x00\x00\xc0\x7f"  # fp32's NaN
    path.write_bytes(content)
    outcome = run(base, found, tmp_path / "next", **LOOSE)
    assert outcome.rejected == {"f1": "1 values are not finite"}
    after = made_up.read(tmp_path / "next" / "master")
    assert all(bool(torch.isfinite(x).all()) for x in after.values())


def test_too_few_updates_leave_the_model_as_it_is(tmp_path: Path) -> None:
    base = made_up.first(tmp_path)
    found = updates(tmp_path, base, deltas(1))
    with pytest.raises(UserError, match="1 updates are left, the quorum is 2"):
        run(base, found, tmp_path / "next", quorum=2)
    assert not (tmp_path / "next").exists()


def test_two_that_disagree_hold_the_round(tmp_path: Path) -> None:
    base, common = made_up.first(tmp_path), made_up.weights(5, 1e-3)
    given = [common, {name: -x for name, x in common.items()}]
    with pytest.raises(UserError, match=r"0 updates are left.*cosine to the others, -1\.00"):
        run(base, updates(tmp_path, base, given), tmp_path / "next")


def test_another_models_update_is_left_out(tmp_path: Path) -> None:
    base = made_up.first(tmp_path)
    found = updates(tmp_path, base, deltas(2))
    other = tmp_path / "other"
    shapes = {name: x[:1] for name, x in made_up.weights(1).items()}
    first_global(made_up.write_model(other / "start", shapes), other / "global-0", {})
    foreign = made_up.update(other, other / "global-0", "f9", shapes)
    outcome = run(base, [*found, foreign], tmp_path / "next", **LOOSE)
    assert "the global model asks for" in outcome.rejected["f9"]


@contextmanager
def at_most(file_bytes: int) -> Iterator[None]:
    """Files may not grow beyond this, as where a disk or a quota is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    base = made_up.first(tmp_path)
    found = updates(tmp_path, base, deltas(2))
    before = made_up.read(base / "master")
    with at_most(1000), pytest.raises(UserError, match=r"needs [\d,]+ bytes: File too large"):
        run(base, found, tmp_path / "next", **LOOSE)
    assert not (tmp_path / "next").exists()
    run(base, found, tmp_path / "next", **LOOSE)
    assert all(torch.equal(x, before[n]) for n, x in made_up.read(base / "master").items())


def test_late_work_counts_less_and_too_late_work_is_refused(tmp_path: Path) -> None:
    """Made from the model before, it is added to this one with (1 + rounds)^-exponent of its share.

    FedAsync's polynomial rule (Xie et al. 2019, section 5).
    """
    old, given = made_up.first(tmp_path), deltas(3)
    [*_, late] = updates(tmp_path, old, given)
    run(old, updates(tmp_path / "now", old, given[:2]), tmp_path / "now-1", **LOOSE)
    base = tmp_path / "now-1"
    bases = [str(read_global(one)["digest"]) for one in (base, old)]
    with pytest.raises(UserError, match=r"(?s)began from .*allow late work: rule.max_staleness"):
        verified(late.folder, bases[:1])
    one = made_up.update(tmp_path / "one", base, "f0", given[0], tokens=3000)
    found = [verified(one.folder, bases), verified(late.folder, bases)]
    assert [update.rounds_late for update in found] == [0, 1]
    outcome = run(base, found, tmp_path / "next", staleness_exponent=1.0, weigh="tokens", **LOOSE)
    assert outcome.weights == pytest.approx({"f0": 2 / 3, "f2": 1 / 3})
    start, end = made_up.read(base / "master"), made_up.read(tmp_path / "next" / "master")
    for name, values in start.items():
        wanted = values + given[0][name] * 2 / 3 + given[2][name] / 3
        torch.testing.assert_close(end[name], wanted, atol=2e-8, rtol=1e-5)


def test_finite_values_whose_sum_is_not_are_no_overflow() -> None:
    large = torch.full((100,), 3e38)
    assert not_finite(large) == not_finite(large.bfloat16()) == 0
    large[3], large[5] = math.inf, math.nan
    assert not_finite(large) == 2


def test_the_command_reads_files_before_it_waits_for_torch() -> None:
    code = "import atoll.federation.aggregate_command, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
