"""Every part of the configuration tree becomes a typed run, with absolute paths."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from atoll.config import compose as compose_module
from atoll.errors import UserError
from atoll.settings import checked, dumped

TREE = Path(__file__).parents[2] / "hydra_conf"
PARTS = sorted(
    path for path in TREE.glob("*/*.yaml") if path.parent.name not in ("local", "federation")
)
GLUE = ("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli")
# What a part leaves to the person who chooses it.
ASKED_FOR = {
    "data=text_files": ["data.files=a.txt"],
    "data=hub": ["data.hub=a/b"],
    "data=chat_files": ["data.files=a.jsonl", "tokenizer.chat_template=chatml"],
    "data=preference_files": [
        "data.files=a.jsonl",
        "tokenizer.chat_template=chatml",
        "task=preference",
    ],
    "task=preference": [
        "data=preference_files",
        "data.files=a.jsonl",
        "tokenizer.chat_template=chatml",
    ],
    "data=mixture": ["data.sources=[{name:a,files:a.txt},{name:b,hub:c/d,weight:{0:1,10:2}}]"],
    "data=chat_hub": ["data.hub=a/b", "tokenizer.chat_template=chatml"],
    "experiment=chat_sft": ["model.source=a/b", "data.files=a.jsonl"],
    "experiment=chat_sft_smoke": ["data.files=a.jsonl"],
    "data=shakespeare_char": ["data.files=a.txt"],
    **{f"data=glue_{name}": ["task=classification"] for name in GLUE},
    "task=classification": ["data=glue_rte"],
    "experiment=gpt_shakespeare_char": ["data.files=a.txt"],
    "experiment=gpt_shakespeare_char_smoke": ["data.files=a.txt"],
    "model=from_path": ["model.source=a/b"],
    "sharding=single": ["ranks_per_node=1"],
    "sharding=deepspeed_zero3_nvme": [
        "sharding.deepspeed.zero_optimization.offload_optimizer.nvme_path=/local"
    ],
    "sharding=pipeline": ["model.config.tie_word_embeddings=false"],
    "sharding=pipeline_interleaved": ["model.config.tie_word_embeddings=false"],
    "facility=aurora": ["training.global_batch_samples=96"],  # of twelve ranks
}
# a part that no laptop has
BESIDE = {"launcher=mpiexec": ["facility=generic_slurm"], "launcher=ssh": ["facility=ssh_hosts"]}
HEAVY = {"torch", "numpy", "transformers", "datasets", "tokenizers", "rich", "spython"}


@pytest.mark.parametrize("path", PARTS, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_part_composes_into_a_typed_run(path, composed):
    chosen = f"{path.parent.name}={path.stem}"
    run = composed(*BESIDE.get(chosen, ["facility=laptop"]), chosen, *ASKED_FOR.get(chosen, [])).run
    assert checked(dumped(run)) == run


@pytest.mark.parametrize("path", PARTS, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_part_says_what_it_is_and_is_called_as_its_file(path):
    text = path.read_text()
    lines = [line for line in text.splitlines() if line != "# @package _global_"]
    assert lines[0].startswith("# ")
    assert lines[0].endswith(".")
    assert yaml.safe_load(text).get("name", path.stem) == path.stem


def test_the_laptop_runs_two_ranks_in_one_forked_task(composed):
    run = composed("facility=laptop").run
    assert (run.nodes, run.ranks_per_node, run.world_size) == (1, 2, 2)
    assert run.launcher.name == "static_node"
    assert run.facility.node.device == "cpu"


def test_the_command_line_wins_over_what_a_facility_prefers(composed):
    assert composed("facility=laptop", "launcher=static").run.launcher.name == "static"


def test_the_number_of_ranks_follows_the_devices_of_a_node(composed):
    run = composed("facility=generic_slurm", "facility.node.devices=4", "nodes=2").run
    assert run.world_size == 8
    assert run.facility.submit["gpus-per-node"] == 4


@pytest.mark.parametrize(
    ("name", "layouts", "shard", "reshard"),
    [
        ("single", [], "none", True),
        ("ddp", ["ddp"], "none", True),
        ("full_shard", ["fsdp"], "all", True),
        ("shard_grad_op", ["fsdp"], "all", False),
        ("hybrid_shard", ["fsdp"], "node", True),
        ("hybrid_shard_zero2", ["fsdp"], "node", False),
    ],
)
def test_sharding_strategies_are_what_their_names_say(name, layouts, shard, reshard, composed):
    sharding = composed(
        "facility=laptop", *ASKED_FOR.get(f"sharding={name}", []), f"sharding={name}"
    )
    assert sharding.run.sharding.layouts == layouts
    assert sharding.run.sharding.shard == shard
    assert sharding.run.sharding.reshard_after_forward is reshard


@pytest.mark.parametrize(
    "override", ["training.compile=true", "+training.compile=true", "++training.compile=true"]
)
def test_a_setting_may_be_given_with_or_without_a_plus(override, composed):
    assert composed("facility=laptop", override).run.training.compile is True


def test_settings_that_no_file_mentions_may_be_given(composed):
    run = composed(
        "facility=laptop",
        "training.loss_chunk_tokens=512",
        "model.config.rope_theta=5000.0",
        "facility.environment.OMP_NUM_THREADS=1",
        "facility.submit.mem-per-cpu=2G",
    ).run
    assert run.training.loss_chunk_tokens == 512
    assert run.model.config["rope_theta"] == 5000.0
    assert run.facility.environment == {"OMP_NUM_THREADS": "1"}
    assert run.facility.submit == {"mem-per-cpu": "2G"}


def test_one_file_of_text_needs_no_brackets(composed, here):
    run = composed("facility=laptop", "data=text_files", "data.files=a.txt").run
    assert run.data.files == [str(here / "a.txt")]


def test_relative_paths_start_where_the_command_is_typed(composed, here):
    (here / "model").mkdir()
    run = composed(
        "facility=laptop",
        "data=text_files",
        "data.files=[text/*.txt,../b.jsonl,/c/d.parquet]",
        "model=from_path",
        "model.source=model",
        "tokenizer.path=./tokenizer",
    ).run
    assert run.folders.runs == here / "runs"
    assert run.folders.prepared == here / "prepared"
    assert run.data.files == [
        str(here / "text/*.txt"),
        str(here.parent / "b.jsonl"),
        "/c/d.parquet",
    ]
    assert run.model.source == str(here / "model")
    assert run.tokenizer.path == str(here / "tokenizer")


def test_a_home_folder_is_spelled_out(composed, monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    run = composed("facility=laptop", "folders.runs='~/runs'").run
    assert run.folders.runs == Path("/somewhere/runs")


def test_the_name_of_a_hub_stays_a_name(composed):
    run = composed("facility=laptop", "model=opt_125m", "tokenizer.path=gpt2").run
    assert (run.model.source, run.tokenizer.path) == ("facebook/opt-125m", "gpt2")


def test_the_local_file_wins_over_the_groups_and_the_command_line_over_it(tree, composed):
    (tree / "local").mkdir()
    (tree / "local" / "default.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - override /facility: generic_slurm\n"
        "facility:\n  account: mine\n  walltime_minutes: 5\n"
    )
    run = composed("facility.walltime_minutes=7").run
    assert (run.facility.name, run.facility.account) == ("generic_slurm", "mine")
    assert run.facility.walltime_minutes == 7
    assert composed("facility=laptop").run.facility.name == "laptop"


def test_a_facility_chooses_its_own_image(tree, composed):
    (tree / "image" / "theirs.yaml").write_text("name: theirs\nfile: /images/theirs.sif\n")
    (tree / "facility" / "theirs.yaml").write_text(
        "defaults:\n  - laptop\n  - override /image@_global_.image: theirs\n  - _self_\n"
        "name: theirs\n"
    )
    assert composed("facility=theirs").run.image.name == "theirs"
    assert composed("facility=theirs", "image=none").run.image.name == "none"


@pytest.mark.parametrize("command", [["compose"], ["submit", "--dry-run"]])
def test_the_host_side_never_imports_torch(command):
    code = (
        "import sys; from atoll.__main__ import main\n"
        f"assert main({[*command, 'facility=laptop']}) == 0\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules = set(done.stderr.split())
    assert "hydra" in modules
    assert not modules & HEAVY


def test_the_command_prints_yaml_that_is_the_run(capsys, tree, composed, monkeypatch):
    monkeypatch.setattr(compose_module, "config_tree", lambda: tree)
    assert compose_module.main(["facility=laptop", "seed=3"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert checked(printed) == composed("facility=laptop", "seed=3").run


def test_the_command_prints_one_document_for_each_run(capsys, tree, monkeypatch):
    monkeypatch.setattr(compose_module, "config_tree", lambda: tree)
    assert compose_module.main(["--multirun", "facility=laptop", "seed=1,2,3"]) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [document["seed"] for document in documents] == [1, 2, 3]


AXES = [
    (["sharding.tensor=3"], "world size (2) must be divisible by sharding.pipeline x context x"),
    (["sharding.tensor=2", "data.sequence_tokens=511"], "data.sequence_tokens (511)"),
    (["sharding.context=2", "ranks_per_node=16", "sharding.tensor=8"], "attention heads (8)"),
    (["sharding=ddp", "sharding.tensor=2"], "sharding.tensor=2: sharding=ddp spreads samples"),
    (["sharding.reshard_after_forward=3"], "reshard_after_forward (3)"),
    (["sharding=ddp", "sharding.offload=true"], "sharding.offload=true: sharding=ddp keeps"),
    (["sharding.stages_per_rank=2"], "stages_per_rank=2 needs a pipeline"),
    (["model=gpt2_tiny", "sharding.tensor=2"], "query, key and value in one transposed matrix"),
    (["sharding.expert=2"], "llama has no experts that could be divided"),
    (["sharding.expert=3"], "the shard group (2 ranks) must be divisible by sharding.expert (3)"),
    (["sharding.expert=2", "model.config.num_experts=3"], "experts (3) cannot be divided"),
    (["sharding.expert=2", "sharding.tensor=2"], "sharding.expert=2 with sharding.tensor=2"),
    (["sharding.expert=2", "training.compile=true"], "training.compile=true with sharding.exp"),
    (
        ["sharding=context", "training.compile=true"],
        "training.compile=true with sharding.context=2",
    ),
    (["sharding.expert=2", "model.lora.rank=4"], "model.lora with sharding.expert=2: its weights"),
    (["sharding=deepspeed_zero3", "sharding.expert=2"], "sharding.expert=2: sharding=deepspeed"),
]


@pytest.mark.parametrize(("overrides", "found"), AXES)
def test_axes_that_do_not_fit_are_refused_on_the_login_node(overrides, found, composed):
    with pytest.raises(UserError) as caught:
        composed("facility=laptop", *overrides)
    assert found in caught.value.found


def test_the_planner_s_choice_is_composed(composed):
    line = ["facility=karolina", "model=llama2_7b", "data.sequence_tokens=4096"]
    run = composed(*line, "sharding=auto").run
    assert run.sharding.name in ("full_shard", "shard_grad_op")
    assert run.sharding.tensor > 1 or run.sharding.sync_every_microbatch


def test_a_single_text_file_has_its_end_held_out(composed, here):
    (here / "book.txt").write_text("It was a dark and stormy night.\n" * 50)
    words = ("facility=laptop", "data=text_files", "data.files=book.txt")
    alone = composed(*words)
    assert alone.run.data.validation.tail == 0.05
    assert "its end is held out" in alone.sources["data.validation.tail"]
    assert composed(*words, "data.document=line").run.data.validation.fraction == 0.05
    (here / "more.txt").write_text("And it rained.\n")
    several = composed(*words[:2], "data.files=[book.txt,more.txt]")
    assert several.run.data.validation.fraction == 0.05


def test_relative_folders_of_a_batch_file_start_in_its_clone(tree, tmp_path):
    run = compose_module.compose(
        ["facility=laptop", "data.files=[email/*]"], tree, tmp_path / "clone"
    ).run
    assert run.folders.runs == tmp_path / "clone" / "runs"
    assert run.folders.prepared == tmp_path / "clone" / "prepared"


@pytest.mark.login_node
def test_images_lie_in_a_clone_wherever_a_line_is_typed(tmp_path, monkeypatch):
    """As those of a campaign are, which begin in the home folder of a facility."""
    monkeypatch.chdir(tmp_path)
    words = ["facility=laptop", "name=r"]
    run = compose_module.compose(words).run
    assert run.folders.images == TREE.parent / "images"
    assert run.folders.runs == tmp_path / "runs"
    other = tmp_path / "clone"
    assert compose_module.compose(words, TREE, other).run.folders.images == other / "images"


def test_a_process_may_compose_side_by_side():
    """As a campaign does, whose facilities are asked in threads: Hydra has one tree at a time."""
    words = [["facility=laptop", "name=r", f"seed={seed}"] for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        composed = list(pool.map(compose_module.compose, words))
    assert [one.run.seed for one in composed] == list(range(8))
