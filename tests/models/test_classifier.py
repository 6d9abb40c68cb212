"""Our classifier answers as Hugging Face's does on the same padded rows."""

from pathlib import Path

import defaults
import pytest
import tiny
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from atoll.data.batch import Batch
from atoll.models import export
from atoll.models.build import build_model, classifier_config, replaced_head, weights_for
from atoll.models.classifier import head_name
from atoll.models.weights import fill, fill_buffers, materialize
from atoll.settings import Classes, Model, Training

SEPARATOR, PAD, LENGTHS = 2, 1, (20, 32, 9)
TRAINING = Training(**defaults.group("training", global_batch_samples=1))


def rows() -> Batch:
    torch.manual_seed(0)
    tokens = torch.randint(3, tiny.VOCABULARY, (3, tiny.SEQUENCE))
    positions, segments = torch.zeros_like(tokens), []
    for row, length in enumerate(LENGTHS):
        tokens[row, length:] = PAD
        tokens[row, [length // 2, length - 1]] = SEPARATOR
        rest = tiny.SEQUENCE - length
        positions[row] = torch.cat([torch.arange(length), torch.arange(rest)])
        segments += [length, rest] if rest else [length]
    ends = torch.tensor([0, *segments], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    useful = sum(LENGTHS)
    classes = torch.tensor([0.0, 1.0, 1.0])
    return Batch(tokens, tokens, positions, ends, tuple(segments), useful, classes)


@pytest.mark.parametrize("pad", [None, "<pad>"])
def test_an_export_says_what_pads_its_rows(tmp_path: Path, pad: str | None) -> None:
    """A source that only wrote text has none, and transformers then takes one row alone."""
    words = Tokenizer(models.WordLevel({"</s>": 0, "a": 1, "<pad>": 2}, "a"))
    names = {"eos_token": "</s>"} | ({"pad_token": pad} if pad else {})
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(tmp_path / "words")
    config = AutoConfig.for_model(**tiny.CONFIGS["llama"] | {"pad_token_id": None})
    config.problem_type = "single_label_classification"
    (tmp_path / "export").mkdir()
    of = (config, "LlamaForSequenceClassification", torch.float32, [], 0, tmp_path / "words")
    export.write_rest(tmp_path / "export", *of)
    read = AutoConfig.from_pretrained(tmp_path / "export", trust_remote_code=False)
    assert read.pad_token_id == (2 if pad else 0)


@pytest.mark.parametrize("labels", [["yes", "no"], []])
@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_logits_and_loss(tmp_path: Path, architecture: str, labels: list[str]) -> None:
    torch.manual_seed(7)
    sizes = tiny.CONFIGS[architecture] | {"is_decoder": False, "pad_token_id": PAD}
    theirs_config = AutoConfig.for_model(**sizes, num_labels=len(labels) or 1)
    theirs = AutoModelForSequenceClassification.from_config(theirs_config).eval()
    theirs.save_pretrained(tmp_path)
    settings = Model(name="x", source=str(tmp_path))
    metrics = {} if labels else {"metrics": ["pearson"]}
    classes = Classes(text_fields=["a", "b"], labels=labels, **metrics)
    config = classifier_config(settings, classes, tiny.VOCABULARY, tiny.SEQUENCE, PAD)
    model = build_model(config, TRAINING, separator_id=SEPARATOR)
    materialize(model, torch.device("cpu"))
    with weights_for(settings, config, 0) as read:
        fill(model.hf, read)
    fill_buffers(model.hf)
    batch = rows()
    mask = (torch.arange(tiny.SEQUENCE)[None] < torch.tensor(LENGTHS)[:, None]).long()
    more = {}
    if architecture == "bert":
        number = (batch.tokens_BT == SEPARATOR).long()
        more["token_type_ids"] = (number.cumsum(1) - number).clamp(max=1) * mask
    with torch.no_grad():
        expected = theirs(batch.tokens_BT, attention_mask=mask, **more).logits
        found = model.eval()(batch, torch.float32)
    torch.testing.assert_close(found, expected)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert batch.classes_B is not None
    wanted = F.mse_loss(expected[:, 0], batch.classes_B, reduction="sum")
    if labels:
        wanted = F.cross_entropy(expected, batch.classes_B.long(), reduction="sum")
    torch.testing.assert_close(model(batch, torch.float32), wanted)


def test_a_model_of_text_gets_a_classifier_at_random(tmp_path: Path) -> None:
    torch.manual_seed(7)
    config = AutoConfig.for_model(**(tiny.CONFIGS["bert"] | {"is_decoder": False}))
    AutoModelForSequenceClassification.from_config(config).bert.save_pretrained(tmp_path)
    settings = Model(name="x", source=str(tmp_path))
    classes = Classes(text_fields=["a"], labels=["x", "y", "z"])
    found = []
    for seed in (0, 0, 1):
        config = classifier_config(settings, classes, tiny.VOCABULARY, tiny.SEQUENCE, PAD)
        model = build_model(config, TRAINING, separator_id=SEPARATOR)
        materialize(model, torch.device("cpu"))
        with weights_for(settings, config, seed) as read:
            fill(model.hf, read)
        found.append(model.hf.classifier.weight.detach())
    assert found[0].shape[0] == 3 and torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_a_head_for_another_number_of_labels_begins_anew(tmp_path: Path, architecture: str) -> None:
    sizes = tiny.CONFIGS[architecture] | {"is_decoder": False, "pad_token_id": PAD}
    torch.manual_seed(7)
    theirs = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model(**sizes, num_labels=2)
    )
    theirs.save_pretrained(tmp_path)
    settings = Model(name="x", source=str(tmp_path))
    found = {}
    for labels in (["a", "b"], ["a", "b", "c"]):
        classes = Classes(text_fields=["a"], labels=labels)
        config = classifier_config(settings, classes, tiny.VOCABULARY, tiny.SEQUENCE, PAD)
        model = build_model(config, TRAINING, separator_id=SEPARATOR)
        materialize(model, torch.device("cpu"))
        with weights_for(settings, config, 0) as read:
            fill(model.hf, read)
        found[replaced_head(settings, config)] = dict(model.hf.named_parameters())
    said = f"the classifier of {tmp_path} has 2 labels, the data 3"
    head, whole = head_name(architecture), dict(theirs.named_parameters())
    for name, value in found[said].items():
        if name.startswith(head):
            assert value.shape[0] == 3 and value.isfinite().all()
        else:
            assert torch.equal(value, whole[name]), name
    assert all(torch.equal(value, whole[name]) for name, value in found[None].items())
