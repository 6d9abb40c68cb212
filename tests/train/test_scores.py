"""Scores of a task with local data: as the harness alone, and what is refused."""

import json
from pathlib import Path

import pytest
import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from atoll.errors import UserError
from atoll.train import scores

pytest.importorskip("lm_eval")

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


def test_scores_are_those_of_the_harness_alone(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    for name in scores.OFFLINE:
        monkeypatch.setenv(name, "1")
    export = small_model(tmp_path)
    assert scores.main([str(export), "--tasks=colours", f"--tasks-folder={tasks}"]) == 0
    alone = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(export), device="cpu"),
        tasks=["colours"],
        task_manager=TaskManager(include_path=str(tasks)),
    )
    written = json.loads((export / scores.FILE_NAME).read_text())["colours"]
    assert written == json.loads(json.dumps(alone["results"]["colours"]))
    assert "acc,none" in written


def test_a_task_that_nobody_knows_is_refused(tasks: Path) -> None:
    with pytest.raises(UserError, match="no task hues"):
        scores.main([str(tasks), "--tasks=hues", f"--tasks-folder={tasks}"])
