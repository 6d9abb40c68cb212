"""`--multirun` gives one run for each combination of values, as in Hydra."""

import pytest

from atoll.config.compose import combinations, compose_all, counted
from atoll.errors import UserError


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["nodes=1,2,4"], [["nodes=1"], ["nodes=2"], ["nodes=4"]]),
        (["nodes=range(1,4)"], [["nodes=1"], ["nodes=2"], ["nodes=3"]]),
        (
            ["data.packing=choice(concat,best_fit)"],
            [["data.packing=concat"], ["data.packing=best_fit"]],
        ),
        (["seed=3"], [["seed=3"]]),
        (
            ["nodes=1,2", "seed=0", "sharding=ddp,full_shard"],
            [
                ["nodes=1", "seed=0", "sharding=ddp"],
                ["nodes=1", "seed=0", "sharding=full_shard"],
                ["nodes=2", "seed=0", "sharding=ddp"],
                ["nodes=2", "seed=0", "sharding=full_shard"],
            ],
        ),
        (["precision=glob(*16)"], [["precision=bf16"]]),
        (["data.files=[a,b],[c]"], [["data.files=[a,b]"], ["data.files=[c]"]]),
    ],
)
def test_combinations(overrides, expected, tree):
    assert combinations(overrides, tree) == expected


def test_each_combination_is_a_run_of_its_own(tree):
    line = ["facility=generic_slurm", "nodes=1,2", "sharding=ddp,full_shard"]
    runs = [one.run for one in compose_all(line, multirun=True, tree=tree)]
    assert [(run.nodes, run.sharding.name) for run in runs] == [
        (1, "ddp"),
        (1, "full_shard"),
        (2, "ddp"),
        (2, "full_shard"),
    ]
    assert len({run.name for run in runs}) == 4


def test_each_run_says_which_it_is_and_what_differs(tree):
    line = ["facility=generic_slurm", "nodes=1,2", "seed=0", "sharding=ddp,full_shard"]
    runs = compose_all(line, multirun=True, tree=tree)
    assert counted(runs, runs[1]) == "2/4 nodes=1 sharding=full_shard"
    assert counted(runs[:1], runs[0]) == ""


def test_names_carry_what_was_changed_in_words(tree):
    line = ["facility=generic_slurm", "optimizer.learning_rate=1e-3,3e-3", "folders.runs=/x"]
    names = [each.run.name for each in compose_all(line, multirun=True, tree=tree)]
    assert names[0].startswith("llama_tiny-python_stdlib-full_shard-learning_rate0.001-")
    assert names[1].startswith("llama_tiny-python_stdlib-full_shard-learning_rate0.003-")


def test_a_name_is_no_longer_than_allowed(tree):
    sizes = [f"model.config.size_of_a_part_{n}={n}" for n in range(30)]
    [run] = compose_all(["facility=generic_slurm", *sizes], multirun=False, tree=tree)
    assert len(run.run.name) <= 120


def test_two_runs_never_share_a_folder(tree):
    line = ["facility=generic_slurm", "name=x", "nodes=1,2"]
    with pytest.raises(UserError, match="two runs have the name x"):
        compose_all(line, multirun=True, tree=tree)
    line[1] = "name=x${nodes}"
    names = [one.run.name for one in compose_all(line, multirun=True, tree=tree)]
    assert names == ["x1", "x2"]
