"""Fragments of a model over several rounds, against plain arithmetic that knows no files."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import made_up
import pytest
import torch
from torch import Tensor

from atoll.campaign.own_weights import changed_fragments, residual_round
from atoll.errors import UserError
from atoll.federation import global_model
from atoll.federation.aggregate import Outcome, aggregate, hold, verified
from atoll.federation.apply_delta import apply_delta, take_whole
from atoll.federation.apply_delta import main as apply_delta_main
from atoll.federation.error_feedback import encoded_layout
from atoll.federation.fragments import fragments_of
from atoll.federation.global_model import first_global, read_global
from atoll.federation.make_delta import make_delta
from atoll.federation.merge_global import merge_global
from atoll.federation.tensors import Layout, TensorReader
from atoll.settings.exchange import read_manifest
from atoll.settings.federation import Rule, checked_settings

Model = dict[str, Tensor]
SHAPES = {
    "embed.weight": (70, 8), "layers.0.a.weight": (33, 9), "layers.0.b.weight": (65,),
    "layers.1.a.weight": (33, 9), "layers.2.a.weight": (33, 9), "layers.3.a.weight": (33, 10),
    "norm.weight": (9,),
}  # fmt: skip
# of two fragments: layers in turn, then what is in none to the one with fewer values
STRIDED = {
    "layers.0.a.weight": 0, "layers.0.b.weight": 0, "layers.1.a.weight": 1, "layers.2.a.weight": 0,
    "layers.3.a.weight": 1, "embed.weight": 1, "norm.weight": 0,
}  # fmt: skip
OF_FRAGMENTS = ("claims", "averaged_rounds", "changed_rounds")
EQUAL: dict[str, Any] = {"weigh": "equal", "max_norm_ratio": 1e9, "min_cosine": -1.0}


def drawn(seed: int, scale: float) -> Model:
    generator = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}


def learned(facility: str, number: int) -> Model:
    """What the training of a round adds to a facility's weights."""
    return drawn(1000 * number + ord(facility), 1e-3)


@dataclass
class Campaign:
    """The real files of rounds; facilities that train as `learned` says."""

    folder: Path
    rule: Rule
    codec: str = "fp32"
    global_codec: str | None = None  # None: as that of updates
    taken: dict[str, int] = field(default_factory=dict)  # the global model they had last
    trained: dict[str, int] = field(default_factory=dict)  # the round of their own weights

    def __post_init__(self) -> None:
        first_global(made_up.write_model(self.folder / "start", drawn(0, 0.02)), self.model(0), {})

    def model(self, number: int) -> Path:
        return self.folder / f"global-{number}"

    def train(self, facility: str, number: int) -> Path:
        """A round's update."""
        rule, newest = self.rule, max(0, number - 1 - self.rule.overlap_rounds)
        fragments, own = (rule.fragments, rule.fragment_pattern), self.folder / f"own-{facility}"
        begin = self.model(newest) / "master"
        if facility in self.taken:
            out, before = self.folder / f"start-{facility}-{number}", self.taken[facility]
            asked = {"fragments": rule.fragments, "global_round": newest, "facility": facility}
            record = {"global_round": before, "round": self.trained[facility]}
            merge, add = changed_fragments(self.model(newest), record, asked, has_before=True)
            how = (fragments, merge, rule.merge_alpha, add, self.model(before))
            merge_global(self.model(newest), own, out, *how)
            begin, own = out / "export", self.folder / f"own-{facility}-{number}"
        added, start = learned(facility, number), made_up.read(begin)
        trained = made_up.write_model(own, {n: x + added[n] for n, x in start.items()}, files=1)
        if trained.name != f"own-{facility}":
            last = self.folder / f"own-{facility}"
            last.rename(self.folder / f"old-{facility}-{number}")
            trained = trained.rename(last)
        self.taken[facility], self.trained[facility] = newest, number
        update = self.folder / f"round-{number}-{facility}" / "update"
        before = self.last_residual(facility, number, newest)
        make_delta(
            self.model(newest),
            trained,
            before,
            self.codec,
            update,
            self.folder / f"residual-{facility}-{number}",
            made_up.about(facility, round=number),
            (*fragments, rule.fragment(number)),
        )
        return update

    def last_residual(self, facility: str, number: int, newest: int) -> Path | None:
        turns = range(number - self.rule.fragments, 0, -self.rule.fragments)
        kept = {n: self.folder / f"residual-{facility}-{n}" for n in turns}
        kept = {n: folder for n, folder in kept.items() if folder.is_dir()}
        asked = {"facility": facility, "global_round": newest}
        asked |= {"fragment": self.rule.fragment(number)}
        return kept.get(residual_round(self.model(newest), asked, list(kept)) or 0)

    def average(self, number: int, updates: list[Path]) -> Outcome:
        bases = [read_global(self.model(n))["digest"] for n in range(number - 1, -1, -1)]
        given = [verified(path, bases, self.rule.overlap_rounds, number) for path in updates]
        base, out = self.model(number - 1), self.model(number)
        codec = self.global_codec or self.codec
        return aggregate(base, given, self.rule, codec, out, {"round": number})

    def master(self, number: int) -> Model:
        return made_up.read(self.model(number) / "master")


