"""The atlas trains as a campaign does, counts its bytes, and goes on where it stopped."""

import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from atoll.federation.error_feedback import encoded_tensors

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
OF_US = ("results", "coordinate_check", "atlas", "atlas_texts", "atlas_rounds", "atlas_report")
OF_US += ("atlas_together", "atlas_costs", "stacked_llama")


@pytest.fixture
def atlas(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with texts and a model that are small."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in OF_US:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import atlas
    import atlas_rounds
    import atlas_texts

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    monkeypatch.setattr(atlas_rounds, "SIZES", atlas_rounds.SIZES | sizes)
    for name in ("TEST_SAMPLES", "VALIDATION_SAMPLES", "QUESTIONS"):
        monkeypatch.setattr(atlas_texts, name, 8)
    return atlas


def cell(atlas: ModuleType, update: str, **changes: object) -> object:
    made = atlas.Cell(update, "fp32", 2, 1, "iid", 1, 6, 4e-3)
    return replace(made, **changes)


def test_one_facility_in_rounds_learns_what_it_learns_in_one_run(atlas: ModuleType) -> None:
    """Moments, step counts and the schedule go on from round to round."""
    alone, rounds = (atlas.run_cell(cell(atlas, update)) for update in ("synchronous", "replace"))
    assert rounds["test"] == pytest.approx(alone["test"], abs=2e-5)
    assert rounds["answered"] == alone["answered"]
    assert alone["bytes"] == rounds["bytes"] * 2


@pytest.mark.parametrize("codec", ["int8", "sparse"])
def test_bytes_are_those_of_the_encoded_tensors_both_ways(atlas: ModuleType, codec: str) -> None:
    import atlas_rounds

    asked = cell(atlas, "replace", codec=codec, facilities=2, steps=4, split="by_language")
    outcome = atlas.run_cell(asked)
    model = atlas_rounds.model_of(atlas_rounds.settings(asked))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}

    def size(of: str) -> int:
        stored = encoded_tensors(shapes, of).values()
        return sum(dtype.itemsize * length for dtype, (length,) in stored)

    rounds = 2
    assert outcome["bytes"] == rounds * (size(codec) + size(atlas_rounds.DOWN.get(codec, codec)))


def test_campaigns_in_a_stack_learn_what_each_learns_by_itself(atlas: ModuleType) -> None:
    """Other seeds, texts, rates, rules and rounds beside it change nothing; bytes are the same."""
    import atlas_together

    def in_stack(update: str, codec: str, split: str = "iid", **changes: object) -> object:
        sizes = {"facilities": 2, "steps": 4, "codec": codec, "outer_rate": 0.7, "split": split}
        return cell(atlas, update, **(sizes | changes))

    cells = [
        in_stack("nesterov", "int2"),
        in_stack("synchronous", "fp32", "by_language", inner_steps=1),
        in_stack("nesterov", "int2", "by_language", seed=2),
        in_stack("replace", "int2", beta1=0.9),
        in_stack("replace", "sparse", rate=1e-3, inner_steps=4),
        in_stack("adam", "int8", outer_rate=0.01),
    ]
    together = atlas_together.run_together(cells, torch.device("cpu"), compiled=False)
    for each, outcome in zip(cells, together, strict=True):
        alone = atlas.run_cell(each)
        assert outcome["test"] == pytest.approx(alone["test"], abs=2e-5), each
        assert outcome["validation"] == pytest.approx(alone["validation"], abs=2e-5), each
        assert outcome["answered"] == pytest.approx(alone["answered"], abs=0.04), each
        assert (outcome["bytes"], outcome["parameters"]) == (alone["bytes"], alone["parameters"])
    with pytest.raises(ValueError, match="whole rounds"):
        atlas_together.in_order([in_stack("replace", "int8", inner_steps=3)])


