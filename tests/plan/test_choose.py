"""What fits, and what is chosen of it."""

from pathlib import Path
from typing import Any

import pytest
import small_run
import yaml

from atoll.errors import UserError
from atoll.plan.choose import choose, fits, options
from atoll.plan.memory import Memory, memory_of
from atoll.plan.shapes import Shape, shape_of
from atoll.plan.traffic import bytes_sent, total
from atoll.settings import Run

LLAMA = {"model_type": "llama", "max_position_embeddings": 4096}
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
}
TREE = {
    file.stem: yaml.safe_load(file.read_text().replace("${ranks_per_node}", "8"))
    for file in (Path(__file__).parents[2] / "hydra_conf" / "sharding").glob("*.yaml")
}


def run_of(device_memory_gib: float | None, nodes: int = 1, **more: Any) -> Run:
    node = {"devices": 8, "device": "cuda", "device_memory_gib": device_memory_gib}
    return small_run.settings(
        Path("/nowhere"),
        8,
        nodes=nodes,
        facility={"name": "big", "scheduler": "slurm", "node": node | {"memory_gib": 1000}},
        launcher={"name": "static"},
        data__sequence_tokens=4096,
        training__global_batch_samples=64,
        **({"precision__compute": "bf16", "model__config": LLAMA} | more),
    )


def best(run: Run) -> tuple[str, ...]:
    return choose(list(options(run, shape_of(LLAMA), TREE))).overrides


@pytest.fixture
def shape() -> Shape:
    return shape_of(LLAMA)


def test_more_memory_means_fewer_bytes() -> None:
    sizes = (400, 200, 80, 40)
    assert best(run_of(400)) == ("sharding=shard_grad_op",)
    assert best(run_of(400, precision__compute="fp32")) == ("sharding=ddp",)
    chosen = [best(run_of(size, nodes=2)) for size in sizes]
    assert len(set(chosen)) > 1
    sent = []
    for words in chosen:
        found = options(run_of(400, nodes=2), shape_of(LLAMA), TREE)
        sent += [total(o.sent) for o in found if o.overrides == words]
    assert sent == sorted(sent)


def test_nothing_fits() -> None:
    with pytest.raises(UserError, match=r"no strategy fits: the least is \d"):
        best(run_of(1))


def test_an_unknown_device_is_not_guessed() -> None:
    found = list(options(run_of(None), shape_of(LLAMA), TREE))
    assert {option.fits for option in found} == {None}
    assert choose(found).overrides == ("sharding=full_shard",)


def test_the_parts_of_a_7b_model_in_full_shard(shape: Shape) -> None:
    memory = memory_of(run_of(80, sharding=TREE["full_shard"]), shape)
    assert memory.parameters == memory.optimizer // 2 == round(shape.parameters * 4 / 8)
    checkpointed = run_of(
        80, sharding=TREE["full_shard"], training__activation_checkpointing="full"
    )
    less = memory_of(checkpointed, shape)
    assert less.peak < memory.peak
    assert less.activations == memory.activations > 5 * less.recomputed_activations


def test_each_axis_takes_its_part(shape: Shape) -> None:
    def memory(**changes: Any) -> Memory:
        return memory_of(run_of(80, nodes=4, sharding=TREE["full_shard"] | changes), shape)

    base = memory()
    assert memory(tensor=4).activations < base.activations / 2
    assert memory(context=4).activations < base.activations / 3
    assert memory(offload=True).peak < base.peak
    assert memory(offload=True).host > 0
    assert memory(shard="node").parameters > base.parameters