def nesterov(model: Model, memory: Model, delta: Model) -> None:
    """torch's own SGD on the tensors of a delta."""
    for name, change in delta.items():
        parameter = torch.nn.Parameter(model[name].clone())
        outer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
        outer.state[parameter]["momentum_buffer"] = memory[name]
        parameter.grad = -change
        outer.step()
        model[name] = parameter.detach()


def expected(rule: Rule, present: dict[int, str]) -> list[Model]:
    """The model after each round, of whole tensors in fp64; no file, fragment by fragment."""
    model = {name: values.double() for name, values in drawn(0, 0.02).items()}
    memory = {name: torch.zeros_like(values) for name, values in model.items()}
    models, averaged, own, took = [dict(model)], [dict.fromkeys(SHAPES, 0)], {}, {}
    for number, facilities in present.items():
        newest = max(0, number - 1 - rule.overlap_rounds)
        sent = [name for name in SHAPES if STRIDED[name] == (number - 1) % 2]
        changes: list[Model] = []
        for facility in facilities:
            known, versions = models[newest], averaged[newest]
            mine = dict(own.get(facility, known))
            for name in SHAPES:
                if facility in took and versions[name] > took[facility][name]:
                    mine[name] = torch.lerp(known[name], mine[name], rule.merge_alpha)
            added = learned(facility, number)
            own[facility] = {name: mine[name] + added[name].double() for name in SHAPES}
            took[facility] = versions
            changes.append({name: own[facility][name] - known[name] for name in sent})
        delta = {name: sum(each[name] for each in changes) / len(changes) for name in sent}
        nesterov(model, memory, delta)
        models.append(dict(model))
        averaged.append(averaged[-1] | dict.fromkeys(sent, number))
    return models


@pytest.mark.parametrize(("overlap", "alpha"), [(0, 0.0), (0, 0.5), (1, 0.0), (1, 0.5)])
def test_rounds_of_fragments_are_those_of_plain_arithmetic(
    tmp_path: Path, overlap: int, alpha: float
) -> None:
    """One facility joins in the third round, one is away for two."""
    present = {1: "ab", 2: "ab", 3: "abc", 4: "ac", 5: "ac", 6: "abc"}
    rule = Rule(
        fragments=2, overlap_rounds=overlap, merge_alpha=alpha, update="nesterov",
        learning_rate=0.7, **EQUAL,
    )  # fmt: skip
    campaign, models = Campaign(tmp_path, rule), expected(rule, present)
    for number, facilities in present.items():
        campaign.average(number, [campaign.train(each, number) for each in facilities])
        after, before = campaign.master(number), campaign.master(number - 1)
        for name, wanted in models[number].items():
            torch.testing.assert_close(after[name].double(), wanted, rtol=0, atol=1e-7)
            is_sent = STRIDED[name] == (number - 1) % 2
            assert torch.equal(after[name], before[name]) is not is_sent
    assert (models[6]["embed.weight"] - models[0]["embed.weight"]).abs().max() > 1e-3


