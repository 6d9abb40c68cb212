"""Scores of a task with local data: as the harness alone, and what is refused."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import small_run
import tiny
import torch
from rank_pool import RankPool
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from atoll import run_dir
from atoll.data import harness_tasks
from atoll.errors import UserError
from atoll.report.run import read, run_tables
from atoll.report.tables import number
from atoll.settings import Evaluation, Run
from atoll.sharding.process_group import World
from atoll.train import evaluate, harness, run_scores, scores
from atoll.train.harness_model import ModelOnRanks

SIZES = tiny.CONFIGS["llama"] | {"vocab_size": 300, "hidden_size": 64}
TASK = """\
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
WHOLE_TEXT = """\
task: texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: bits_per_byte}}, {{metric: word_perplexity}}]
"""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What scoring turns on for its process is off again for the tests behind."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    for module, name in harness_tasks.OFFLINE.items():
        monkeypatch.setattr(importlib.import_module(module), name, True)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"The {n} is", "choices": ["red", "green", "so blue"], "answer": n % 3}
        for n in range(7)
    ]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("colours", TASK), ("texts", WHOLE_TEXT)):
        (folder / f"{name}.yaml").write_text(text.format(data=folder / "test.jsonl"))
    return folder


def small_model(folder: Path) -> Path:
    letters = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters | {"<end>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(folder)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES)).save_pretrained(folder)
    return folder


def alone(export: Path, tasks: Path) -> dict[str, Any]:
    """What the harness says of a model without us."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    return simple_evaluate(
        model=HFLM(pretrained=str(export), device="cpu"),
        tasks=["colours", "texts"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )["results"]


def numbers(results: dict[str, Any]) -> harness.Figures:
    """The harness's own results, as we name them."""
    return {task: harness._numbers(values) for task, values in results.items()}


def scored(world: World, export: Path, asked: Evaluation) -> harness.Figures:
    """What a rank of the pool runs, as on a node."""
    os.environ["LOCAL_RANK"] = str(world.rank)
    try:
        return scores.scores_of(export, asked, world)
    finally:
        del os.environ["LOCAL_RANK"]


def test_scores_are_those_of_the_harness_alone(tasks: Path, tmp_path: Path) -> None:
    export = small_model(tmp_path)
    words = ["--tasks=colours,texts", f"--tasks-folder={tasks}"]
    assert scores.main([str(export), *words]) == 0
    written = json.loads((run_dir.scores_file(export)).read_text())["tasks"]
    assert set(written["colours"]) == {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr"}
    assert set(written["texts"]) == {"bits_per_byte", "word_perplexity"}
    assert written == numbers(alone(export, tasks))


def test_the_harness_prints_nothing_of_its_own(
    tasks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A line of each rank for each metric, and git's that the folder is no clone."""
    export = small_model(tmp_path)
    (tasks / "plain.yaml").write_text(
        (tasks / "colours.yaml").read_text().replace("task: colours", "task: plain")
    )
    monkeypatch.chdir(tmp_path)
    assert scores.main([str(export), "--tasks=plain", f"--tasks-folder={tasks}"]) == 0
    assert [record.getMessage() for record in caplog.records if "lm_eval" in record.name] == []
    assert "git repository" not in capfd.readouterr().err


def test_ranks_score_together_as_one_process(tasks: Path, tmp_path: Path, ranks: RankPool) -> None:
    export = small_model(tmp_path)
    asked = Evaluation(
        every_steps=0, max_samples=None, tasks=["colours", "texts"], tasks_folder=str(tasks)
    )
    expected = numbers(alone(export, tasks))
    assert ranks.run(scored, export, asked, world=3) == [expected] * 3


def test_a_run_scores_what_it_exports(tasks: Path, tmp_path: Path, ranks: RankPool) -> None:
    small_run.write_text(tmp_path)
    evaluation = {"every_steps": 3, "tasks": ["colours"], "tasks_folder": str(tasks)}
    changes: dict[str, Any] = {"evaluation": evaluation, "export": {"dtype": "float32"}}
    run = small_run.settings(tmp_path, 2, **changes)
    folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=2)
    lines = map(json.loads, run_dir.metrics_file(folder).read_text().splitlines())
    evaluations = [line for line in lines if line["event"] == "evaluation"]
    assert [line["step"] for line in evaluations] == [0, 3, 6]
    expected = numbers(alone(run_dir.export(folder), tasks))["colours"]
    assert {f"colours/{name}": value for name, value in expected.items()}.items() <= evaluations[
        -1
    ].items()
    assert json.loads(run_dir.result_file(folder).read_text())["colours/acc"] == expected["acc"]
    assert not run_dir.scored_model(folder).exists()
    out = f"--out={run_dir.scores_file(folder)}"  # as --then evaluate does
    words = ["--tasks=colours", f"--tasks-folder={tasks}", out, str(run_dir.export(folder))]
    assert scores.main(words) == 0
    value = number(expected["acc"], 4)
    row = {"run": run.name, "task": "colours", "figure": "acc", "value": value}
    assert row in run_tables([read(folder)])["Scores"]


def no_room(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 9.")


def train_with_little_room(world: World, run: Run) -> None:
    """On the second rank no pass of the scored model fits beside the state of step 3."""
    scored, fits = run_scores.run_scores, ModelOnRanks._model_call

    def scored_at(train_state: Any, step: int) -> dict[str, float]:
        full = step == 3 and world.rank == 1
        patch.setattr(ModelOnRanks, "_model_call", no_room if full else fits)
        return scored(train_state, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "run_scores", scored_at)
        small_run.train_here(world, run)


def test_a_run_goes_on_without_scores_that_a_rank_has_no_room_for(
    tasks: Path, tmp_path: Path, ranks: RankPool
) -> None:
    small_run.write_text(tmp_path)
    evaluation = {"every_steps": 3, "tasks": ["colours"], "tasks_folder": str(tasks)}
    run = small_run.settings(tmp_path, 2, name="little", evaluation=evaluation)
    folder = small_run.ready(run)
    ranks.run(train_with_little_room, run, world=2)
    evaluations = small_run.records(folder, "evaluation")
    assert [(line["step"], "colours/acc" in line) for line in evaluations] == [
        (0, True), (3, False), (6, True),
    ]  # fmt: skip
    assert (run_dir.export(folder) / "config.json").is_file()
    assert not run_dir.scored_model(folder).exists()


def refused_score(world: World, export: Path, asked: Evaluation) -> UserError:
    """What a rank is told where the second one has no room for a pass."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError) as refused:
        if world.rank == 1:
            patch.setattr(ModelOnRanks, "_model_call", no_room)
        scored(world, export, asked)
    return refused.value


def test_no_room_on_one_rank_ends_scores_on_all(
    tasks: Path, tmp_path: Path, ranks: RankPool
) -> None:
    asked = Evaluation(every_steps=0, max_samples=None, tasks=["colours"], tasks_folder=str(tasks))
    for error in ranks.run(refused_score, small_model(tmp_path), asked, world=2):
        assert error.found.startswith("no room on the device for what the tasks ask: CUDA out of")
        assert error.found.endswith("(rank 1 of 2)") and "CUDA_VISIBLE_DEVICES=" in error.hint


@pytest.mark.full  # the harness reads its own 10,000 files
def test_a_task_that_nobody_knows_is_refused(tasks: Path) -> None:
    with pytest.raises(UserError, match="no task hues"):
        scores.main([str(tasks), "--tasks=hues", f"--tasks-folder={tasks}"])


def test_a_task_without_its_data_is_refused(tasks: Path) -> None:
    lost = TASK.replace("task: colours", "task: lost").format(data=tasks / "lost.jsonl")
    (tasks / "lost.yaml").write_text(lost)
    with pytest.raises(UserError, match="data of lost cannot be read"):
        scores.main([str(tasks), "--tasks=lost", f"--tasks-folder={tasks}"])


def test_a_bundle_holds_all_that_its_tasks_read(tasks: Path, tmp_path: Path) -> None:
    """The folder of the data may be gone: the bundle was copied to another machine."""
    away = tmp_path / "away"
    away.mkdir()
    (away / "here.jsonl").write_text((tasks / "test.jsonl").read_text())
    (away / "colours.yaml").write_text(TASK.format(data=away / "here.jsonl"))
    asked = Evaluation(every_steps=0, max_samples=None, tasks=["colours"], tasks_folder=str(away))
    bundle, export = tmp_path / "bundle", small_model(tmp_path / "export")
    bundle.mkdir()
    harness_tasks.fetch_tasks(asked, run_dir.tasks_folder(bundle))
    expected = numbers(alone(export, tasks))["colours"]
    (away / "here.jsonl").unlink()
    assert scores.main([str(export), "--tasks=colours", f"--bundle={bundle}"]) == 0
    written = json.loads((run_dir.scores_file(export)).read_text())["tasks"]["colours"]
    assert written == expected
