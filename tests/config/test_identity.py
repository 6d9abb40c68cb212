"""A run's name follows from its configuration, and a run stays what it is when it resumes."""

import pytest

from atoll import run_dir
from atoll.cluster.start import write_run_folder
from atoll.config.identity import check_same_run
from atoll.errors import UserError

BASE = ("facility=generic_slurm", "nodes=2")
SAME = [
    "folders.runs=/elsewhere",
    "folders.prepared=/elsewhere",
    "facility.account=another",
    "facility.walltime_minutes=7",
    "facility.submit.partition=gpu",
    "facility.environment.NCCL_DEBUG=INFO",
    "data.workers=3",
    "training.loss_chunk_tokens=512",
]
OTHER = [
    "nodes=4",
    "ranks_per_node=2",
    "seed=1",
    "launcher=static_node",
    "sharding=ddp",
    "model=gpt2_tiny",
    "model.config.hidden_size=128",
    "training.steps=5",
    "optimizer.learning_rate=0.1",
    "data.packing=concat",
    "facility.node.devices=2",
]
RESUMABLE = [
    "nodes=4",
    "ranks_per_node=2",
    "launcher=static_node",
    "sharding=ddp",
    "training.steps=2000",
    "training.microbatch_samples=2",
    "training.log_every_steps=1",
    "checkpoint.every_steps=10",
    "evaluation.every_steps=10",
    "facility.walltime_minutes=7",
    "folders.prepared=/elsewhere",
    "data.workers=3",
    "precision=auto",
]
FIXED = {
    "seed=1": ("seed=0", "1"),
    "model=gpt2_tiny": ("model.name='llama_tiny'", "'gpt2_tiny'"),
    "model.config.hidden_size=128": ("model.config.hidden_size=256", "128"),
    "+model.config.rope_theta=5.0": ("model.config.rope_theta=None", "5.0"),
    "~model.config.attention_dropout": ("model.config.attention_dropout=0.0", "None"),
    "data.template='{text}!'": ("data.template='{text}'", "'{text}!'"),
    "data.sequence_tokens=128": ("data.sequence_tokens=512", "128"),
    "tokenizer.path=gpt2": ("tokenizer.path=None", "'gpt2'"),
    "optimizer.learning_rate=0.1": ("optimizer.learning_rate=0.0003", "0.1"),
    "precision=fp32": ("precision.compute='auto'", "'fp32'"),
    "training.global_batch_samples=32": ("training.global_batch_samples=64", "32"),
}


def test_the_same_line_gives_the_same_name(composed):
    run = composed(*BASE).run
    assert composed(*BASE).run.name == run.name
    assert composed(*reversed(BASE)).run.name == run.name
    assert run.name.startswith("llama_tiny-python_stdlib-full_shard-")


@pytest.mark.parametrize("override", SAME)
def test_who_pays_and_where_files_lie_make_no_other_run(override, composed):
    assert composed(*BASE, override).run.name == composed(*BASE).run.name


@pytest.mark.parametrize("override", OTHER)
def test_what_changes_the_work_makes_another_run(override, composed):
    assert composed(*BASE, override).run.name != composed(*BASE).run.name


def test_another_facility_makes_another_run(composed):
    assert composed("facility=laptop").run.name != composed("facility=generic_slurm").run.name


def test_names_of_long_parts_stay_short(composed):
    name = composed(*BASE, f"model.name={'m' * 120}", f"data.name={'d' * 120}").run.name
    assert len(name) <= 120


@pytest.mark.parametrize("override", RESUMABLE)
def test_a_run_resumes_on_other_nodes_and_at_another_pace(override, composed):
    write_run_folder(composed(*BASE, "name=x"))
    run = composed(*BASE, "name=x", override).run
    check_same_run(run, run_dir.folder(run))


@pytest.mark.parametrize("override", FIXED)
def test_a_run_resumes_with_the_same_work_only(override, composed):
    write_run_folder(composed(*BASE, "name=x"))
    run = composed(*BASE, "name=x", override).run
    before, now = FIXED[override]
    with pytest.raises(UserError) as caught:
        check_same_run(run, run_dir.folder(run))
    assert caught.value.found == f"run x was made with {before}, now it is {now}"
    assert "name=" in caught.value.hint