@pytest.mark.parametrize("taken", [3, 5])
def test_late_work_is_added_to_its_own_fragment(tmp_path: Path, taken: int) -> None:
    """By its share of the round's tokens and its lateness; the momentum is not spent twice."""
    rule = Rule(fragments=2, max_staleness=3, update="nesterov", learning_rate=0.7, **EQUAL)
    campaign = Campaign(tmp_path, rule)
    campaign.average(1, [campaign.train(each, 1) for each in "ab"])
    late = campaign.train("b", 2)
    for number in range(2, taken):
        campaign.average(number, [campaign.train("a", number)])
    outcome = campaign.average(taken, [campaign.train("a", taken), late])
    share = 0.5 * (1 + taken - 2) ** -0.5
    assert outcome.weights == {"a": 1.0, "b": pytest.approx(share)}
    late_delta = made_up.read(late)
    before, after = campaign.master(taken - 1), campaign.master(taken)
    memories = [made_up.read(campaign.model(n) / "memory" / "momentum") for n in (taken - 1, taken)]
    for name in [name for name in SHAPES if STRIDED[name] == 1]:
        change = share * late_delta[name].view(SHAPES[name])
        torch.testing.assert_close(
            after[name] - before[name], 0.7 * 1.9 * change, rtol=0, atol=1e-8
        )
        torch.testing.assert_close(memories[1][name] - memories[0][name], change, rtol=0, atol=1e-8)


