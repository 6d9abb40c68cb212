"""Scores of a task with local data: as the harness alone, and what is refused."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from atoll.errors import UserError
from atoll.train import harness, scores

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


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What scoring turns on for its process is off again for the tests behind."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    for module, name in harness.OFFLINE.items():
        monkeypatch.setattr(importlib.import_module(module), name, True)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"The {n} is", "choices": ["red", "green", "so blue"], "answer": n % 3}
        for n in range(7)
    ]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "colours.yaml").write_text(TASK.format(data=folder / "test.jsonl"))
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
        tasks=["colours"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )["results"]["colours"]


def test_scores_are_those_of_the_harness_alone(tasks: Path, tmp_path: Path) -> None:
    export = small_model(tmp_path)
    assert scores.main([str(export), "--tasks=colours", f"--tasks-folder={tasks}"]) == 0
    expected = alone(export, tasks)
    written = json.loads((export / scores.FILE_NAME).read_text())["tasks"]["colours"]
    assert set(written) == {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr"}
    assert written == {name: expected[f"{name},none"] for name in written}


@pytest.mark.full  # the harness reads its own 10,000 files
def test_a_task_that_nobody_knows_is_refused(tasks: Path) -> None:
    with pytest.raises(UserError, match="no task hues"):
        scores.main([str(tasks), "--tasks=hues", f"--tasks-folder={tasks}"])


def test_a_task_without_its_data_is_refused(tasks: Path) -> None:
    lost = TASK.replace("task: colours", "task: lost").format(data=tasks / "lost.jsonl")
    (tasks / "lost.yaml").write_text(lost)
    with pytest.raises(UserError, match="data of lost cannot be read offline"):
        scores.main([str(tasks), "--tasks=lost", f"--tasks-folder={tasks}"])
