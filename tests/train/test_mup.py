"""muP: a step of a wide model is that of the paper's multipliers, and no width changes its size."""

import copy
import math
from pathlib import Path
from typing import Any

import defaults
import families
import pytest
import small_run
import tiny
import torch
from rank_pool import RankPool
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from atoll.models.build import build_config, build_model, weights_for
from atoll.models.mup import widths_of
from atoll.models.weights import fill, fill_buffers, materialize
from atoll.settings import Model, Mup, Optimizer, Training
from atoll.settings.learning import MUP_FAMILIES
from atoll.sharding.process_group import World
from atoll.train.assemble import assemble
from atoll.train.export_model import write_export
from atoll.train.optimizer import NamedOptimizer, make_optimizer, take_step

LLAMA = tiny.CONFIGS["llama"]  # of width 32, heads of 8
RATE, DECAY, CLIP = 0.01, 0.1, 0.5
NAMES = {family: name for name, (family, _) in families.FAMILIES.items()}


def made(config: dict[str, Any], **mup: int) -> Any:
    settings = Model(name="tiny", config=config, mup=Mup(**mup))
    training = Training(**defaults.group("training", global_batch_samples=1))
    hf_config = build_config(settings, tiny.VOCABULARY, tiny.SEQUENCE, {})
    model = build_model(hf_config, training)
    materialize(model, torch.device("cpu"))
    with weights_for(settings, hf_config, 0) as read:
        fill(model.hf, read)
    fill_buffers(model.hf)
    return model


def with_optimizer(
    config: dict[str, Any], name: str = "adamw", rate: float = RATE, **mup: int
) -> Any:
    model = made(config, **mup)
    values = {"name": name, "learning_rate": rate, "weight_decay": DECAY}
    settings = Optimizer(**defaults.group("optimizer", **values))
    return model, make_optimizer(settings, model, widths_of(Mup(**mup), model.hf, model.parts))


def losses(
    model: Any, optimizer: NamedOptimizer, steps: int = 4, rate: float = RATE
) -> list[float]:
    batch, seen = tiny.batch(5, samples=2), []
    for _ in range(steps):
        loss = model(batch, torch.float32) / tiny.targets([batch])
        loss.backward()
        take_step(optimizer, rate, CLIP)
        seen.append(float(loss.detach()))
    return seen