def test_late_work_does_not_say_how_long_others_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is always late is beside nobody, and could lift the bound for itself, round by round."""
    usual = learned
    monkeypatch.setitem(
        globals(),
        "learned",
        lambda facility, number: {
            name: x * (9 if facility == "b" else 1) for name, x in usual(facility, number).items()
        },
    )
    rule = Rule(fragments=2, max_staleness=1, weigh="equal", min_cosine=-1.0)
    campaign = Campaign(tmp_path, rule)
    campaign.average(1, [campaign.train("a", 1), campaign.train("c", 1)])
    late = campaign.train("b", 2)
    campaign.average(2, [campaign.train("a", 2), campaign.train("c", 2)])
    known = read_global(campaign.model(2))["norms_before"]["1"]
    outcome = campaign.average(3, [campaign.train("a", 3), campaign.train("c", 3), late])
    assert outcome.weights["b"] > 0 and outcome.norms["b"] > 5 * known[-1]
    assert read_global(campaign.model(3))["norms_before"]["1"] == known


def alike(facility: str, number: int) -> Model:
    """Every facility learns the same in every round: a step of one."""
    return {name: torch.ones(shape) for name, shape in SHAPES.items()}


def reached(campaign: Campaign, number: int, name: str = "layers.1.a.weight") -> float:
    """How far a tensor of the model of a round is, all its values alike."""
    far = campaign.master(number)[name] - campaign.master(0)[name]
    assert far.max() - far.min() < 1e-5
    return float(far.mean())


@pytest.mark.parametrize(("update", "rate"), [("replace", 1.0), ("momentum", 1.0)])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_late_work_is_not_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: str, rate: float, alpha: float
) -> None:
    """Those in time keep what it changed, and what they have learned since and not sent yet."""
    monkeypatch.setitem(globals(), "learned", alike)
    rule = {"update": update, "learning_rate": rate, "beta1": 0.0, "merge_alpha": alpha}
    campaign = Campaign(tmp_path, Rule(fragments=2, max_staleness=1, **rule, **EQUAL))
    campaign.average(1, [campaign.train(each, 1) for each in "abcd"])
    late = campaign.train("d", 2)
    campaign.average(2, [campaign.train(each, 2) for each in "abc"])
    assert reached(campaign, 2) == pytest.approx(2.0, abs=1e-6)
    campaign.average(3, [*(campaign.train(each, 3) for each in "abc"), late])
    added = 2.0 * 0.25 * 2**-0.5
    assert reached(campaign, 3) == pytest.approx(2.0 + added, abs=1e-6)
    campaign.average(4, [campaign.train(each, 4) for each in "abc"])
    assert reached(campaign, 4) == pytest.approx(4.0 + added, abs=1e-6)


def test_what_a_held_round_did_not_average_is_sent_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "learned", alike)
    campaign = Campaign(tmp_path, Rule(fragments=2, **EQUAL))
    for number in (1, 2, 3, 4, 5):
        updates = [campaign.train(each, number) for each in "ab"]
        if number == 3:
            hold(campaign.model(2), campaign.rule, "fp32", campaign.model(3), {"round": 3})
        else:
            campaign.average(number, updates)
    found = [reached(campaign, n, "layers.0.a.weight") for n in (1, 2, 3, 4, 5)]
    assert found == pytest.approx([1.0, 1.0, 1.0, 1.0, 5.0], abs=1e-5)
    assert reached(campaign, 4) == pytest.approx(4.0, abs=1e-5)


@pytest.mark.parametrize(
    ("held", "codec", "max_staleness"),
    [
        *((held, codec, 0) for held in ({3}, {3, 5}, set()) for codec in ("int4", "int2", "topk")),
        ({3}, "topk", 2),
        ({3, 5}, "int4", 4),
    ],
)
def test_what_an_encoding_left_out_of_a_held_turn_is_not_sent_twice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codec: str,
    held: set[int],
    max_staleness: int,
) -> None:
    """What is in the model and what waits at the facility are together what was learned."""

    monkeypatch.setitem(globals(), "learned", ramp)
    campaign = Campaign(tmp_path, Rule(fragments=2, max_staleness=max_staleness, **EQUAL), codec)
    for number in range(1, 8):
        updates = [campaign.train("a", number)]
        if number in held:
            hold(
                campaign.model(number - 1),
                campaign.rule,
                codec,
                campaign.model(number),
                {"round": number},
            )
        else:
            base = campaign.model(number - 1)
            aggregate(
                base,
                [verified(updates[0], [read_global(base)["digest"]], 0, number)],
                campaign.rule,
                "fp32",
                campaign.model(number),
                {"round": number},
            )
    name, residual = "layers.0.a.weight", made_up.read(tmp_path / "residual-a-7")
    far = campaign.master(7)[name] - campaign.master(0)[name]
    waits = residual[name].view(far.shape)
    torch.testing.assert_close(far + waits, 7 * ramp("a", 7)[name], rtol=0, atol=1e-4)


def test_late_work_of_a_held_turn_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other learned in that turn, and did not send, goes with its next one."""
    monkeypatch.setitem(globals(), "learned", alike)
    rule = Rule(fragments=2, max_staleness=1, staleness_exponent=0.0, **EQUAL)
    campaign = Campaign(tmp_path, rule)
    for number in (1, 2):
        campaign.average(number, [campaign.train(each, number) for each in "ab"])
    campaign.train("a", 3)
    late = campaign.train("b", 3)
    hold(campaign.model(2), rule, "fp32", campaign.model(3), {"round": 3})
    campaign.average(4, [campaign.train("a", 4), late])
    found = read_global(campaign.model(4))
    assert found["taken"] == {"0": {"a": 1, "b": 3}, "1": {"a": 4, "b": 2}}
    assert found["averaged_rounds"] == {"0": 1, "1": 4}
    campaign.average(5, [campaign.train(each, 5) for each in "ab"])
    # the first round, b's second and third at once, half of a's second to fifth and of b's fifth
    wanted = 1 + 2 + 4 / 2 + 1 / 2
    assert reached(campaign, 5, "layers.0.a.weight") == pytest.approx(wanted, abs=1e-5)


