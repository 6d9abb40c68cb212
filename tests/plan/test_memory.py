"""What an optimizer keeps, and what it gathers."""

from pathlib import Path

import pytest
import small_run
import tiny
from transformers import AutoConfig

from atoll.plan.memory import memory_of, why_unknown
from atoll.plan.shapes import shape_of
from atoll.plan.traffic import bytes_sent

LLAMA = {"model_type": "llama"}  # 2 7B, as transformers has it by default


def test_muon_keeps_one_moment_of_a_matrix_and_gathers_it() -> None:
    shape, sharding = shape_of(LLAMA), small_run.sharding("full_shard")
    adamw, muon = (
        small_run.settings(Path("/x"), 4, sharding=sharding, optimizer__name=name)
        for name in ("adamw", "muon")
    )
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    saved = memory_of(adamw, shape).optimizer - memory_of(muon, shape).optimizer
    assert saved == pytest.approx(4 * matrices / 4)
    sent = [bytes_sent(run, shape)["parameters"] for run in (adamw, muon)]
    assert sent[1] - sent[0] == pytest.approx(3 / 4 * 2 * matrices)


def test_muon_keeps_one_moment_of_experts_and_gathers_divided_ones() -> None:
    shape = shape_of(AutoConfig.for_model("mixtral").to_dict())  # 8x7B
    experts, sent = 32 * 8 * 3 * 4096 * 14336, []
    for ranks in (1, 2):
        sharding = small_run.sharding("full_shard") | {"expert": ranks}
        adamw, muon = (
            small_run.settings(Path("/x"), 4, sharding=sharding, optimizer__name=name)
            for name in ("adamw", "muon")
        )
        matrices = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 8 * 4096)
        saved = memory_of(adamw, shape).optimizer - memory_of(muon, shape).optimizer
        assert saved == pytest.approx(4 * (matrices + experts) / 4)
        more = [bytes_sent(run, shape)["parameters"] for run in (adamw, muon)]
        sent.append(more[1] - more[0])
    # of a rank's half, the other rank with the same experts has one half
    assert sent[1] - sent[0] == pytest.approx(2 * experts / 2 / 2)


@pytest.mark.parametrize("family", ["qwen2_moe", "ernie4_5_moe", "glm4_moe"])
def test_experts_of_a_family_without_a_line_are_not_guessed(family: str) -> None:
    """How wide they are, and what is beside them, each family says by names of its own."""
    config = AutoConfig.for_model(family).to_dict()
    run = small_run.settings(Path("/x"), 4, sharding=small_run.sharding("full_shard"))
    assert why_unknown(run, shape_of(config)) == f"the experts of {family} have no formula"
    assert why_unknown(run, shape_of(AutoConfig.for_model("qwen3_moe").to_dict())) == ""


def test_selective_recompute_keeps_what_attention_gives() -> None:
    shape, sharding = shape_of(LLAMA), small_run.sharding("full_shard")
    peaks = {}
    for kind in ("none", "selective", "full"):
        run = small_run.settings(
            Path("/x"),
            4,
            sharding=sharding,
            training__activation_checkpointing=kind,
            data__sequence_tokens=32768,
        )
        peaks[kind] = memory_of(run, shape).peak
    tokens = run.training.microbatch_samples * run.data.sequence_tokens
    kept = 32 * tokens * (4096 * 4 + 32 * 4)  # of each layer, in fp32, with the normalisers
    assert peaks["selective"] - peaks["full"] == pytest.approx(kept)
    assert peaks["full"] < peaks["selective"] < peaks["none"]


def test_fsdp_gathers_the_weights_of_one_rank_too() -> None:
    """A pipeline of two ranks has one rank a stage: it computes with a copy of its weights."""
    shape, sharding = shape_of(LLAMA), small_run.sharding("full_shard") | {"pipeline": 2}
    sharding |= {"reshard_after_forward": False}
    run = small_run.settings(Path("/x"), 2, sharding=sharding)
    memory = memory_of(run, shape)
    assert memory.gathered == memory.parameters


def test_a_checkpoint_is_copied_beside_the_next_step() -> None:
    shape = shape_of(LLAMA)
    ends, between = (
        memory_of(
            small_run.settings(Path("/x"), 1, checkpoint__every_steps=every, training__steps=4),
            shape,
        )
        for every in (0, 2)
    )
    assert ends.checkpoint == 12 * shape.parameters
    assert between.needed == between.peak + between.checkpoint
    assert ends.peak < ends.needed < between.needed


@pytest.mark.parametrize("sharding", ["single", "full_shard"])
def test_a_run_without_steps_needs_its_weights_and_a_pass(sharding: str) -> None:
    shape, ranks = shape_of(LLAMA), 1 if sharding == "single" else 4
    given = {"sharding": small_run.sharding(sharding), "data__sequence_tokens": 512}
    trained, evaluated = (
        memory_of(small_run.settings(Path("/x"), ranks, **given, training__steps=steps), shape)
        for steps in (4, 0)
    )
    assert trained.peak > 3 * evaluated.peak
    assert evaluated.gradients == evaluated.optimizer == evaluated.checkpoint == 0
    more = evaluated.peak - evaluated.runtime - evaluated.parameters - evaluated.gathered
    assert more == evaluated.activations < trained.activations / 8
    assert evaluated.needed == max(evaluated.peak, evaluated.runtime + evaluated.loading)


