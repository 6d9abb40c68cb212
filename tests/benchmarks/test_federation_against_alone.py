"""What the federated demo is compared with: the same text, the same tokens, nothing held out."""

from pathlib import Path
from types import ModuleType

import pytest

from atoll.campaign.store import checked_campaign
from atoll.config.compose import campaign_values, compose

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
ROUNDS, STEPS = 3, 7


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import federation_against_alone

    return federation_against_alone


@pytest.fixture(scope="module")
def campaign():
    lines = ["federation=demo", f"rounds={ROUNDS}", f"steps={STEPS}"]
    return checked_campaign(campaign_values(lines))


def test_its_rows_are_against_one_machine_and_the_best_alone(demo, campaign):
    union = {"before": 40.0, "north alone": 36.0, "east alone": 35.0, "one machine": 33.0}
    first, second = demo.rows(campaign, union | {"federated": 34.0})
    assert (first["ours"], first["peers"], first["target"]) == (34.0, 33.0, 1.02)
    assert (second["peer"], second["peers"], second["target"]) == ("best alone", 35.0, 1.0)


def test_one_machine_has_all_training_text_and_nothing_held_out(demo, campaign, tmp_path):
    demo.write_union(campaign, tmp_path / "start", tmp_path)
    train, held_out = (
        {path.name: path.read_bytes() for path in (tmp_path / part).iterdir()}
        for part in ("train", "validation")
    )
    assert not set(train) & set(held_out)
    for site in campaign.sites:
        own, kept = (sum(name.startswith(site.name) for name in p) for p in (train, held_out))
        assert 0.05 < kept / (own + kept) < 0.3  # data.validation.fraction=0.15


def test_one_machine_takes_as_many_tokens_as_the_facilities_together(demo, campaign, tmp_path):
    alone = [compose(demo.alone(campaign, site, tmp_path)).run for site in campaign.sites]
    union = compose(demo.one_machine(campaign, tmp_path, tmp_path)).run
    assert union.training.steps == ROUNDS * STEPS
    assert union.data.sequence_tokens == alone[0].data.sequence_tokens
    samples = [run.training.steps * run.training.global_batch_samples for run in (*alone, union)]
    assert samples[-1] == sum(samples[:-1])
    assert union.optimizer == alone[0].optimizer


@pytest.mark.parametrize(
    ("federated", "one_machine", "misses"),
    [(10.1, 10.0, False), (9.0, 10.0, False), (10.3, 10.0, True), (12.1, 12.0, True)],
)
def test_what_is_promised(demo, federated, one_machine, misses, capsys):
    union = {"before": 900.0, "a alone": 12.0, "b alone": 13.0}
    union |= {demo.ONE_MACHINE: one_machine, "federated": federated}
    assert demo.missed(union) is misses
    assert "against one machine with all text" in capsys.readouterr().out