def ramp(facility: str, number: int) -> Model:
    return {n: torch.arange(1.0, 1 + prod(s)).view(s) / prod(s) for n, s in SHAPES.items()}


@pytest.mark.parametrize("codec", ["int4", "topk"])
def test_what_an_encoding_left_out_of_late_work_is_sent_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    monkeypatch.setitem(globals(), "learned", ramp)
    rule = Rule(fragments=2, max_staleness=1, staleness_exponent=0.0, dtype="float32", **EQUAL)
    campaign = Campaign(tmp_path, rule, codec, "fp32")
    for number in (1, 2):
        campaign.average(number, [campaign.train("b", number)])
    late = campaign.train("b", 3)
    hold(campaign.model(2), rule, "fp32", campaign.model(3), {"round": 3})
    campaign.average(4, [late])
    campaign.average(5, [campaign.train("b", 5)])
    name = "layers.0.a.weight"
    far = campaign.master(5)[name] - campaign.master(0)[name]
    waits = made_up.read(tmp_path / "residual-b-5")[name].view(far.shape)
    torch.testing.assert_close(far + waits, 4 * ramp("b", 1)[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_what_an_encoding_left_out_of_a_refused_update_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_staleness: int
) -> None:
    """Else it is too long again, in round after round."""
    too_long = {"c": 3}

    def once_too_long(facility: str, number: int) -> Model:
        many = 1000.0 if too_long.get(facility) == number else 1.0
        return {name: many * values for name, values in ramp(facility, number).items()}

    monkeypatch.setitem(globals(), "learned", once_too_long)
    rule = Rule(weigh="equal", min_cosine=-1.0, max_staleness=max_staleness)
    campaign = Campaign(tmp_path, rule, "topk", "fp32")
    for number in range(1, 6):
        updates = [campaign.train(each, number) for each in "abc"]
        rejected = campaign.average(number, updates).rejected
        assert set(rejected) == ({"c"} if number == 3 else set()), rejected
    assert read_global(campaign.model(5))["refused"] == {"0": {"c": 3}}
    assert read_global(campaign.model(5))["refused_in"] == {"0": {"c": 3}}


def test_late_work_that_is_refused_is_of_the_round_that_refused_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def long_in_the_third(facility: str, number: int) -> Model:
        return {n: (1e4 if number == 3 else 1.0) * v for n, v in ramp(facility, number).items()}

    monkeypatch.setitem(globals(), "learned", long_in_the_third)
    rule = Rule(fragments=2, max_staleness=1, dtype="float32", **(EQUAL | {"max_norm_ratio": 10.0}))
    campaign = Campaign(tmp_path, rule, "fp32", "fp32")
    for number in (1, 2):
        campaign.average(number, [campaign.train(each, number) for each in "abc"])
    late = campaign.train("b", 3)
    hold(campaign.model(2), rule, "fp32", campaign.model(3), {"round": 3})
    assert set(campaign.average(4, [late, campaign.train("a", 4)]).rejected) == {"b"}
    model = read_global(campaign.model(4))
    assert model["refused"] == {"0": {"b": 3}} and model["refused_in"] == {"0": {"b": 4}}
    about = {"round": 5, "refused_rounds": {"b": 4}}
    hold(campaign.model(4), rule, "fp32", campaign.model(5), about)
    model = read_global(campaign.model(5))
    assert model["refused_in"] == {"0": {"b": 4}, "1": {"b": 5}}


def test_lateness_is_told_by_rounds(tmp_path: Path) -> None:
    """By the model that work began with, it is not: of the first rounds, and behind a held one."""
    rule = Rule(fragments=2, overlap_rounds=1, max_staleness=1, **EQUAL)
    campaign = Campaign(tmp_path / "overlap", rule)
    late = campaign.train("b", 1)
    campaign.average(1, [campaign.train("a", 1)])
    outcome = campaign.average(2, [campaign.train("a", 2), late])
    assert outcome.weights["b"] == pytest.approx(0.5 * 2**-0.5)
    campaign = Campaign(tmp_path / "held", Rule(fragments=2, max_staleness=1, **EQUAL))
    campaign.average(1, [campaign.train(each, 1) for each in "ab"])
    late = campaign.train("b", 2)
    hold(campaign.model(1), campaign.rule, "fp32", campaign.model(2), {"round": 2})
    assert read_global(campaign.model(1))["digest"] == read_global(campaign.model(2))["digest"]
    outcome = campaign.average(3, [campaign.train("a", 3), late])
    assert outcome.weights["b"] == pytest.approx(2**-0.5), "alone in its round"


@pytest.mark.parametrize("others", [True, False])
def test_late_work_has_the_share_that_it_had_in_time(tmp_path: Path, others: bool) -> None:
    """Whoever else is in the round that takes it."""
    rule = {"max_norm_ratio": 1e9, "min_cosine": -1.0}
    campaign = Campaign(tmp_path, Rule(fragments=2, max_staleness=1, **rule))
    campaign.average(1, [campaign.train(each, 1) for each in "abcd"])
    late = campaign.train("d", 2)
    campaign.average(2, [campaign.train(each, 2) for each in "abc"])
    updates = [campaign.train(each, 3) for each in "abc"] if others else []
    assert campaign.average(3, [late, *updates]).weights["d"] == pytest.approx(0.25 * 2**-0.5)


def claiming(update: Path, tokens: int) -> Path:
    manifest = json.loads((update / "manifest.json").read_text())
    (update / "manifest.json").write_text(json.dumps(manifest | {"tokens": tokens}))
    return update


def test_a_late_share_is_capped_as_in_time(tmp_path: Path) -> None:
    rule = {"max_norm_ratio": 1e9, "min_cosine": -1.0, "staleness_exponent": 0.0}
    campaign = Campaign(tmp_path, Rule(fragments=2, max_staleness=1, **rule))
    campaign.average(1, [campaign.train(each, 1) for each in "abc"])
    late = claiming(campaign.train("c", 2), 1000)
    others = [claiming(campaign.train("a", 2), 9000), claiming(campaign.train("b", 2), 1000)]
    campaign.average(2, others)
    assert read_global(campaign.model(2))["claims"] == {"0": [1000.0] * 3, "1": [9000.0, 1000.0]}
    assert campaign.average(3, [late]).weights == {"c": pytest.approx(0.25)}, "not 1/11"
    claims = read_global(campaign.model(3))["claims"]
    assert claims == {"0": [], "1": [9000.0, 1000.0, 1000.0]}, "nobody was there in its own turn"


def test_the_model_of_an_older_atoll_has_no_claims(tmp_path: Path) -> None:
    """A late share is then beside as many as are there now."""
    campaign = Campaign(tmp_path, Rule(fragments=2, max_staleness=1, **EQUAL))
    campaign.average(1, [campaign.train(each, 1) for each in "abcd"])
    late = campaign.train("d", 2)
    campaign.average(2, [campaign.train(each, 2) for each in "abc"])
    path = campaign.model(2) / "manifest.json"
    old = {n: x for n, x in json.loads(path.read_text()).items() if n not in OF_FRAGMENTS}
    path.write_text(json.dumps(old))
    updates = [campaign.train(each, 3) for each in "abc"]
    assert campaign.average(3, [late, *updates]).weights["d"] == pytest.approx(0.25 * 2**-0.5)
    found = read_global(campaign.model(3))
    assert found["averaged_rounds"] == {"0": 3, "1": 2}
    assert found["changed_rounds"] == {"0": 3, "1": 3}


def test_late_work_alone_makes_a_round(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, Rule(fragments=2, max_staleness=1, **EQUAL))
    late = campaign.train("b", 1)
    campaign.average(1, [campaign.train("a", 1)])
    campaign.average(2, [late])
    before, after = campaign.master(1), campaign.master(2)
    assert {n for n in SHAPES if not torch.equal(before[n], after[n])} == {
        n for n in SHAPES if STRIDED[n] == 0
    }


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_facilitys_copy_is_the_coordinators_bit_for_bit(tmp_path: Path, codec: str) -> None:
    campaign = Campaign(tmp_path, Rule(fragments=2, **EQUAL), codec)
    take_whole(campaign.model(0), tmp_path / "copy-0")
    for number in range(1, 5):
        updates = [campaign.train(each, number) for each in "ab"]
        campaign.average(number, updates)
        copies = [tmp_path / f"copy-{n}" for n in (number - 1, number)]
        digest = apply_delta(copies[0], campaign.model(number) / "delta", codec, copies[1])
        assert digest == read_global(campaign.model(number))["digest"]
        wanted = {n for n in SHAPES if STRIDED[n] == campaign.rule.fragment(number)}
        for folder in (*updates, campaign.model(number) / "delta"):
            with TensorReader(folder) as sent:
                assert {name for name in sent.entries if ":" not in name} == wanted
    residual = made_up.read(tmp_path / "residual-a-4")
    assert set(residual) == {n for n in SHAPES if STRIDED[n] == 1}


def test_a_copy_is_on_the_disk_before_it_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut leaves a model whose manifest says that it is whole."""
    campaign, synced, sync = Campaign(tmp_path, Rule(**EQUAL)), set[str](), os.fsync

    def noted(file: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{file}"))
        sync(file)

    monkeypatch.setattr(os, "fsync", noted)
    take_whole(campaign.model(0), tmp_path / "copy")
    masters = {path.name for path in (tmp_path / "copy" / "master").iterdir()}
    partial = tmp_path / ".copy.partial" / "master"
    assert masters and {str(partial / name) for name in masters} <= synced


def test_what_gives_another_model_than_it_should_never_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill before it is removed again would leave it as a whole one."""
    campaign, out = Campaign(tmp_path, Rule(**EQUAL)), tmp_path / "copy"
    campaign.average(1, [campaign.train("a", 1)])
    manifest = campaign.model(1) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"digest": "0" * 64}))
    named: list[Path] = []
    monkeypatch.setattr(global_model, "replace_folder", lambda _, final: named.append(final))
    for words in ([], ["--base", str(campaign.model(0))]):
        with pytest.raises(UserError, match=r"gives the global model .* manifest says 0000"):
            apply_delta_main([str(campaign.model(1)), str(out), *words])
    assert named == [] and not list(tmp_path.glob(".copy*"))