def test_ranks_divide_the_experts_of_a_mixture() -> None:
    mixture = shape_of(MIXTRAL)

    def of(expert: int) -> Run:
        return run_of(80, sharding=TREE["full_shard"] | {"expert": expert}, model__config=MIXTRAL)

    (whole, sent), (parts, rows) = (
        (memory_of(run, mixture), bytes_sent(run, mixture)) for run in (of(1), of(8))
    )
    assert parts.parameters == whole.parameters, "every rank keeps an eighth either way"
    experts = mixture.layers * mixture.expert_parameters
    assert mixture.expert_parameters == 8 * 3 * 4096 * 14336
    assert parts.gathered < whole.gathered / 4
    rows_of_plan = [option.overrides for option in options(of(1), mixture, TREE)]
    assert ("sharding=full_shard", "sharding.expert=8") in rows_of_plan
    passes = of(8).microbatches
    gathered = 2 * 2 * passes * 7 / 8 * experts  # twice, in bf16, all but a rank's own
    assert sent["parameters"] - rows["parameters"] == pytest.approx(gathered)
    # two experts for each token, in bf16: there and back, forward and backward
    tokens = passes * 2 * 4096
    assert rows["expert"] == 2 * 2 * 2 * 2 * mixture.layers * tokens * 4096 * 7 / 8


@pytest.mark.parametrize(("ranks", "factor"), [(1, 0.0), (2, 1.0), (4, 1.5)])
@pytest.mark.parametrize("name", ["ddp", "all_reduce", "gather_scatter"])
def test_copies_send_two_ring_passes_of_fp32(
    name: str, ranks: int, factor: float, shape: Shape
) -> None:
    run = small_run.settings(Path("/nowhere"), ranks, sharding=TREE[name])
    assert total(bytes_sent(run, shape)) == factor * 4 * shape.parameters


OWN_LAYOUT = TREE["ddp"] | {"name": "one_by_one", "layouts": ["one_by_one"]}
OWN_EXCHANGE = TREE["all_reduce"] | {"name": "one_by_one", "exchange": "one_by_one"}


@pytest.mark.parametrize("sharding", [OWN_LAYOUT, OWN_EXCHANGE], ids=["layout", "exchange"])
def test_a_strategy_without_a_formula_is_shown_as_unknown(
    sharding: dict[str, Any], shape: Shape
) -> None:
    run = run_of(400, sharding=sharding)
    sent = bytes_sent(run, shape)
    assert (sent, total(sent)) == ({"gradients": None}, None)
    rows = list(options(run, shape, TREE))
    [own, _] = [row for row in rows if row.overrides[0] == "sharding=one_by_one"]
    # an exchange by hand keeps the whole model on each device; what a layout keeps is its own
    assert own.fits is (None if sharding["layouts"] else True)
    assert choose(rows).overrides == ("sharding=shard_grad_op",)


def test_zero_3_sends_half_more_than_copies_and_zero_2_no_more(shape: Shape) -> None:
    """ZeRO (Rajbhandari et al. 2020), section 7; one microbatch, one precision."""
    more = {"precision__compute": "fp32", "training__global_batch_samples": 16}
    node = {"devices": 8, "device": "cuda"}
    facility = {"name": "x", "scheduler": "none", "node": node}
    sent = {}
    for name in ("ddp", "shard_grad_op", "full_shard"):
        run = small_run.settings(
            Path("/nowhere"), 8, sharding=TREE[name], facility=facility, **more
        )
        sent[name] = total(bytes_sent(run, shape))
    assert sent["shard_grad_op"] == pytest.approx(sent["ddp"])
    assert sent["full_shard"] == pytest.approx(1.5 * sent["ddp"], rel=0.02)


def test_copies_that_are_saved_have_to_fit_the_node() -> None:
    """DeepSpeed gathers its state whole on each rank; FSDP's ranks copy their own parts."""
    enough = {}
    for name in ("deepspeed_zero3", "full_shard"):
        run = run_of(400, nodes=2, sharding=small_run.sharding(name))
        for host in (1000, 500, None):
            node = run.facility.node.model_copy(update={"memory_gib": host})
            facility = run.facility.model_copy(update={"node": node})
            there = run.model_copy(update={"facility": facility})
            enough[name, host] = fits(there, memory_of(there, shape_of(LLAMA)))
    assert [enough["deepspeed_zero3", host] for host in (1000, 500, None)] == [True, False, True]
    assert [enough["full_shard", host] for host in (1000, 500, None)] == [True, True, True]