class Multiplied:
    """The paper's table 8: multipliers of logits and of scores stand in the forward pass."""

    def __init__(self, config: dict[str, Any], ratio: float, heads_ratio: float) -> None:
        self.hf, self.ratio = made(config).hf, ratio
        for block in self.hf.model.layers:
            block.self_attn.scaling /= math.sqrt(heads_ratio)
        hidden = [p for n, p in self.hf.named_parameters() if ".layers." in n and p.ndim == 2]
        with torch.no_grad():
            for matrix in hidden:
                matrix /= math.sqrt(ratio)
        own = {id(p) for p in hidden}
        rest = [p for p in self.hf.parameters() if id(p) not in own]
        groups = [
            # what a step decays is the same at any width
            {"params": hidden, "lr": RATE / ratio, "weight_decay": DECAY * ratio},
            {"params": [p for p in rest if p.ndim == 2], "weight_decay": DECAY},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)

    def losses(self, steps: int = 4) -> list[float]:
        batch, seen = tiny.batch(5, samples=2), []
        lengths = {"segment_lengths": batch.segment_lengths, "position_ids": batch.positions_BT}
        for _ in range(steps):
            hidden = self.hf.model(batch.tokens_BT, use_cache=False, **lengths).last_hidden_state
            logits = self.hf.lm_head(hidden) / self.ratio
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_BT.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(self.hf.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen.append(float(loss.detach()))
        return seen


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", [8, 2])
def test_steps_are_those_of_multipliers_in_the_forward_pass(tied: bool, head: int) -> None:
    """With clipping and decay."""
    config = LLAMA | {"tie_word_embeddings": tied}
    plain = Multiplied(config, ratio=4.0, heads_ratio=8 / head)
    model, optimizer = with_optimizer(config, base_width=8, base_head_width=head)
    expected = plain.losses()
    assert expected[-1] < expected[0] - 0.01
    assert losses(model, optimizer) == pytest.approx(expected, abs=2e-5)


def test_the_base_width_is_the_model_as_it_was() -> None:
    one, other = with_optimizer(LLAMA), with_optimizer(LLAMA, base_width=32, base_head_width=8)
    assert losses(*one) == losses(*other)


def test_a_bias_of_a_head_of_its_own_is_no_part_of_the_scale() -> None:
    widths = widths_of(Mup(base_width=8), made(LLAMA).hf, made(LLAMA).parts)
    assert widths is not None
    assert widths.scale("hf.lm_head.weight", torch.empty(4, 4)).rate == 0.25
    assert widths.scale("hf.lm_head.bias", torch.empty(4)).rate == 1.0


def config_of(family: str, times: int) -> dict[str, Any]:
    """Of a family, with every width of its blocks so many times wider."""
    if family == "gpt2":
        return tiny.CONFIGS["gpt2"] | {"n_embd": 32 * times, "n_head": 4 * times}
    config = tiny.CONFIGS["opt"] | {"word_embed_proj_dim": 32}
    if family != "opt":
        config = families.config_of(NAMES[family])
    names = ("hidden_size", "intermediate_size", "ffn_dim", "num_attention_heads")
    names += ("num_key_value_heads", "moe_intermediate_size", "word_embed_proj_dim")
    return config | {name: config[name] * times for name in names if name in config}


def change(config: dict[str, Any], optimizer: str, **mup: int) -> float:
    """The mean size of what three steps change in the logits of one batch."""
    model, chosen = with_optimizer(config, optimizer, 1e-3, **mup)
    tokens = tiny.batch(5, samples=2).tokens_BT
    with torch.no_grad():
        before = model.hf(tokens).logits
    losses(model, chosen, steps=3, rate=1e-3)
    with torch.no_grad():
        return float((model.hf(tokens).logits - before).abs().mean())


def slope(family: str, optimizer: str, is_mup: bool) -> float:
    """Of the change's logarithm over that of the width, between one width and eight times that."""
    base = AutoConfig.for_model(**config_of(family, 1)).hidden_size
    mup = {"base_width": base} if is_mup else {}
    narrow, wide = (change(config_of(family, times), optimizer, **mup) for times in (1, 8))
    return math.log(wide / narrow) / math.log(8)


CASES = [("llama", "adamw"), ("llama", "muon"), ("mixtral", "muon")]
CASES += [(family, "adamw") for family in MUP_FAMILIES if family != "llama"]


@pytest.mark.parametrize(
    ("family", "optimizer"),
    [case if case in CASES[:2] else pytest.param(*case, marks=pytest.mark.full) for case in CASES],
)
def test_what_a_step_changes_is_the_same_at_any_width(family: str, optimizer: str) -> None:
    """The coordinate check of the paper; benchmarks/coordinate_check.py has more widths."""
    # at the narrow end part of a change, of the order of 1 / sqrt(width), is still to be seen
    assert -0.35 < slope(family, optimizer, is_mup=True) < 0.15
    assert slope(family, optimizer, is_mup=False) > 0.6


def stepped(world: World, run: Any, folder: Path) -> torch.Tensor:
    """Logits of a model after three steps, written to `folder` as an export."""
    state = assemble(run, folder, world)
    batch = tiny.batch(5, samples=2)
    for _ in range(3):
        state.wrapped(batch, torch.float32).backward()
        take_step(state.optimizer, 1e-2, 1.0)
    write_export(state, folder / "export")
    with torch.no_grad():
        return torch.as_tensor(state.model.hf(batch.tokens_BT).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_has_the_same_logits_in_plain_transformers(
    tied: bool, ranks: RankPool, tmp_path: Path
) -> None:
    small_run.write_text(tmp_path)
    config = LLAMA | {"vocab_size": 300, "tie_word_embeddings": tied}
    model = {"name": "x", "config": config, "mup": {"base_width": 8, "base_head_width": 4}}
    run = small_run.settings(
        tmp_path,
        1,
        model=model,
        sharding=small_run.sharding("single"),
        export__dtype="float32",
    )
    folder = small_run.ready(run)
    logits = ranks.run(stepped, run, folder, world=1)[0]
    plain = AutoModelForCausalLM.from_pretrained(folder / "export", attn_implementation="eager")
    with torch.no_grad():
        theirs = plain(tiny.batch(5, samples=2).tokens_BT).logits
    torch.testing.assert_close(theirs, logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "sharding",
    [
        "full_shard",
        *(pytest.param(s, marks=pytest.mark.full) for s in ("ddp", "tensor", "pipeline")),
    ],
)
def test_divided_models_learn_as_whole_ones(sharding: str, ranks: RankPool, tmp_path: Path) -> None:
    small_run.write_text(tmp_path)
    seen = []
    for name, world in (("single", 1), (sharding, 2)):
        config = copy.deepcopy(LLAMA) | {"vocab_size": 300, "tie_word_embeddings": True}
        run = small_run.settings(
            tmp_path,
            world,
            name=name,
            model={"name": "x", "config": config, "mup": {"base_width": 8}},
            sharding=small_run.sharding(name),
        )
        folder = small_run.ready(run)
        ranks.run(small_run.train_here, run, world=world)
        seen.append(small_run.losses(folder))
    assert seen[1] == pytest.approx(seen[0], abs=1e-4)