def test_each_rank_has_the_whole_model_while_tasks_are_scored() -> None:
    shape, sharding = shape_of(LLAMA), small_run.sharding("full_shard")
    for steps in (0, 4):
        given = {"training__steps": steps, "data__sequence_tokens": 512}
        alone, scored = (
            memory_of(
                small_run.settings(
                    Path("/x"), 4, sharding=sharding, evaluation__tasks=tasks, **given
                ),
                shape,
            )
            for tasks in ([], ["hellaswag"])
        )
        assert alone.scoring == 0
        state = alone.parameters + alone.optimizer
        logits = 2 * 512 * 32000
        assert scored.scoring == pytest.approx(state + 2 * (shape.parameters + logits), rel=0.02)
        assert scored.needed >= scored.runtime + scored.scoring


def test_a_processor_s_heap_keeps_small_blocks() -> None:
    """Blocks of over 32 MiB go back when they are freed: here 11008 numbers a token, in fp32."""
    shape, sizes = shape_of(LLAMA), []
    for tokens in (512, 1024):
        run = small_run.settings(Path("/x"), 1, data__sequence_tokens=tokens)
        run = run.model_copy(
            update={"training": run.training.model_copy(update={"microbatch_samples": 1})}
        )
        memory = memory_of(run, shape)
        sizes.append(memory.heap)
        assert memory.whole == max(memory.needed, memory.peak + memory.heap)
    assert sizes[0] > 0 and sizes[1] == 0
    node = run.facility.node.model_copy(update={"device": "cuda"})
    facility = run.facility.model_copy(update={"node": node})
    assert memory_of(run.model_copy(update={"facility": facility}), shape).heap == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_recomputing_leaves_blocks_in_the_heap_too(ranks: int) -> None:
    shape, heaps = shape_of(tiny.CONFIGS["llama"]), {}
    for sharding in ("ddp", "full_shard"):
        for recompute in ("none", "full"):
            words = {"training__activation_checkpointing": recompute}
            words["sharding"] = small_run.sharding(sharding)
            memory = memory_of(small_run.settings(Path("/x"), ranks, **words), shape)
            heaps[sharding, recompute] = memory.heap
    left = heaps["ddp", "full"] / heaps["ddp", "none"]
    assert left == pytest.approx(0.4 / 0.5, rel=1e-4)
    more = heaps["full_shard", "full"] - heaps["ddp", "full"]
    # two blocks and what is outside them are gathered at once
    rest = shape.rest_parameters
    blocks = (memory.gathered - 4 * rest) / 2 * shape.layers
    kept = 1.2 * 2 * blocks + 2.0 * (4 * rest + memory.buffers)
    assert more == pytest.approx(kept * (ranks > 1), abs=2)


@pytest.mark.parametrize("each_microbatch", [False, True])
def test_ddp_keeps_its_gradients_and_adds_up_beside_them(each_microbatch: bool) -> None:
    shape, peaks = shape_of(tiny.CONFIGS["llama"]), []
    for batch in (2, 4):  # one microbatch a step, and two
        words = {"sharding__sync_every_microbatch": each_microbatch}
        words |= {"training__global_batch_samples": batch, "training__microbatch_samples": 1}
        run = small_run.settings(Path("/x"), 2, sharding=small_run.sharding("ddp"), **words)
        peaks.append(memory_of(run, shape))
    more = peaks[1].peak - peaks[0].peak
    assert more == (0 if each_microbatch else peaks[0].gradients)


def test_adapters_leave_more_in_the_heap_of_one_rank() -> None:
    shape, lora = shape_of(tiny.CONFIGS["llama"]), {"rank": 2, "alpha": 4}
    run = small_run.settings(Path("/x"), 1, sharding=small_run.sharding("single"), model__lora=lora)
    memory = memory_of(run, shape)
    assert memory.heap == pytest.approx(0.95 * (memory.activations + memory.logits), abs=2)


def test_deepspeed_divides_by_its_stage() -> None:
    shape, ranks = shape_of(LLAMA), 4
    n, sizes = shape.parameters, dict[int, tuple[int, int, int]]()
    for stage in (1, 2, 3):
        sharding = small_run.sharding(f"deepspeed_zero{stage}")
        run = small_run.settings(Path("/x"), ranks, sharding=sharding)
        assert why_unknown(run, shape) == ""
        memory = memory_of(run, shape)
        sizes[stage] = (memory.parameters, memory.gradients, memory.optimizer)
    whole, part, states = 4 * n, n, 3 * n  # fp32; a master copy and two moments, divided
    assert sizes == {
        1: (whole, whole + part, states),
        2: (whole, part, states),
        3: (part, part, states),
    }


def test_what_lies_in_files_has_no_formula() -> None:
    sharding = small_run.sharding("deepspeed_zero3_nvme")
    run = small_run.settings(Path("/x"), 4, sharding=sharding)
    assert "files" in why_unknown(run, shape_of(LLAMA))