def test_an_update_of_another_fragment_is_left_out(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, Rule(fragments=2, overlap_rounds=1, **EQUAL))
    update, other = campaign.train("a", 1), campaign.train("b", 2)
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps(manifest | {"round": 1}))
    assert read_manifest(other).round == 1
    outcome = campaign.average(1, [update, other])
    assert outcome.weights == {"a": 1.0}
    assert "the global model asks for" in outcome.rejected["b"]


def test_one_that_is_too_long_is_known_by_its_fragments_rounds_before(tmp_path: Path) -> None:
    rule = Rule(fragments=2, weigh="equal", max_norm_ratio=10.0, min_cosine=-1.0)
    campaign = Campaign(tmp_path, rule)
    for number in (1, 2):
        campaign.average(number, [campaign.train(each, number) for each in "ab"])
    norms = read_global(campaign.model(2))["norms_before"]
    assert sorted(norms) == ["0", "1"] and all(len(each) == 1 for each in norms.values())
    path = campaign.model(2) / "manifest.json"
    content = json.loads(path.read_text())
    content["norms_before"]["0"] = [norms["0"][0] / 1000]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="0 updates are left"):
        campaign.average(3, [campaign.train(each, 3) for each in "ab"])


def test_a_round_that_is_held_keeps_every_fragment(tmp_path: Path) -> None:
    """Also where encodings of earlier rounds have left something out."""
    campaign = Campaign(tmp_path, Rule(fragments=2, **EQUAL), "int4")
    for number in (1, 2):
        campaign.average(number, [campaign.train(each, number) for each in "ab"])
    hold(campaign.model(2), campaign.rule, "int4", campaign.model(3), {"round": 3})
    for name, values in campaign.master(2).items():
        assert torch.equal(values, campaign.master(3)[name])
    before, after = (made_up.read(campaign.model(n) / "memory" / "residual") for n in (2, 3))
    for name, left_out in before.items():
        assert torch.equal(left_out, after[name]) and left_out.abs().max() > 0


