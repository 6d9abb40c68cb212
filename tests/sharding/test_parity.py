"""Every strategy against one process: losses, gradient norms and final weights."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import families
import pytest
import small_run
import tiny
import torch
import torch.distributed as dist
import yaml
from rank_pool import RankPool
from torch.distributed.tensor import DTensor

from atoll.errors import UserError
from atoll.models.build import build_config, build_model
from atoll.settings import Run
from atoll.sharding import deepspeed
from atoll.sharding.engines import ENGINES
from atoll.sharding.exchange import EXCHANGES
from atoll.sharding.process_group import World, gathered, summed
from atoll.sharding.step_plan import StepPlan
from atoll.train.assemble import build_sharded
from atoll.train.optimizer import make_optimizer, take_step

STEPS = 5
SAMPLES = 8
NODES = {"ranks_per_node": 2, "nodes": 2}  # of four ranks


# what people train beside them: norms of queries; caps and windows; experts
RECENT = ("qwen3", "gemma2", "mixtral")
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 4}
CONFIGS = tiny.CONFIGS | {
    name: families.config_of(name) | SMALL | {"output_router_logits": False} for name in RECENT
}


class Strategy(NamedTuple):
    """A YAML of hydra_conf/sharding, and what is changed in it."""

    name: str
    changes: dict[str, Any]
    untied: bool = False
    families: tuple[str, ...] = tuple(CONFIGS)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.changes.items())])

    @property
    def words(self) -> str:
        """As it is typed behind `sharding=`."""
        return " ".join([self.name, *(f"sharding.{k}={v}" for k, v in self.changes.items())])


# GPT-2 keeps query, key and value in one matrix, Mixtral its experts in one tensor
MIXTURES = ("mixtral",)
SPLIT = ("llama", "opt", "bert", "qwen3", "gemma2")
REFUSALS = ("cannot be divided", "no plan", "has no experts")
STRATEGIES = [
    Strategy("ddp", {}),
    Strategy("all_reduce", {}),
    Strategy("gather_scatter", {}),
    Strategy("full_shard", {}),
    Strategy("shard_grad_op", {}),
    Strategy("hybrid_shard", {}),
    Strategy("hybrid_shard_zero2", {}),
    Strategy("full_shard", {"reshard_after_forward": 2}),
    Strategy("full_shard_offload", {}),
    Strategy("deepspeed_zero1", {}),
    Strategy("deepspeed_zero2", {}),
    Strategy("deepspeed_zero3", {}),
    Strategy("deepspeed_zero3_offload", {}),
    Strategy("context", {}),
    Strategy("tensor", {}, families=SPLIT),
    Strategy("pipeline", {}, untied=True),
    Strategy("full_shard", {"context": 2}),
    Strategy("full_shard", {"tensor": 2}, families=SPLIT),
    Strategy("hybrid_shard", {"pipeline": 2}, untied=True),
    Strategy("shard_grad_op", {"tensor": 2, "context": 2}, families=SPLIT),
    Strategy("full_shard", {"tensor": 2, "pipeline": 2}, True, SPLIT),
    Strategy("full_shard", {"context": 2, "pipeline": 2}, True),
    Strategy("pipeline_interleaved", {}, untied=True),
    Strategy("full_shard", {"expert": 2}, families=MIXTURES),
    Strategy("hybrid_shard", {"expert": 2}, families=MIXTURES),
    Strategy("shard_grad_op", {"context": 2, "expert": 2}, families=MIXTURES),
    Strategy("full_shard", {"pipeline": 2, "expert": 2}, True, MIXTURES),
]


# The engines that an image may lack a part of.
IN_IMAGES = ("full_shard", "deepspeed_zero3", "pipeline")
CASES = [pytest.param(s, marks=pytest.mark.image) if str(s) in IN_IMAGES else s for s in STRATEGIES]


def one_family(strategy: Strategy, family: str) -> bool:
    """Whether every run tries the strategy on this family: one for each, every family in turn."""
    return family == strategy.families[STRATEGIES.index(strategy) % len(strategy.families)]


def config_of(family: str, strategy: Strategy | None = None) -> dict[str, Any]:
    """Four key heads, and two layers for each of two stages, so that everything divides."""
    staged = strategy is not None and strategy.untied
    layers = {"gpt2": "n_layer"}.get(family, "num_hidden_layers")
    more = {layers: 4 if staged else 2, "tie_word_embeddings": not staged}
    if family in RECENT:
        more |= {"layer_types": ["sliding_attention", "full_attention"] * (2 if staged else 1)}
        more = more if family == "gemma2" else {k: v for k, v in more.items() if k != "layer_types"}
    if family == "llama":
        more |= {"num_key_value_heads": 4, "tie_word_embeddings": False}
    return CONFIGS[family] | more


def settings(config: dict[str, Any], sharding: dict[str, Any], ranks: int, **more: Any) -> Run:
    nodes = NODES if ranks == 4 else {"ranks_per_node": ranks, "nodes": 1}
    return small_run.settings(
        Path("/nowhere"),
        ranks,
        **nodes,
        facility__scheduler="slurm",
        model__config=config,
        sharding=sharding,
        seed=3,
        # without it a gradient that is nothing but rounding would move a weight as far as any other
        optimizer__epsilon=1e-4 if config["model_type"] in RECENT else 1e-5,
        training__global_batch_samples=SAMPLES,
        training__loss_chunk_tokens=24,
        **more,
    )


def chosen(strategy: Strategy, family: str, microbatches: int = 2, **more: Any) -> Run:
    """On four ranks, each of which adds up the gradients of so many microbatches in a step."""
    sharding = small_run.sharding(strategy.name) | strategy.changes
    run = settings(config_of(family, strategy), sharding, 4, **more)
    samples = SAMPLES // run.axes.data // microbatches
    training = run.training.model_copy(update={"microbatch_samples": samples})
    return run.model_copy(update={"training": training})


def train(
    world: World, run: Run, clip_norm: float | None
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final weights of a few steps on one repeated batch."""
    config = build_config(run.model, tiny.VOCABULARY, tiny.SEQUENCE, {})
    empty = build_model(config, run.training)
    model, wrapped = build_sharded(run, config, empty, world, torch.float32)
    optimizer = make_optimizer(run.optimizer, model)
    plan = StepPlan(
        torch.float32,
        False,
        run.sharding.sync_every_microbatch,
        run.sharding.reshard_after_forward is False,
        run.sharding.exchange,
        world.size,
    )
    is_deepspeed = run.sharding.step_engine == "deepspeed"
    if is_deepspeed:
        values = run.optimizer.model_copy(update={"clip_norm": clip_norm})
        changed = run.model_copy(update={"optimizer": values})
        wrapped = deepspeed.initialize(changed, model, optimizer.inner, torch.float32, world.device)
    pipeline = None if model.stages is None else model.stages.group
    losses, norms = [], []
    axes, width = run.axes, run.training.microbatch_samples
    share, rank = SAMPLES // axes.data, axes.data_rank(world.rank)
    for step in range(STEPS):
        seeds = [100 * (step % 2) + i for i in range(SAMPLES)]
        targets = tiny.targets([tiny.batch(seed) for seed in seeds])
        mine = seeds[rank * share : (rank + 1) * share]
        batches = [joined(mine[i : i + width]) for i in range(0, share, width)]
        engine = ENGINES[run.sharding.step_engine]
        loss = engine(wrapped, batches, axes.averaged / targets, plan)
        losses.append(float(summed(world, loss)) / targets)
        if is_deepspeed:
            norms.append(float(deepspeed.take_step(wrapped, 1e-2)))
        else:
            norms.append(float(take_step(optimizer, 1e-2, clip_norm, pipeline)))
    named = deepspeed.whole_parameters(wrapped) if is_deepspeed else dict(model.named_parameters())
    own = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in named.items()}
    weights = {n: p for part in gathered(world, own) for n, p in part.items()}
    return losses, norms, weights if world.rank == 0 else {}