def test_a_batch_that_follows_the_ranks_keeps_a_run_on_as_many(composed):
    line = ("name=x", "training.global_batch_samples=null", "training.device_batch_samples=2")
    write_run_folder(composed(*BASE, *line))
    run = composed(*BASE, *line, "nodes=4").run
    with pytest.raises(UserError, match=r"global_batch_samples=\d+, now it is \d+") as refused:
        check_same_run(run, run_dir.folder(run))
    same = ("training.device_batch_samples=null", refused.value.hint.split()[1])
    check_same_run(composed(*BASE, "name=x", "nodes=4", *same).run, run_dir.folder(run))


def test_a_run_without_a_step_may_begin_without_moments(composed):
    """On other nodes there are none: 8-bit moments do not reshard."""
    line = (*BASE, "name=x")
    write_run_folder(composed(*line, "checkpoint.optimizer_load_path=/x/checkpoints/step-00000500"))
    run = composed(*line).run
    check_same_run(run, run_dir.folder(run))
    run_dir.write_whole(run_dir.checkpoint(run_dir.folder(run), 3) / "manifest.json", "{}")
    with pytest.raises(UserError, match=r"made with checkpoint\.optimizer_load_path="):
        check_same_run(run, run_dir.folder(run))


def test_a_rate_that_follows_the_ranks_keeps_a_run_on_as_many(composed):
    line = (*BASE, "name=x", "optimizer.scale_with_ranks=linear")
    write_run_folder(composed(*line))
    run = composed(*line, "nodes=4").run
    check_same_run(run, run_dir.folder(run))  # no step was taken yet
    run_dir.write_whole(run_dir.checkpoint(run_dir.folder(run), 3) / "manifest.json", "{}")
    with pytest.raises(UserError, match=r"learning rate of \d+ data-parallel ranks .*, now there"):
        check_same_run(run, run_dir.folder(run))
    run = composed(*line, "restart.max_restarts=9").run
    check_same_run(run, run_dir.folder(run))


def test_a_run_of_another_text_is_another_run(composed):
    line = (*BASE, "name=x", "data=text_files")
    write_run_folder(composed(*line, "data.files=a.txt"))
    run = composed(*line, "data.files=b.txt").run
    with pytest.raises(UserError, match=r"data\.files"):
        check_same_run(run, run_dir.folder(run))


@pytest.mark.parametrize(
    "words",
    [
        ("data=hub", "data.hub=mydata"),
        ("data=mixture", "data.sources=[{name: web, hub: a/b},{name: own, hub: mydata}]"),
        ("data=mixture", "data.sources=[{name: chats, hub: my/chats},{name: own, hub: mydata}]"),
    ],
)
def test_a_data_set_that_was_put_away_keeps_its_run_once_it_has_tokens(words, here, composed):
    folders = [here / "mydata", here / "my" / "chats"]
    for folder in folders:
        folder.mkdir(parents=True)
    run, made = composed(*BASE, *words).run, composed(*BASE, *words, "name=x")
    write_run_folder(made)
    for folder in folders:
        folder.rmdir()
    assert composed(*BASE, *words).run.name != run.name  # a data set of the hub, for all we know
    run_dir.write_whole(run_dir.prepared(run) / "manifest.json", "{}")
    assert composed(*BASE, *words).run.name == run.name
    again = composed(*BASE, *words, "name=x").run
    check_same_run(again, run_dir.folder(again))
    assert run_dir.prepared(again) == run_dir.prepared(made.run)


def test_a_data_set_of_the_hub_stays_one_beside_tokens_of_a_folder(here, composed):
    words = (*BASE, "data=hub", "data.hub=mydata")
    (here / "mydata").mkdir()
    run_dir.write_whole(run_dir.prepared(composed(*words).run) / "manifest.json", "{}")
    (here / "mydata").rmdir()
    run = composed(*words, "seed=1").run
    assert run.data.hub == "mydata"
    run_dir.write_whole(run_dir.prepared(run) / "manifest.json", "{}")
    assert composed(*words, "seed=1").run.data.hub == "mydata"


def test_a_default_that_changes_renames_no_run(composed, tree):
    before = composed(*BASE).run.name
    run_yaml = tree / "run.yaml"
    run_yaml.write_text(run_yaml.read_text().replace("keep: 2", "keep: 5"))
    assert composed(*BASE).run.checkpoint.keep == 5
    assert composed(*BASE).run.name == before
    assert composed(*BASE, "checkpoint.keep=2").run.name != before
