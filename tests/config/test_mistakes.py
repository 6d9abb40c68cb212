"""A mistake in the configuration ends in two lines that name it and how to fix it."""

import json
import re

import pytest

from atoll.__main__ import main
from atoll.config.compose import campaign_values, compose_all
from atoll.errors import UserError

CASES = [
    # (overrides, what was found, how to fix it)
    ([], "no facility is chosen", "facility=aurora | frontier | generic_slurm"),
    (["facility=lapto"], "unknown facility: lapto", "did you mean facility=laptop?"),
    (["faciliti=laptop"], "unknown setting: faciliti", "did you mean facility?"),
    (["facility=zzz"], "unknown facility: zzz", "choose facility from: aurora, frontier"),
    (["facility=[laptop]"], "facility is a group", "choose from: aurora, frontier"),
    (["model=null"], "model is a group, not None", "choose from: bert_base"),
    (["model=llama2_7"], "unknown model: llama2_7", "did you mean model=llama2_7b?"),
    (["sharding=fullshard"], "unknown sharding: fullshard", "did you mean sharding=full_shard?"),
    (["experiment=deno"], "unknown experiment: deno", "did you mean experiment=demo?"),
    (
        ["optimizer.learning_rte=1"],
        "optimizer.learning_rte",
        "did you mean optimizer.learning_rate?",
    ),
    (
        ["+optimizer.learning_rte=1"],
        "optimizer.learning_rte",
        "did you mean optimizer.learning_rate?",
    ),
    (["packing=concat"], "unknown setting: packing", "did you mean data.packing?"),
    (["sinks=wandb"], "unknown setting: sinks", "it is called loggers now"),
    (["training.recompute=full"], "unknown setting", "training.activation_checkpointing now"),
    (["lr=1"], "unknown setting: lr", "lists every setting"),
    (["~optimizer.foo"], "unknown setting: optimizer.foo", "optimizer"),
    (["hydra/launcher=joblib"], "unknown setting: hydra/launcher", "the groups are"),
    (["~experiment=1"], "deletion value", "fix"),
    (["hydra.run.dir=/tmp"], "unknown setting: hydra.run.dir", "the groups are"),
    (["hydra.run.dir=/tmp"], "unknown setting: hydra.run.dir", "folders.runs=FOLDER"),
    (["hydra/launcher=x"], "unknown setting: hydra/launcher", "facility=NAME"),
    (["hydra.verbose=true"], "unknown setting: hydra.verbose", "nothing of it is used"),
    (["loggers=[tensorbord]"], "loggers.0 = 'tensorbord'", "did you mean loggers=tensorboard?"),
    (["data=text_files", "data.files="], "data.files.0 = ''", "data.files"),
    (["generation.prompt=Hello, world"], "several values", "\"generation.prompt='Hello, world'\""),
    (["data.packing=concatt"], "data.packing = 'concatt'", "did you mean data.packing=concat?"),
    (["precision.compute=fp8"], "precision.compute = 'fp8'", "precision.compute"),
    (["nodes=0"], "nodes = 0", "nodes"),
    (["nodes=two"], "nodes = 'two'", "nodes"),
    (["optimizer.learning_rate=-1"], "optimizer.learning_rate = -1", "optimizer.learning_rate"),
    (["name=a/b"], "name = 'a/b'", "letters a to z, digits"),
    (["name=größe"], "name = 'größe'", "letters a to z, digits"),
    (["name=3"], "name = 3", "name='3'"),
    (["name=a b$(x)"], "cannot read the value of name", "quote it twice: 'name='"),
    (["generation.prompt=def f(x): y"], "cannot read", "\"generation.prompt='def f(x): y'\""),
    (["facility.step=[--a=b,c]"], "facility.step", "\"facility.step=['--a=b','c']\""),
    (["nodes"], "not an override: 'nodes'", "KEY=VALUE"),
    (["name=\n"], "cannot read the value of name: '\\n'", "KEY='VALUE'"),
    (["nodes=1,2"], "several values for nodes: 1,2", "--multirun"),
    (["data=text_files"], "setting missing: data.files", "data.files=VALUE"),
    (["model=from_path"], "setting missing: model.source", "model.source=VALUE"),
    (["name=${oc.env:NOT_SET_ANYWHERE}"], "NOT_SET_ANYWHERE", "name"),
    (["name=${nowhere}"], "nowhere", "name"),
    (["data.template=none"], "{text}", "settings"),
    (["training.epochs=1"], "and both are set", "training.steps=null training.epochs=1"),
    (
        ["training.z_loss=1e-4", "task=classification", "data=glue_rte"],
        "training.z_loss=0.0001 with task=classification",
        "training.z_loss=0",
    ),
    (["optimizer.cooldown_steps=9"], "cooldown_steps=9 with decay=cosine", "optimizer.decay=wsd"),
    (
        ["checkpoint.initial_load_path=runs/x/checkpoints/step-00000500", "training.steps=400"],
        "training.steps=400, and checkpoint.initial_load_path is of step 500",
        "training.steps=600",
    ),
    (["checkpoint.initial_load_path=runs/x"], "runs/x is no checkpoint", "step-00000500"),
    (["training.global_batch_samples=3"], "(3)", "global_batch_samples=4, the nearest"),
    (["training.device_batch_samples=3"], "(64) is not", "set one of them, the other to null"),
    (["training.global_batch_samples=null"], "a step has no samples", "device_batch_samples=4"),
    (["data.hub_shuffle_seed=1"], "data.source=python_stdlib", "data.hub_shuffle_seed=null"),
    (["sharding=single"], "2 ranks", "settings"),
    (["sharding.shard=3"], "world size (2)", "settings"),
    (["facility.environment.HF_TOKEN=x"], "looks like a secret", "export HF_TOKEN"),
    (["facility.environment.A-B=x"], "facility.environment.A-B", "another"),
    (["model.config.model_type=t5"], "models of type 't5'", "choose one of llama"),
    (["data.sequence_tokens=4096"], "(4096) is more than", "data.sequence_tokens=1024 or less"),
    (
        ["tokenizer.add_tokens=['<|user|>']", "model.lora.rank=8"],
        "new tokens would never learn",
        "model.lora=null",
    ),
    (
        [
            "model.lora.rank=8",
            "export.merged=false",
            "model.rope_scaling.kind=yarn",
            "model.rope_scaling.factor=2",
        ],
        "export.merged=false with model.rope_scaling.kind=yarn",
        "export.merged=true",
    ),
    (["optimizer=muon", "sharding=deepspeed_zero3"], "optimizer=muon with sharding", "adamw"),
    (["optimizer=muon", "model.lora.rank=8"], "optimizer=muon with model.lora", "without adapters"),
    (["optimizer=adamw_8bit", "sharding=deepspeed_zero1"], "optimizer=adamw_8bit with", "adamw"),
    (["data.validation.split=test"], "data.validation.fraction", "settings"),
    (["model=gpt2", "export.gguf=true"], "export.gguf of a model of type 'gpt2'", "one of llama"),
    (["export.gguf=q4"], "export.gguf", "f32, f16, bf16, q8_0"),
    (
        ["export.gguf=bf16", "tokenizer.kind=characters"],
        "llama.cpp has no such tokenizer",
        "tokenizer.kind=bpe",
    ),
    (
        ["model.mup.base_width=64", "model.source=meta-llama/Llama-2-7b-hf"],
        "muP is for weights that begin at random",
        "model.mup.base_width=null",
    ),
    (["model.mup.base_width=64", "model=bert_tiny"], "of type bert", "one of gpt2, "),
    (["model.mup.base_width=64", "model.config.model_type=gemma"], "of type gemma", "llama"),
    (
        ["model=gpt2_tiny", "model.mup.base_width=64", "model.mup.base_head_width=8"],
        "model.mup.base_head_width with a model of type gpt2",
        "model.mup.base_head_width=null",
    ),
    (["model.mup.base_head_width=8"], "without a base_width", "model.mup.base_width"),
    (
        ["model.mup.base_width=64", "sharding=deepspeed_zero3"],
        "model.mup.base_width=64 with sharding=deepspeed_zero3",
        "full_shard",
    ),
    (["model.mup.base_width=64", "optimizer.proximal=0.1"], "optimizer.proximal=0.1", "proximal=0"),
    (
        ["sharding=deepspeed_zero1", "optimizer.proximal=0.1"],
        "optimizer.proximal=0.1 with sharding=deepspeed_zero1",
        "optimizer.proximal=0",
    ),
]


