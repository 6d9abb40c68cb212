"""Whole runs under each strategy: evaluation, checkpoints, another layout after them, exports."""

import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import small_run
import tiny
import torch
from rank_pool import RankPool
from safetensors import safe_open
from safetensors.torch import load_file
from test_train import plain_loss, stop_after
from transformers import AutoModelForCausalLM

from atoll import run_dir
from atoll.settings import Run
from atoll.sharding import deepspeed
from atoll.sharding.process_group import World
from atoll.train import checkpoint
from atoll.train import train as trainer
from atoll.train.assemble import TrainState
from atoll.train.checkpoint_files import bytes_of_all
from atoll.train.state_dict import state_dict

CONFIG = tiny.CONFIGS["llama"] | {
    "vocab_size": 300,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "all_reduce": {},
    "gather_scatter": {},
    "full_shard_offload": {},
    "deepspeed_zero1": {},
    "deepspeed_zero3": {},
    "deepspeed_zero3_offload": {},
    "context": {},
    "tensor": {},
    "pipeline": {},
    "pipeline_interleaved": {},
    "hybrid_shard": {"tensor": 2},
    "shard_grad_op": {"tensor": 2, "pipeline": 2},
}
MIXTURE = CONFIG | {"model_type": "mixtral", "num_local_experts": 4, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("strategies")
    small_run.write_text(path)
    return path


@pytest.fixture(scope="module")
def whole(ranks: RankPool, folder: Path) -> Path:
    return reference(ranks, folder, CONFIG, "reference")


def spread(folder: Path, strategy: str, family: dict[str, Any] = CONFIG, **more: Any) -> Run:
    sharding = small_run.sharding(strategy) | STRATEGIES.get(strategy, {})
    exact = {"model__config": family, "export__dtype": "float32"}
    short = {"training__steps": 4, "checkpoint__every_steps": 2}
    return small_run.settings(folder, 4, sharding=sharding, **exact, **short, **more)


def reference(ranks: RankPool, folder: Path, family: dict[str, Any], name: str) -> Path:
    run = spread(folder, "full_shard", family, name=name)
    run_folder = small_run.ready(run)
    ranks.run(small_run.train_here, run)
    return run_folder


@pytest.fixture(scope="module")
def stopped(ranks: RankPool, folder: Path) -> Path:
    """A run under full_shard that fell over after its checkpoint of step 2."""
    run = spread(folder, "full_shard", name="stopped")
    run_folder = small_run.ready(run)
    ranks.run(stop_after, run, 2)
    return run_folder


@pytest.mark.parametrize("strategy", ["pipeline", "pipeline_interleaved"])
def test_a_tied_model_goes_through_a_pipeline(ranks: RankPool, folder: Path, strategy: str) -> None:
    """From full_shard and back to it: one embedding is saved and exported, whoever has copies."""
    family = CONFIG | {"tie_word_embeddings": True}
    expected = small_run.losses(reference(ranks, folder, family, f"tied_for_{strategy}"))
    for first, second in (("full_shard", strategy), (strategy, "full_shard")):
        run = spread(folder, first, family, name=f"tied_{first}_to_{second}")
        run_folder = small_run.ready(run)
        ranks.run(stop_after, run, 2)
        again = spread(folder, second, family, name=run.name)
        ranks.run(small_run.train_here, again)
        assert small_run.losses(run_folder) == pytest.approx(expected, abs=1e-4), first
        held_out = small_run.records(run_folder, "evaluation")[-1]["loss"]
        assert plain_loss(again, run_dir.export(run_folder)) == pytest.approx(held_out, abs=1e-4)
        names = {
            name
            for file in run_dir.export(run_folder).glob("*.safetensors")
            for name in safe_open(file, "pt").keys()  # noqa: SIM118
        }
        assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", list(STRATEGIES)[1:])
def test_a_run_goes_on_under_another_strategy(
    ranks: RankPool, folder: Path, whole: Path, stopped: Path, strategy: str
) -> None:
    """From full_shard to the strategy and the other way, at step 2 of 4."""
    expected = small_run.losses(whole)
    held_out = small_run.records(whole, "evaluation")[-1]["loss"]
    for first, second in (("full_shard", strategy), (strategy, "full_shard")):
        run = spread(folder, first, name=f"{first}_to_{second}")
        run_folder = run_dir.folder(run)
        if first == "full_shard":
            shutil.copytree(stopped, run_folder)
        else:
            small_run.ready(run)
            ranks.run(stop_after, run, 2)
        assert checkpoint.latest(run_folder) == run_dir.checkpoint(run_folder, 2)
        again = spread(folder, second, name=run.name)
        ranks.run(small_run.train_here, again)
        assert small_run.losses(run_folder) == pytest.approx(expected, abs=1e-4), first
        last = small_run.records(run_folder, "evaluation")[-1]
        assert last["loss"] == pytest.approx(held_out, abs=1e-4)
        assert plain_loss(again, run_dir.export(run_folder)) == pytest.approx(held_out, abs=1e-4)


@pytest.mark.full
def test_a_mixture_goes_on_with_its_experts_divided(ranks: RankPool, folder: Path) -> None:
    """Between experts on all ranks, on two of four, and whole ones: checkpoints, exports."""
    expected = small_run.losses(reference(ranks, folder, MIXTURE, "mixture"))
    for first, second in ((4, 1), (1, 2), (2, 4)):
        name = f"experts_{first}_to_{second}"
        run = spread(folder, "full_shard", MIXTURE, name=name, sharding__expert=first)
        run_folder = small_run.ready(run)
        ranks.run(stop_after, run, 2)
        again = spread(folder, "full_shard", MIXTURE, name=name, sharding__expert=second)
        ranks.run(small_run.train_here, again)
        assert small_run.losses(run_folder) == pytest.approx(expected, abs=1e-4), name
        held_out = small_run.records(run_folder, "evaluation")[-1]["loss"]
        assert plain_loss(again, run_dir.export(run_folder)) == pytest.approx(held_out, abs=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("family", ["opt", "bert"])
def test_vectors_that_two_axes_cut_are_saved_whole(
    ranks: RankPool, folder: Path, family: str
) -> None:
    config = tiny.CONFIGS[family] | {"vocab_size": 300}
    expected = small_run.losses(reference(ranks, folder, config, f"{family}_reference"))
    run = spread(folder, "hybrid_shard", config, name=f"{family}_moved")
    run_folder = small_run.ready(run)
    ranks.run(stop_after, run, 2)
    again = spread(folder, "full_shard", config, name=f"{family}_moved")
    ranks.run(small_run.train_here, again)
    assert small_run.losses(run_folder) == pytest.approx(expected, abs=1e-4)
    model = AutoModelForCausalLM.from_pretrained(run_dir.export(run_folder))
    assert all(torch.isfinite(p).all() for p in model.parameters())


class OnDevice:
    """A tensor that DeepSpeed has gathered; a copy of it there would stay there."""

    device = torch.device("cuda", 0)

    def cpu(self) -> torch.Tensor:
        return torch.ones(2)


def test_deepspeed_s_state_is_gathered_into_the_node_s_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    utils: Any = ModuleType("deepspeed.utils")
    utils.safe_get_full_fp32_param = lambda parameter: OnDevice()
    utils.safe_get_full_optimizer_state = lambda parameter, moment: OnDevice()
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.utils", utils)
    engine = SimpleNamespace(
        module=torch.nn.Linear(2, 2),
        optimizer=SimpleNamespace(optimizer=SimpleNamespace(state={"there": "already"})),
        global_steps=3,
        skipped_steps=1,
    )
    state = deepspeed.state_of(engine)
    assert len(state) == 2 * 4
    assert {str(tensor.device) for tensor in state.values()} == {"cpu"}


def gathered_before_the_first_step(world: World, run: Run) -> tuple[int, int, int]:
    """How often a fresh run asked for its state; the bytes it reckoned with, and those it has."""
    calls, reckoned, had = [], [], []
    gather, check = deepspeed.state_of, checkpoint.check_space

    def gathered(engine: Any) -> Any:
        calls.append(engine)
        return gather(engine)

    def checked(folder: Path, each_bytes: int, keep: int) -> None:
        reckoned.append(each_bytes)
        check(folder, each_bytes, keep)

    def begin(train_state: TrainState, *_: Any) -> int:
        count = len(calls)
        had.append(bytes_of_all(state_dict(train_state), world))
        del calls[count:]
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed, "state_of", gathered)
        patch.setattr(checkpoint, "check_space", checked)
        patch.setattr(trainer, "train_from", begin)
        small_run.train_here(world, run)
    return len(calls), reckoned[0], had[0]


@pytest.mark.parametrize("strategy", ["deepspeed_zero1", "deepspeed_zero3"])
def test_a_fresh_run_gathers_nothing(ranks: RankPool, folder: Path, strategy: str) -> None:
    sharding = small_run.sharding(strategy)
    run = small_run.settings(folder, 2, name=f"fresh_{strategy}", sharding=sharding)
    small_run.ready(run)
    for calls, reckoned, had in ranks.run(gathered_before_the_first_step, run, world=2):
        assert calls == 0
        assert reckoned == had > 0


def copies_made(world: World, run: Run) -> int:
    """How often a run copied a state that is to be saved."""
    made = []
    stager = checkpoint._stager

    def copied(device: torch.device) -> Any:
        made.append(device)
        return stager(device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_stager", copied)
        small_run.train_here(world, run)
    return len(made)


@pytest.mark.parametrize(("strategy", "copies"), [("deepspeed_zero3", 0), ("full_shard", 2)])
def test_what_was_gathered_to_be_saved_is_not_copied_again(
    ranks: RankPool, folder: Path, strategy: str, copies: int
) -> None:
    sharding = small_run.sharding(strategy)
    run = small_run.settings(folder, 2, name=f"copies_{strategy}", sharding=sharding)
    small_run.ready(run)
    assert ranks.run(copies_made, run, world=2) == [copies] * 2


DIVIDED = ["shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "full_shard_offload"]


@pytest.mark.matrix(always=lambda strategy: strategy == "shard_grad_op")
@pytest.mark.parametrize("strategy", DIVIDED)
def test_adapters_learn_however_fsdp_divides_them(
    ranks: RankPool, folder: Path, strategy: str
) -> None:
    model = {"name": "llama", "config": CONFIG, "lora": {"rank": 4}}
    made = []
    for name in ("single", strategy):
        world = 1 if name == "single" else 4
        shard = {"shard": 2} if name.startswith("hybrid") else {}
        run = small_run.settings(
            folder,
            world,
            name=f"lora-{strategy}-{world}",
            model=model,
            sharding=small_run.sharding(name) | shard,
            export__dtype="float32",
            training__steps=4,
        )
        made.append(small_run.ready(run))
        ranks.run(small_run.train_here, run, world=world)
    alone, divided = made
    losses = small_run.losses(alone)
    assert losses[4] < losses[1]
    assert small_run.losses(divided) == pytest.approx(losses, abs=1e-5)
    ours, theirs = (stored(run_dir.export(of) / "adapter") for of in (divided, alone))
    for parameter in theirs:
        torch.testing.assert_close(ours[parameter], theirs[parameter], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("strategy", ["full_shard", "full_shard_offload"])
def test_adapters_beside_sharded_4_bit_weights(
    ranks: RankPool, folder: Path, quantised: Path, strategy: str
) -> None:
    run = beside_4_bits(folder, strategy, 2)
    sharded = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=2)
    assert small_run.losses(sharded) == pytest.approx(small_run.losses(quantised), abs=1e-5)
    for part in (".", "adapter"):
        ours, theirs = (stored(run_dir.export(of) / part) for of in (sharded, quantised))
        assert ours.keys() == theirs.keys() and ours
        for parameter in ours:
            torch.testing.assert_close(ours[parameter], theirs[parameter], atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def quantised(ranks: RankPool, folder: Path) -> Path:
    run = beside_4_bits(folder, "single", 1)
    run_folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=1)
    return run_folder


def beside_4_bits(folder: Path, strategy: str, world: int) -> Run:
    model = {"name": "llama", "config": CONFIG | {"hidden_size": 64, "intermediate_size": 128}}
    return small_run.settings(
        folder,
        world,
        name=f"nf4-{strategy}",
        model=model | {"lora": {"rank": 4}, "quantisation": "nf4"},
        sharding=small_run.sharding(strategy),
        export__dtype="float32",
        training__steps=4,
    )


def stored(export: Path) -> dict[str, torch.Tensor]:
    files = [load_file(path) for path in sorted(export.glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in file.items()}