def test_stacks_are_as_even_as_may_be_and_their_rows_compared_with_their_own(
    atlas: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A GPU does the synchronous runs again; a processor does nothing again."""
    import atlas_report

    monkeypatch.setattr(atlas, "KEPT", tmp_path / "atlas.jsonl")
    cells = [
        cell(atlas, update, seed=seed, facilities=2, steps=2, codec=codec)
        for seed in (1, 2)
        for update, codec in (("synchronous", "fp32"), ("replace", "int8"))
    ]
    assert [len(stack) for stack in atlas.stacked([*cells, *cells[:1]], 4)] == [2, 2, 1]
    for each in cells[:2]:
        atlas.keep(each, atlas.run_cell(each) | {"test": 1.0, "processor_seconds": 1.0}, 0)

    def run(kind: str) -> int:
        before = len(atlas.kept_rows())
        on = partial(atlas.run_stacks, models=16, device=torch.device("cpu"))
        atlas.run_stages([lambda steps, rows: iter(cells)], 2, 5.0, on, kind)
        return len(atlas.kept_rows()) - before

    assert (run("cuda"), run("cuda"), run("cpu")) == (4, 0, 0)
    rows = atlas.kept_rows()
    [point] = atlas_report.points_of(rows)
    assert len(point.gaps) == 2 and max(map(abs, point.gaps)) < 0.1, "not against the 1.0"
    assert "minutes of an" in atlas_report.time_of(rows)


def test_a_fragment_is_what_its_facility_had_when_it_was_sent(
    atlas: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import atlas_rounds
    import atlas_texts

    monkeypatch.setattr(atlas_rounds, "SIZES", atlas_rounds.SIZES | {"num_hidden_layers": 2})
    texts = atlas_texts.divided(1, "iid")
    rounds = cell(atlas, "replace", steps=8, fragments=2)
    alone, _ = atlas_rounds.synchronous(replace(rounds, update="synchronous"), texts)
    model, sent_bytes = atlas_rounds.federated(rounds, texts)
    own, weights = (dict(m.named_parameters()) for m in (alone, model))
    earlier, last = atlas_rounds.parts_of(own, 2)
    assert earlier.keys() | last.keys() == own.keys() and not earlier.keys() & last.keys()
    assert all(torch.allclose(weights[name], own[name], atol=1e-5) for name in last)
    assert not any(torch.allclose(weights[name], own[name], atol=1e-5) for name in earlier)
    whole = atlas.run_cell(replace(rounds, inner_steps=4, fragments=1))
    assert sent_bytes == whole["bytes"]


def test_what_is_taken_late_lies_between_both(atlas: ModuleType) -> None:
    import atlas_rounds

    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(4.0)
    atlas_rounds.take(model, {"weight": torch.tensor([[2.0]])}, 0.25)
    assert model.weight.item() == 2.5
    late = cell(atlas, "replace", steps=8, facilities=2)
    outcomes = [
        atlas.run_cell(replace(late, fragments=fragments, overlap_rounds=rounds, merge_alpha=alpha))
        for fragments, rounds, alpha in ((1, 0, 0.0), (1, 0, 0.5))
    ]
    assert outcomes[0]["test"] != outcomes[1]["test"]


def test_facilities_of_a_language_each_read_nothing_that_is_held_out(atlas: ModuleType) -> None:
    import atlas_texts

    texts = atlas_texts.divided(8, "by_language")
    half = atlas_texts.LANGUAGE_BYTES / 2
    assert all(0.8 * half < len(text) < half for text in texts.training)
    read = [text.numpy().tobytes() for text in texts.training]
    includes = [text.count(b"#include") for text in read]
    assert min(includes[1], includes[5]) > 20 * includes[2]
    windows = texts.test_BT.to(torch.uint8).numpy()
    assert not any(window.tobytes() in text for window in windows[::4] for text in read)


def test_what_is_done_is_not_done_again_and_rates_are_those_tuned(atlas: ModuleType) -> None:
    kept = []

    def run(cells: list[object], validation: float) -> None:
        for each in cells:
            outcome = {"validation": validation - each.rate, "test": 2.0, "bytes": 8.0}
            kept.append(json.loads(json.dumps({"cell": asdict(each), **outcome})))

    tuned = list(atlas.tune_inner(500, kept))
    run(tuned, 3.0)
    assert atlas.done(kept) == set(tuned)
    tries = list(atlas.tune_outer(500, kept, updates=("nesterov",), lengths=(50,)))
    assert {each.rate for each in tries} == {max(atlas.RATES["adamw"])}
    run(tries[:1], 4.0)
    run(tries[1:2], 1.0)
    compared = list(atlas.compare(500, kept, seeds=(1,), updates=("nesterov",)))
    rates = {(c.outer_rate, c.beta1) for c in compared if c.update == "nesterov"}
    assert rates == {(tries[1].outer_rate, tries[1].beta1)}
    assert all(c.update == "replace" for c in compared if c.codec in atlas.SPARSE)
    run(list(atlas.tune_inner(500, kept, optimizer="muon"))[1:2], 3.0)
    with_muon = list(atlas.compare(500, kept, codecs=("int4",), optimizer="muon"))
    assert {(c.optimizer, c.rate) for c in with_muon} == {("muon", atlas.RATES["muon"][1])}
    run(compared, 1.0)
    assert set(atlas.compare(500, kept, seeds=(1,), updates=("nesterov",))) <= atlas.done(kept)


def test_the_page_compares_with_the_same_seed_and_says_what_is_missed(atlas: ModuleType) -> None:
    import atlas_report

    rows = []
    for seed, synchronous in ((1, 2.0), (2, 2.5)):
        for update, loss, size in (("synchronous", synchronous, 800.0), ("replace", 1.02, 40.0)):
            each = asdict(cell(atlas, update, seed=seed, facilities=4, codec="int8"))
            nats = loss if update == "synchronous" else loss * synchronous
            facts = {"answered": 0.5, "bytes": size, "parameters": 9, "processor_seconds": 1.0}
            rows.append({"cell": each, "test": nats, **facts})
    late = {"fragments": 2, "overlap_rounds": 1, "merge_alpha": 0.5, "inner_steps": 1}
    rows += [row | {"cell": row["cell"] | late} for row in rows if "repl" in row["cell"]["update"]]
    steps, (point, divided) = atlas_report.most_compared(rows)
    begun = [row | {"cell": row["cell"] | {"steps": 60}} for row in rows[:2]]  # a longer one alone
    assert atlas_report.most_compared([*rows, *begun])[0] == 6
    assert steps == 6 and point.gaps == pytest.approx([0.02, 0.02]) and point.fewer_bytes == 20
    [line] = atlas_report.goals([point])
    assert line["bytes"] == "1/20 or fewer" and line[""] == "missed by 1.70 points"
    lucky = replace(point, gaps=[0.001])
    assert atlas_report.goals([lucky, point]) == [line], "once is less than twice"
    assert "+2.0 ± 0.0 %, 1/20" in "\n".join(atlas_report.sections(steps, [point], rows))
    whole, of_two = atlas_report.in_fragments([point, divided])
    assert whole["averaged every"] == of_two["averaged every"] == "2 steps"
    assert of_two["fragments"] == "2, taken 1 round later, 0.5 of its own kept"
    assert not atlas_report.with_muon([point, divided])
    drawn = ElementTree.fromstring(atlas_report.figure("iid", [point]))
    assert "replace, int8" in " ".join(drawn.itertext())


def test_a_codec_is_beside_fp32_and_a_step_beside_replace_in_the_same_rounds(
    atlas: ModuleType,
) -> None:
    import atlas_costs

    def point(update: str, codec: str, inner_steps: int, gap: float) -> SimpleNamespace:
        sizes = {"facilities": 2, "split": "iid", "inner_steps": inner_steps}
        return SimpleNamespace(update=update, codec=codec, gap=gap, **sizes)

    points = [
        *(point("replace", "fp32", n, gap) for n, gap in ((10, 0.10), (50, 0.20))),
        *(point("replace", "int4", n, gap) for n, gap in ((10, 0.11), (50, 0.23), (250, 0.9))),
        point("adam", "int4", 50, 0.28),
    ]
    int4, adam = atlas_costs.costs(points)
    assert int4 == {"": "int4", "beside": "fp32", "least": "+1.0", "median": "+2.0", "most": "+3.0",
                    "combinations": "2"}  # fmt: skip
    assert (adam[""], adam["beside"], adam["most"]) == ("adam", "replace", "+5.0")
    rows = [{"cell": {"seed": n}, "test": 2.0} for n in (1, 2)]
    rows += [{"cell": {"seed": 1}, "test": 1.9, "device": "a GPU"}]
    assert atlas_costs.widest_gap(rows, "device") == pytest.approx(0.05)
    assert atlas_costs.widest_gap(rows[:2], "device") == 0.0


def test_the_page_says_what_muon_and_longer_campaigns_lose(atlas: ModuleType) -> None:
    import atlas_report

    rows = []
    losses = {"adamw": {6: (2.0, 2.2), 12: (1.6, 1.68)}, "muon": {6: (1.8, 1.9)}}
    for optimizer, of_steps in losses.items():
        for steps, pair in of_steps.items():
            for update, nats in zip(("synchronous", "replace"), pair, strict=True):
                sizes = {"facilities": 4, "codec": "int4", "steps": steps, "optimizer": optimizer}
                each = asdict(cell(atlas, update, **sizes))
                size = 800.0 if update == "synchronous" else 40.0
                facts = {"answered": 0.5, "bytes": size, "parameters": 9, "processor_seconds": 1.0}
                rows.append({"cell": each, "test": nats, **facts})
    steps, points = atlas_report.most_compared(rows)
    [with_muon] = atlas_report.with_muon(points)
    assert (with_muon["loss over Muon's"], with_muon["over AdamW's"]) == ("+5.6 %", "-5.0 %")
    [longer] = atlas_report.longer(atlas_report.by_steps(rows))
    assert (longer["6 steps"], longer["12 steps"]) == ("+10.0 %", "+5.0 %")
    text = "\n".join(atlas_report.sections(steps, points, rows))
    assert "## With Muon" in text and "## Longer campaigns" in text
    of_more = text.partition("After 12 steps:")[2]
    assert "| adamw | 1/20 or fewer |" in of_more and "missed by 4.70 points" in of_more
    usual = text.partition("## With Muon")[0]
    assert "+10.0 %" in usual and "+5.6 %" not in usual