def joined(seeds: list[int]) -> Any:
    batches = [tiny.batch(seed) for seed in seeds]
    lengths = tuple(n for b in batches for n in b.segment_lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    parts = [
        torch.cat([getattr(b, name) for b in batches])
        for name in ("tokens_BT", "labels_BT", "positions_BT")
    ]
    return type(batches[0])(*parts, ends, lengths, parts[0].numel())


@cache
def one_process(family: str, clip_norm: float | None, untied: bool = False) -> Any:
    alone = World(0, 1, torch.device("cpu"))
    config = config_of(family, Strategy("single", {}, untied))
    run = settings(config, small_run.sharding("single"), 1, training__microbatch_samples=SAMPLES)
    return train(alone, run, clip_norm)


def assert_same(reference: Any, got: Any) -> None:
    assert got[0] == pytest.approx(reference[0], abs=1e-5)
    assert got[1] == pytest.approx(reference[1], rel=1e-3)
    assert got[2].keys() == reference[2].keys()
    for name, weight in reference[2].items():
        torch.testing.assert_close(got[2][name], weight, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.matrix(always=one_family)
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("strategy", CASES, ids=str)
def test_strategy_equals_one_process(ranks: RankPool, strategy: Strategy, family: str) -> None:
    reference = one_process(family, 1.0, strategy.untied)
    assert reference[0][4] < reference[0][0] - 0.01, "the model must learn for this to mean much"
    if family not in strategy.families:
        answers = ranks.run(refused, chosen(strategy, family))
        assert all(any(w in a for w in REFUSALS) for a in answers)
        return
    got = ranks.run(train, chosen(strategy, family), 1.0)
    assert_same(reference, got[0])
    assert all(losses == got[0][0] for losses, _, _ in got), "ranks must agree on every loss"


@pytest.mark.login_node
def test_the_table_in_the_docs_is_of_every_strategy_and_family() -> None:
    document = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    table = document.partition("<!-- parity:")[2].partition("<!-- end of parity")[0]
    cells = [[cell.strip(" `") for cell in row.split("|")] for row in table.splitlines()[1:]]
    (_, *names), _, *rows = (row[1:-1] for row in cells)
    assert names == [*CONFIGS]
    assert [row[0] for row in rows] == [strategy.words for strategy in STRATEGIES]
    for strategy, (_, *differences) in zip(STRATEGIES, rows, strict=True):
        for family, difference in zip(names, differences, strict=True):
            assert (difference == "refused") == (family not in strategy.families)
            assert difference == "refused" or max(map(float, difference.split(","))) < 1e-5


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_without_clipping_and_with_other_microbatches(ranks: RankPool, strategy: Strategy) -> None:
    """A single one, or where stages wait for each other as many as there are stages in all."""
    family = strategy.families[0]
    run = chosen(strategy, family, microbatches=4 if strategy.untied else 1)
    got = ranks.run(train, run, None)
    assert_same(one_process(family, None, strategy.untied), got[0])


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if not s.changes][:4], ids=str)
def test_exchange_at_every_microbatch(ranks: RankPool, strategy: Strategy) -> None:
    run = chosen(strategy, "bert", sharding__sync_every_microbatch=True)
    assert_same(one_process("bert", 1.0), ranks.run(train, run, 1.0)[0])


