"""A run that its devices cannot hold is refused where it is typed, with one near it that fits."""

import os
import re
import time

import pytest

from atoll.cluster.fit import check_fit, unknown_fit
from atoll.cluster.submit import main
from atoll.cluster.submit_checks import check
from atoll.config.compose import known_shape
from atoll.errors import UserError
from atoll.plan.choose import fits
from atoll.plan.memory import memory_of

ACCOUNT = "facility.account=x"
KAROLINA = ("facility=karolina", ACCOUNT, "model=llama2_7b", "data.sequence_tokens=2048")
EVALUATED = ("training.steps=0", "precision=fp32", "training.global_batch_samples=64")
SEVENTY = (
    *("model=llama2_7b", "model.config.hidden_size=8192", "model.config.num_hidden_layers=80"),
    *("model.config.num_attention_heads=64", "model.config.num_key_value_heads=8"),
    *("model.config.intermediate_size=28672", "training.microbatch_samples=1"),
    *("training.activation_checkpointing=full", "data.sequence_tokens=2048"),
    "training.global_batch_samples=256",
)
TOO_LARGE = {
    "copies": ["sharding=ddp"],
    "as many samples as there are": [
        "training.microbatch_samples=16",
        "training.global_batch_samples=512",
    ],
    "long samples": ["data.sequence_tokens=4096", "training.microbatch_samples=8"],
    "whole gradients": [
        "experiment=llama2_7b_it",
        "training.device_batch_samples=16",
        "sharding.sync_every_microbatch=false",
        "facility=leonardo",
    ],
    "one device": ["ranks_per_node=1", "sharding=single", "precision=bf16"],
    "an evaluation": [*EVALUATED, "sharding=ddp"],
    "nodes alone": ["model.config.num_hidden_layers=120", "training.microbatch_samples=1"],
}


@pytest.mark.parametrize("words", TOO_LARGE.values(), ids=TOO_LARGE)
def test_refused_with_the_nearest_that_fits(words, composed):
    line = [*KAROLINA, *words]
    run = composed(*line).run
    with pytest.raises(UserError) as caught:
        check(run, False, os.environ)
    stated = run.facility.node.device_memory_gib
    assert re.match(
        rf"llama2_7b needs \d+\.\d of the {stated:g} GiB of a device", caught.value.found
    )
    [change] = re.findall(r"this fits, with .* GiB: ([^;]+);", caught.value.hint)
    keys = {word.partition("=")[0] for word in change.split()}
    kept = [word for word in line if word.partition("=")[0] not in keys]
    better = composed(*kept, *change.split()).run
    assert fits(better, memory_of(better, known_shape(better)))
    assert "override=fit" in caught.value.hint


def test_one_change_is_nearer_than_two(composed):
    batch = ("training.microbatch_samples=16", "training.global_batch_samples=128")
    run = composed(*KAROLINA, *batch).run
    with pytest.raises(UserError) as caught:
        check_fit(run)
    assert "GiB: training.activation_checkpointing=full;" in caught.value.hint


def test_who_knows_better_may_submit_it(composed):
    line = (*KAROLINA, "sharding=ddp")
    run = composed(*line, "override=fit").run
    check(run, False, os.environ)
    assert run.name == composed(*line).run.name, "the same run"
    with pytest.raises(UserError, match="override"):
        composed(*line, "override=all")


def test_nothing_near_it_fits(composed):
    run = composed(*KAROLINA, "facility.node.device_memory_gib=1").run
    with pytest.raises(UserError) as caught:
        check_fit(run)
    assert "no smaller microbatch" in caught.value.hint


def test_a_node_is_named_whose_memory_is_too_small_for_what_is_saved(composed):
    """Each rank gathers the whole state of DeepSpeed there."""
    line = (*KAROLINA, "sharding=deepspeed_zero3", "nodes=4", "training.microbatch_samples=1")
    check_fit(composed(*line).run)
    run = composed(*line, "facility.node.memory_gib=256").run
    with pytest.raises(UserError, match=r"needs 6\d\d\.\d of the 256 GiB of a node's memory"):
        check_fit(run)


NVME = "sharding.deepspeed.zero_optimization.offload_optimizer.nvme_path"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["facility.node.device_memory_gib=null"], "facility.node.device_memory_gib is not set"),
        (["sharding=deepspeed_zero3_nvme", f"{NVME}=/disk"], "DeepSpeed"),
        (["experiment=llama_qlora", "model.lora.targets=[whatever]"], "names whatever"),
        (["model=from_path", "model.source=a/b"], "does not know the shape of a/b"),
    ],
)
def test_what_is_not_known_is_said_and_not_refused(words, why, composed, monkeypatch, here, capsys):
    monkeypatch.setenv("HF_HOME", str(here))
    run = composed(*KAROLINA, *words).run
    check(run, False, os.environ)
    said = unknown_fit(run)
    assert said.startswith("whether it fits is not known: ") and why in said
    line = [
        word
        for word in KAROLINA
        if word.partition("=")[0] not in {w.partition("=")[0] for w in words}
    ]
    assert main(["--dry-run", *line, *words]) == 0
    assert capsys.readouterr().out.endswith(f"# {said}")


def test_a_run_that_fits_is_silent(composed):
    for line in (
        ("facility=karolina", ACCOUNT, "experiment=llama2_7b_cs"),
        ("facility=laptop",),
        # whose training would not
        (*KAROLINA, "ranks_per_node=1", "sharding=single", *EVALUATED),
    ):
        run = composed(*line).run
        check(run, False, os.environ)
        assert unknown_fit(run) == ""


def test_the_whole_model_on_each_rank_to_score_tasks_is_counted(composed):
    """A shard of 70B fits, 132 GiB in bf16 beside it do not."""
    leonardo = ("facility=leonardo", ACCOUNT, "sharding=full_shard", "nodes=64", *SEVENTY)
    check_fit(composed(*leonardo).run)
    with pytest.raises(UserError) as caught:
        check_fit(composed(*leonardo, "evaluation.tasks=[hellaswag]").run)
    assert re.match(r"llama2_7b needs 1\d\d\.\d of the 64 GiB of a device", caught.value.found)
    assert "evaluation.tasks=[]" in caught.value.hint


def test_it_takes_no_time(composed):
    fitting = composed("facility=karolina", ACCOUNT, "experiment=llama2_7b_cs").run
    began = time.perf_counter()
    check_fit(fitting)
    assert time.perf_counter() - began < 0.3
