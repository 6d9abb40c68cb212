"""Settings are typed, frozen, known by name, and read back as they were written."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from defaults import filled
from pydantic import BaseModel, ValidationError

from atoll.errors import UserError
from atoll.settings import (
    RENAMED_SETTINGS,
    Run,
    checked,
    dumped,
    is_setting,
    load_run,
    nearest_setting,
    setting_names,
)


def values() -> dict:
    """The least that a run must say, beside what hydra_conf/run.yaml does."""
    least = {
        "name": "x",
        "ranks_per_node": 2,
        "folders": {},
        "facility": {"name": "here", "scheduler": "none", "node": {"devices": 2, "device": "cpu"}},
        "image": {"name": "none"},
        "launcher": {"name": "static"},
        "sharding": {"name": "ddp", "layouts": ["ddp"]},
        "model": {"name": "m", "config": {"model_type": "llama"}},
        "tokenizer": {},
        "data": {"name": "d", "source": "files", "files": ["a"], "validation": {"fraction": 0.1}},
        "task": {"name": "causal_lm"},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3},
        "precision": {"compute": "auto"},
        "training": {"steps": 1, "global_batch_samples": 4, "microbatch_samples": 1},
        "checkpoint": {},
        "evaluation": {},
        "export": {},
        "monitor": {"communication": True, "energy": True, "progress": True},
        "generation": {},
    }
    return filled(least)


def changed(dotted: str, value: object) -> dict:
    """The least run with one setting changed."""
    tree = inner = values()
    *groups, last = dotted.split(".")
    for group in groups:
        inner = inner.setdefault(group, {})
    inner[last] = value
    return tree


def test_the_least_run_is_a_run():
    run = checked(values())
    assert run.world_size == 2
    assert run.data.packing == "best_fit"


def test_a_run_made_before_observers_had_switches_is_read(tmp_path):
    older = values()
    del older["monitor"]
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(older))
    assert load_run(file) == checked(values())


def test_what_is_written_is_read_back(tmp_path):
    run = checked(values())
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(dumped(run)))
    assert load_run(file) == run


def test_a_folder_without_a_run_says_so(tmp_path):
    with pytest.raises(UserError, match=r"run.yaml is missing"):
        load_run(tmp_path / "run.yaml")


def test_a_run_cannot_be_changed():
    with pytest.raises(ValidationError):
        checked(values()).seed = 3


@pytest.mark.parametrize(
    ("name", "value", "found", "hint"),
    [
        ("optimizer.learning_rte", 1, "unknown setting: optimizer.learning_rte", "learning_rate?"),
        ("optimizer.learning_rate", 0, "optimizer.learning_rate = 0", "another value"),
        ("optimizer.betas", [0.9, 2], "optimizer.betas.1 = 2", "another value"),
        ("data.batching", "padded", "data.batching = 'padded'", "data.batching=padding?"),
        ("data.template", "x", "{text}", "settings"),
        ("data.validation", {}, "choose one of data.validation.fraction", "settings"),
        ("data.validation", {"fraction": 0.1, "split": "a"}, "choose one of", "settings"),
        ("data.validation.fraction", 1.0, "data.validation.fraction", "another value"),
        ("data.sequence_tokens", 1, "data.sequence_tokens = 1", "another value"),
        ("model", {"name": "m"}, "model.source", "settings"),
        ("training.epochs", 1, "and both are set", "training.steps=null training.epochs=1"),
        ("training.steps", None, "and neither is set", "training.steps=1000 training.epochs=null"),
        ("training.global_batch_samples", 5, "(5)", "global_batch_samples=4, the nearest"),
        ("sharding.layouts", [], "2 ranks", "settings"),
        ("sharding.shard", 3, "world size (2) must be divisible by sharding.shard (3)", "settings"),
        ("name", "../x", "name = '../x'", "letters a to z, digits"),
        ("name", "", "name = ''", "letters a to z, digits"),
        ("name", 7, "name = 7", "name='7'"),
        ("facility.port", 80, "facility.port = 80", "another value"),
        ("facility.scheduler", "lsf", "facility.scheduler = 'lsf'", "none, slurm"),
        ("facility.environment", {"A B": "c"}, "facility.environment.A B", "another value"),
        ("facility.environment", {"WANDB_API_KEY": "c"}, "looks like a secret", "export WANDB"),
        ("generation.top_p", 0, "generation.top_p = 0", "another value"),
        ("nodes", 1.5, "nodes = 1.5", "another value"),
    ],
)
def test_a_bad_value_is_named_with_its_mend(name, value, found, hint):
    with pytest.raises(UserError) as caught:
        checked(changed(name, value))
    assert found in caught.value.found
    assert hint in caught.value.hint
    assert "\n" not in caught.value.found + caught.value.hint


def test_a_missing_setting_is_named():
    incomplete = values()
    del incomplete["training"]["microbatch_samples"]
    with pytest.raises(UserError, match=r"setting missing: training.microbatch_samples"):
        checked(incomplete)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "MONKEY"])
def test_an_innocent_variable_is_no_secret(name):
    run = checked(changed("facility.environment", {name: 1}))
    assert run.facility.environment == {name: "1"}


def test_one_file_or_several():
    assert checked(changed("data.files", "a.txt")).data.files == ["a.txt"]
    assert checked(changed("data.files", ["a", "b"])).data.files == ["a", "b"]


def test_every_name_is_known_and_no_other():
    names = list(setting_names())
    assert len(names) == len(set(names)) > 80
    assert all(is_setting(name) for name in names)
    assert is_setting("model.config.anything.at.all")
    assert is_setting("facility.submit.gpus-per-node")
    for unknown in ("", "nodes.x", "data.", "optimizer.betas.0", "facility.node.gpus", "Nodes"):
        assert not is_setting(unknown)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("learning_rate", "optimizer.learning_rate"),
        ("optimizer.learning_rte", "optimizer.learning_rate"),
        ("packing", "data.packing"),
        ("seeed", "seed"),
        ("node", "nodes"),
        ("zzz", None),
    ],
)
def test_the_nearest_setting(name, nearest):
    assert nearest_setting(name) == nearest


TREE = Path(__file__).parents[1] / "hydra_conf"


def keys_of(file: Path) -> set[str]:
    """The dotted names that a YAML states, with those of the files of its group it builds on."""
    content = yaml.safe_load(file.read_text()) or {}
    bases = [base for base in content.pop("defaults", []) if isinstance(base, str)]
    inherited = [keys_of(file.with_name(f"{base}.yaml")) for base in bases if base != "_self_"]
    return set(names_in(content)).union(*inherited)


def names_in(content: dict, prefix: str = "") -> Iterator[str]:
    for key, value in content.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from names_in(value, f"{prefix}{key}.")


def stated_for_every_run() -> set[str]:
    names = keys_of(TREE / "run.yaml")
    for group in sorted(set(Run.model_fields) & {path.name for path in TREE.iterdir()}):
        each = [keys_of(file) for file in (TREE / group).glob("*.yaml")]
        names |= {f"{group}.{key}" for key in set.intersection(*each)}
    return names


def test_a_default_is_written_once_in_yaml_or_in_the_settings():
    stated = stated_for_every_run()
    assert {"checkpoint.every_steps", "optimizer.decay", "sharding.layouts", "seed"} <= stated
    assert sorted(name for name in names_with_a_default(Run) if name in stated) == []


def names_with_a_default(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if not field.is_required():
            yield f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from names_with_a_default(field.annotation, f"{prefix}{name}.")


@pytest.mark.parametrize(("old", "new"), RENAMED_SETTINGS.items())
def test_an_old_name_is_refused_with_the_new_one(old, new):
    assert is_setting(new) and not is_setting(old)
    before = values()
    group, last = before, new.split(".")[-1]
    for part in new.split(".")[:-1]:
        group = group[part]
    group.pop(last, None)
    group[old.split(".")[-1]] = "as it was"  # the run.yaml of an older Atoll
    with pytest.raises(UserError) as refused:
        checked(before)
    assert refused.value.found == f"unknown setting: {old}"
    assert refused.value.hint == f"it is called {new} now"


BOMB = "".join(
    f"{'abcdefghijkl'[n]}: &{n} [{', '.join([f'*{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"z: &0 [x, x]\n{BOMB}", "line 1: the anchor 0"),
        ("[" * 100_000, "line 1: lists in lists, more than 40"),
        ("name: " + "[" * 50 + "]" * 50, "line 1: lists in lists, more than 40"),
    ],
)
def test_settings_that_would_fill_memory_are_not_read(text, found, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError, match=found):
        load_run(tmp_path / "run.yaml")


def test_a_value_of_somebody_else_is_shown_in_short(tmp_path):
    (tmp_path / "run.yaml").write_text(f"name: [{'x, ' * 100_000}y]\n")
    with pytest.raises(UserError) as caught:
        load_run(tmp_path / "run.yaml")
    assert caught.value.found.startswith("name = ['x', 'x'") and len(caught.value.found) < 500
