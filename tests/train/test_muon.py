"""Muon takes the steps of torch's own, however its matrices are divided."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import defaults
import families
import pytest
import small_run
import tiny
import torch
from rank_pool import RankPool
from test_train import stop_after
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from atoll import run_dir
from atoll.settings import Optimizer, Run
from atoll.sharding.process_group import World
from atoll.train import muon
from atoll.train.optimizer import make_optimizer, take_step
from atoll.train.parameter_groups import freeze

CONFIG = tiny.CONFIGS["llama"] | {"vocab_size": 300, "num_key_value_heads": 4}
RATE = 0.01


class Wrapped(nn.Module):
    """A model as the trainer holds it."""

    def __init__(self, config: dict[str, Any] = CONFIG) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        self.parts = SimpleNamespace(blocks="model.layers")


@pytest.mark.usefixtures("torch_s_kernels")
def test_one_process_takes_the_steps_of_torch_s_own() -> None:
    ours, theirs = Wrapped(), Wrapped()
    settings = Optimizer(**defaults.group("optimizer", name="muon", learning_rate=RATE))
    optimizer = make_optimizer(settings, ours)
    named = dict(theirs.named_parameters())
    hidden = [p for n, p in named.items() if ".layers." in n and p.ndim == 2]
    matrices = torch.optim.Muon(
        hidden,
        lr=RATE,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    rest = [p for n, p in named.items() if ".layers." not in n or p.ndim < 2]
    decay = [{"params": [p], "weight_decay": 0.1 * (p.ndim == 2)} for p in rest]
    others = torch.optim.AdamW(decay, lr=RATE, betas=settings.betas, eps=settings.epsilon)
    assert len(hidden) == 7 * CONFIG["num_hidden_layers"]
    for _ in range(3):
        for name, parameter in ours.named_parameters():
            gradient = torch.randn_like(parameter)
            parameter.grad, named[name].grad = gradient, gradient.clone()
        take_step(optimizer, RATE, None)
        matrices.step()
        others.step()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, named[name], msg=name)


@pytest.fixture
def torch_s_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for bf16, which torch's own takes wherever it runs."""
    monkeypatch.setattr(muon, "has_bf16", lambda device: True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("muon")
    small_run.write_text(path)
    return path


def trained(
    ranks: RankPool, folder: Path, strategy: str, world: int, stop: int = 0, **sharding: Any
) -> Path:
    run = small_run.settings(
        folder,
        world,
        name=f"muon-{strategy}",
        model__config=CONFIG | {"num_hidden_layers": 4},
        sharding=small_run.sharding(strategy) | sharding,
        optimizer__name="muon",
        export__dtype="float32",
        training__steps=4,
        checkpoint__every_steps=2,
    )
    made = small_run.ready(run)
    if stop:
        ranks.run(stop_after, run, stop, world=world)
    ranks.run(small_run.train_here, run, world=world)
    return made


@pytest.fixture(scope="module")
def whole(ranks: RankPool, folder: Path) -> dict[int, float]:
    losses = small_run.losses(trained(ranks, folder, "single", 1))
    assert losses[4] < losses[1]
    return losses


@pytest.mark.parametrize(
    ("strategy", "sharding"),
    [
        ("full_shard", {}),
        pytest.param("ddp", {}, marks=pytest.mark.full),
        pytest.param("hybrid_shard", {"shard": 2}, marks=pytest.mark.full),
        pytest.param("tensor", {}, marks=pytest.mark.full),
        pytest.param("context", {}, marks=pytest.mark.full),
        pytest.param("pipeline", {}, marks=pytest.mark.full),
    ],
)
def test_divided_matrices_learn_as_whole_ones(
    ranks: RankPool, folder: Path, whole: dict[int, float], strategy: str, sharding: dict[str, Any]
) -> None:
    """And go on from a checkpoint of their own."""
    made = trained(ranks, folder, strategy, 4, stop=2, **sharding)
    # the iteration is in bf16; of each rank's own part alone, the losses differ by 0.03
    assert small_run.losses(made) == pytest.approx(whole, abs=1e-4)


EXPERTS = families.config_of("mixtral") | {"vocab_size": 300, "output_router_logits": False}


@pytest.mark.usefixtures("torch_s_kernels")
def test_each_expert_learns_as_a_matrix_of_its_own() -> None:
    ours = Wrapped(EXPERTS)
    settings = Optimizer(**defaults.group("optimizer", name="muon", learning_rate=RATE))
    optimizer = make_optimizer(settings, ours)
    fused = {n: p for n, p in ours.named_parameters() if p.ndim == 3}
    apart = {n: [nn.Parameter(own.clone()) for own in p.detach()] for n, p in fused.items()}
    assert len(fused) == 2 * EXPERTS["num_hidden_layers"]
    theirs = torch.optim.Muon(
        [expert for each in apart.values() for expert in each],
        lr=RATE,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(3):
        for name, parameter in fused.items():
            parameter.grad = torch.randn_like(parameter)
            parameter.grad[step] = 0.0  # to which no token went
            for expert, gradient in zip(apart[name], parameter.grad, strict=True):
                expert.grad = gradient.clone()
        take_step(optimizer, RATE, None)
        theirs.step()
    for name, parameter in fused.items():
        expected = torch.stack(list(apart[name])).detach()
        torch.testing.assert_close(parameter.detach(), expected, atol=1e-5, rtol=1e-4, msg=name)


GROUPS = [
    {"names": "*.q_proj.*", "frozen": True},
    {"names": "*.mlp.*", "learning_rate_factor": 0.3, "weight_decay": 0.0},
    {"names": "*.embed_tokens.*", "learning_rate_factor": 0.1},
]


def test_groups_are_of_matrices_and_of_the_rest_alike() -> None:
    """A matrix of a group moves by its share of what it moves without, and is not decayed."""
    moved = []
    for groups in ([], GROUPS):
        model = Wrapped()
        values = {"name": "muon", "learning_rate": RATE, "groups": groups, "weight_decay": 0.0}
        settings = Optimizer(**defaults.group("optimizer", **values))
        freeze(settings, model)
        optimizer = make_optimizer(settings, model)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        torch.manual_seed(1)
        for parameter in model.parameters():
            gradient = torch.randn_like(parameter)
            parameter.grad = gradient if parameter.requires_grad else None
        take_step(optimizer, RATE, None)
        moved.append({n: p.detach() - before[n] for n, p in model.named_parameters()})
    shares = {"q_proj": 0.0, ".mlp.": 0.3, "embed_tokens": 0.1}
    for name, alone in moved[0].items():
        share = next((own for part, own in shares.items() if part in name), 1.0)
        torch.testing.assert_close(moved[1][name], alone * share, atol=1e-7, rtol=1e-3, msg=name)
    own = Optimizer(**defaults.group("optimizer", name="muon", groups=GROUPS))
    made = make_optimizer(own, Wrapped()).inner.param_groups
    matrices = {(g["learning_rate_factor"], g["weight_decay"]) for g in made if g["orthogonal"]}
    rest = {(g["learning_rate_factor"], g["weight_decay"]) for g in made if not g["orthogonal"]}
    assert matrices == {(1.0, 0.1), (0.3, 0.0)} and rest == {(1.0, 0.1), (0.1, 0.1), (1.0, 0.0)}


def train_in_fp32(world: World, run: Run) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "GATHERED_AS", torch.float32)
        small_run.train_here(world, run)


@pytest.mark.parametrize(
    ("strategy", "world", "sharding"),
    [
        ("full_shard", 2, {}),
        # of four experts, one for each rank; with another number of ranks, not as many for each
        pytest.param("full_shard", 3, {}, marks=pytest.mark.full),
        pytest.param("full_shard", 4, {"expert": 2}, marks=pytest.mark.full),
    ],
)
def test_divided_experts_learn_as_whole_ones(
    ranks: RankPool, folder: Path, strategy: str, world: int, sharding: dict[str, Any]
) -> None:
    """Beside a group of another rate and frozen parts.

    Products in fp32: some processors round those of several matrices in bf16 otherwise than of one.
    """
    groups = [GROUPS[0], {"names": "*.experts.*", "learning_rate_factor": 0.5}]
    seen = []
    for name, size, more in (("single", 1, {}), (strategy, world, sharding)):
        run = small_run.settings(
            folder,
            size,
            name=f"experts-{name}-{size}-{len(sharding)}",
            model__config=EXPERTS,
            sharding=small_run.sharding(name) | more,
            optimizer__name="muon",
            optimizer__groups=groups,
            training__steps=4,
            training__global_batch_samples=12,
            training__microbatch_samples=1,
        )
        made = small_run.ready(run)
        ranks.run(train_in_fp32, run, world=size)
        seen.append(small_run.losses(made))
    assert seen[0][4] < seen[0][1]
    assert seen[1] == pytest.approx(seen[0], abs=2e-5)


def typed(folder: Path, name: str, *words: str) -> list[str]:
    """The line of a run of experts, with groups and muP."""
    (folder / "text.txt").write_text(small_run.shared_text().read_text())
    config = {k: v for k, v in EXPERTS.items() if k != "model_type" and "_token_id" not in k}
    values = [f"model.config.{key}={json.dumps(value)}" for key, value in config.items()]
    line = ["facility=laptop", "optimizer=muon", f"name={name}", "data=text_files"]
    line += ["model=llama_tiny", "model.name=experts", "model.config.model_type=mixtral", *values]
    line += ["model.mup.base_width=32", f"data.files=[{folder}/text.txt]", "data.document=line"]
    line += ["data.validation.fraction=0.1", "data.sequence_tokens=32"]
    line += ["training.global_batch_samples=8", "tokenizer.vocabulary_tokens=290"]
    line += ["training.log_every_steps=1"]
    line += ["optimizer.groups=[{names:'*.experts.*',learning_rate_factor:0.5}]"]
    line += ["optimizer.warmup_steps=0", "generation.max_new_tokens=3"]
    line += [f"folders.runs={folder}/runs", f"folders.prepared={folder}/prepared"]
    script = Path(__file__).parents[2] / "sbatch" / "train.sbatch"
    return [str(script), *line, *words]


def carried_out(folder: Path, line: list[str]) -> None:
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.login_node
def test_a_whole_run_from_the_command_line(tmp_path: Path) -> None:
    """Trained, saved, exported and sampled from."""
    carried_out(tmp_path, typed(tmp_path, "muon", "training.steps=3"))
    made = tmp_path / "runs" / "muon"
    assert len(small_run.losses(made)) == 3
    assert (run_dir.export(made) / "config.json").is_file()


@pytest.mark.full
@pytest.mark.login_node
def test_a_killed_run_is_typed_again_and_goes_on(tmp_path: Path) -> None:
    words = ["training.steps=60", "checkpoint.every_steps=5"]
    carried_out(tmp_path, typed(tmp_path, "whole", *words))
    line = typed(tmp_path, "killed", *words)
    process = subprocess.Popen(
        line, cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True
    )
    killed = tmp_path / "runs" / "killed"
    while not list(run_dir.checkpoints(killed).glob("step-*")):
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not run_dir.result_file(killed).exists()
    carried_out(tmp_path, line)
    assert small_run.losses(killed) == small_run.losses(tmp_path / "runs" / "whole")


@pytest.mark.parametrize("shape", [(32, 64), (64, 32), (3, 32, 64)])
def test_a_device_without_bf16_has_the_same_numbers(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(5)).bfloat16()
    in_fp32 = Mock(wraps=muon.in_fp32)
    monkeypatch.setattr(muon, "in_fp32", in_fp32)
    made = []
    for able, products in ((True, 0), (False, 3 * muon.ITERATIONS)):
        monkeypatch.setattr(muon, "has_bf16", lambda device, able=able: able)
        made.append(muon.newton_schulz(matrix))
        assert in_fp32.call_count == products
    assert made[1].dtype == torch.bfloat16
    # a sum in another order may be rounded to the next number
    torch.testing.assert_close(made[1], made[0], atol=2**-8, rtol=2**-7)