def test_tensors_are_in_one_fragment_each() -> None:
    layout = {"x": {n: s for n, s in SHAPES.items() if "1" not in n}, "y": {"layers.1.a": (3,)}}
    for pattern in ("strided", "sequential"):
        for count in (1, 2, 3, 4):
            parts = fragments_of(layout, count, pattern)
            names = [n for part in parts for tensors in part.values() for n in tensors]
            assert len(parts) == count and sorted(names) == sorted({*layout["x"], *layout["y"]})
            assert all(part and all(part.values()) for part in parts)
    ends = fragments_of({"x": SHAPES}, 2, "sequential")[0]["x"]
    assert {"layers.0.a.weight", "layers.1.a.weight"} <= set(ends)
    assert not {"layers.2.a.weight", "layers.3.a.weight"} & set(ends)
    for name, fragment in STRIDED.items():
        assert name in fragments_of({"x": SHAPES}, 2)[fragment]["x"]


def test_the_largest_of_eight_fragments_of_7b_is_a_seventh() -> None:
    """Embeddings, or the head, go with four layers."""
    layer = {"q": (4096, 4096), "k": (4096, 4096), "v": (4096, 4096), "o": (4096, 4096)}
    layer |= {"gate": (11008, 4096), "up": (11008, 4096), "down": (4096, 11008)}
    layer |= {"norm1": (4096,), "norm2": (4096,)}
    shapes = {
        f"model.layers.{n}.{x}.weight": shape for n in range(32) for x, shape in layer.items()
    }
    shapes |= dict.fromkeys(("model.embed.weight", "lm_head.weight"), (32000, 4096))
    shapes["model.norm.weight"] = (4096,)

    def gigabytes(layout: Layout) -> float:
        parts = [part for file in encoded_layout(layout, "int8").values() for part in file.values()]
        return sum(length[0] * dtype.itemsize for dtype, length in parts) / 1e9

    whole = {"x": shapes}
    largest = max(gigabytes(part) for part in fragments_of(whole, 8))
    assert (round(gigabytes(whole), 2), round(largest, 2)) == (6.95, 0.97)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: fragments_of({"x": SHAPES}, 5), "rule.fragments=5 of a model of 4 layers"),
        (lambda: rule_of(overlap_rounds=1), "overlap_rounds=1 with fragments=1"),
        (
            lambda: rule_of(fragments=2, max_staleness=1, update="adam"),
            "cannot add what comes late",
        ),
        (
            lambda: rule_of(fragments=2, max_staleness=1, combine="krum"),
            "cannot add what comes late",
        ),
        (lambda: rule_of(merge_alpha=1.0), "merge_alpha"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], found: str) -> None:
    with pytest.raises(UserError, match=found):
        make()


def rule_of(**values: Any) -> Rule:
    return checked_settings(Rule, values, "rule.", "see the settings")