@pytest.mark.parametrize(("overrides", "found", "hint"), CASES, ids=lambda case: str(case))
def test_a_mistake_is_named_with_its_mend(overrides, found, hint, composed):
    about_the_facility = not overrides or overrides[0].split("=")[0].startswith("facilit")
    base = [] if about_the_facility and "." not in str(overrides) else ["facility=laptop"]
    with pytest.raises(UserError) as caught:
        composed(*base, *overrides)
    assert found in caught.value.found
    assert hint in caught.value.hint
    assert "\n" not in caught.value.found + caught.value.hint


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "t5"}, "no parts are known for models of type 't5'"),
        ({"model_type": "gpt2", "n_positions": 64}, r"data.sequence_tokens \(\d+\) .* \(64\)"),
        ({"model_type": "llama", "max_position_embeddings": 32}, r"\(512\) .* \(32\)"),
        (
            {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}},
            r"the weights of .* are quantised \(fp8\)",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_where_it_is_typed(
    config, found, tmp_path, capsys, here
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["facility=laptop", "model=from_path", f"model.source={tmp_path}", "data=python_stdlib"]
    assert main(["submit", "--dry-run", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and re.search(found, lines[0])


def test_a_mistake_in_the_local_file_is_placed_there(tree, composed):
    (tree / "local").mkdir()
    file = tree / "local" / "default.yaml"
    file.write_text("# @package _global_\nfacility: {acount: mine}\n")
    with pytest.raises(UserError, match=r"hydra_conf/local/default.yaml: facility.acount"):
        composed("facility=laptop")
    file.write_text("# @package _global_\nfacility: {account: mine\n")
    with pytest.raises(UserError, match=r"default.yaml.*line"):
        composed("facility=laptop")


def test_no_traceback_reaches_a_person(capsys):
    assert main(["compose", "facility=laptop", "nodes=((("]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 2
    assert printed[0].startswith("atoll: ")


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--cfg", "atoll compose"),
        ("--info", "source"),
        ("-cn", "experiment="),
        ("-sc", "completion"),
    ],
)
def test_a_flag_of_hydra_s_own_is_refused_with_what_does_it(flag, instead, capsys):
    for command in ("compose", "submit"):
        assert main([command, "facility=laptop", flag, "job"]) == 2
        found, hint = capsys.readouterr().err.splitlines()
        assert found == f"atoll: {flag} is a flag of Hydra's own" and instead in hint


LETTERS = [
    (["folders.runs=/scratch/müller/runs"], "/scratch/müller/runs"),
    (["folders.runs=/my text für alle/runs"], "/my text für alle/runs"),
    (["folders.runs='/scratch/müller/runs'"], "/scratch/müller/runs"),
]


@pytest.mark.parametrize(("overrides", "expected"), LETTERS)
def test_letters_beyond_ascii_are_letters(overrides, expected, composed):
    assert str(composed("facility=laptop", *overrides).run.folders.runs) == expected


def test_letters_beyond_ascii_in_lists_and_prompts(composed):
    words = ["data=text_files", "data.files=[/tmp/ä b.txt,/tmp/c.txt]", "generation.prompt=Grüße"]
    run = composed("facility=laptop", *words).run
    assert run.data.files == ["/tmp/ä b.txt", "/tmp/c.txt"]
    assert run.generation.prompt == "Grüße"


@pytest.mark.parametrize("line", ["nodes=interval(1,2)", "nodes=glob(*)"])
def test_a_sweep_must_have_a_number_of_values(line, tree):
    with pytest.raises(UserError, match="no values to take in turn: nodes="):
        compose_all(["facility=laptop", line], multirun=True, tree=tree)


def test_letters_beyond_ascii_in_a_campaign(tree):
    words = ["federation=demo", "folder=/data/Forschung für alle/my code/c"]
    assert campaign_values(words, tree)["folder"] == "/data/Forschung für alle/my code/c"