@pytest.mark.parametrize("in_shards", [True, False])
def test_copies_of_shards_are_averaged_once(ranks: RankPool, in_shards: bool) -> None:
    """Microbatches are added up as shards or whole, before one all-reduce between the copies."""
    strategy = Strategy("hybrid_shard_zero2", {"sync_every_microbatch": in_shards})
    run = chosen(strategy, "llama")
    assert_same(one_process("llama", 1.0), ranks.run(train, run, 1.0)[0])


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s.name != "ddp"][2::5], ids=str)
@pytest.mark.parametrize("activation_checkpointing", ["full", "selective"])
def test_activation_checkpointing_changes_no_number(
    ranks: RankPool, activation_checkpointing: str, strategy: Strategy
) -> None:
    got = ranks.run(
        train,
        chosen(
            strategy,
            strategy.families[0],
            training__activation_checkpointing=activation_checkpointing,
        ),
        1.0,
    )
    assert_same(one_process(strategy.families[0], 1.0, strategy.untied), got[0])


def test_a_pipeline_of_four_ranks_has_two_neighbours_each(ranks: RankPool) -> None:
    strategy = Strategy("pipeline", {"pipeline": 4}, untied=True)
    got = ranks.run(train, chosen(strategy, "llama"), 1.0)
    assert_same(one_process("llama", 1.0, untied=True), got[0])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_experts_of_two_ranks_and_their_balance_equal_one_process(
    ranks: RankPool, family: str
) -> None:
    config = families.config_of(family) | SMALL
    more = {"training__microbatch_samples": SAMPLES // 2}
    alone = settings(config, small_run.sharding("single"), 1, **more)
    reference = train(World(0, 1, torch.device("cpu")), alone, 1.0)
    sharding = small_run.sharding("full_shard") | {"expert": 2}
    more["training__activation_checkpointing"] = "full" if family == "mixtral" else "none"
    got = ranks.run(train, settings(config, sharding, 2, **more), 1.0, world=2)
    assert_same(reference, got[0])


TIED = [s for s in STRATEGIES if s.untied]


def tied(run: Run) -> Run:
    """The run with an embedding that is the head too."""
    config = run.model.config | {"tie_word_embeddings": True}
    return run.model_copy(update={"model": run.model.model_copy(update={"config": config})})


@pytest.mark.matrix(always=lambda strategy, family: strategy == TIED[0] or family == "gpt2")
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("strategy", TIED, ids=str)
def test_the_ends_of_a_pipeline_share_a_tied_embedding(
    ranks: RankPool, strategy: Strategy, family: str
) -> None:
    if family not in strategy.families:
        return
    alone = settings(
        config_of(family, strategy),
        small_run.sharding("single"),
        1,
        training__microbatch_samples=SAMPLES,
    )
    reference = train(World(0, 1, torch.device("cpu")), tied(alone), 1.0)
    losses, norms, weights = ranks.run(train, tied(chosen(strategy, family)), 1.0)[0]
    [copy] = weights.keys() - reference[2].keys()
    [embedding] = [n for n in reference[2] if n.endswith(("wte.weight", "tokens.weight"))] or [
        "hf.bert.embeddings.word_embeddings.weight"
    ]
    assert torch.equal(weights.pop(copy), weights[embedding])
    assert_same(reference, (losses, norms, weights))


def test_clipping_acts(ranks: RankPool) -> None:
    unclipped = one_process("llama", None, untied=True)
    run = chosen(Strategy("full_shard", {"tensor": 2, "pipeline": 2}, True), "llama")
    clipped = ranks.run(train, run, 1e-4)[0]
    assert clipped[1][0] == pytest.approx(unclipped[1][0], rel=1e-3), "the norm before clipping"
    assert clipped[0][-1] != pytest.approx(unclipped[0][-1], abs=1e-4)


def refused(world: World, run: Run) -> str:
    with pytest.raises(UserError) as caught:
        train(world, run, 1.0)
    return caught.value.found


MADE_UP = """
name: made_up
layouts: []
exchange: one_by_one
"""


def one_by_one(gradients: Sequence[torch.Tensor], ranks: int) -> None:
    """A strategy of somebody's own: each rank in turn adds its gradient to what it receives."""
    rank = dist.get_rank()
    for gradient in gradients:
        if rank > 0:
            received = torch.empty_like(gradient)
            dist.recv(received, rank - 1)
            gradient += received
        if rank < ranks - 1:
            dist.send(gradient, rank + 1)
        dist.broadcast(gradient, ranks - 1)
        gradient /= ranks


def train_made_up(world: World, run: Run) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EXCHANGES, "one_by_one", one_by_one)
        return train(world, run, 1.0)


def test_a_made_up_strategy_is_one_yaml_and_one_function(ranks: RankPool) -> None:
    run = settings(config_of("llama"), yaml.safe_load(MADE_UP), 4)
    assert_same(one_process("llama", 1.0), ranks.run(train_made_up, run)[0])
