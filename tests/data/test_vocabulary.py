"""The tokenizer of a run, from each place it may come from."""

import json
from pathlib import Path

import numpy as np
import pieces
import pytest
from data_runs import content, make_run, prose, write_lines
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast, tokenization_utils_base

from atoll import run_dir
from atoll.data import vocabulary
from atoll.data.tokenize import open_prepared, prepare
from atoll.errors import UserError
from atoll.settings import Run

LINES = {"document": "line"}


def run_with(tmp_path: Path, path: Path | None, **others: object) -> Run:
    write_lines(tmp_path / "text.txt", 60)
    data = LINES | {"files": [str(tmp_path / "text.txt")]}
    return make_run(tmp_path, data, {"path": path and str(path)}, **others)


def words(count: int, **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, `special` ones among them."""
    known = [*special.values(), *(word for n in range(40) for word in prose(n, 20).split())]
    known = list(dict.fromkeys([*known, *(f"word{n}" for n in range(count))]))[:count]
    model = models.WordLevel({word: n for n, word in enumerate(known)}, unk_token=known[0])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def quiet(_: str) -> None:
    """A log that nobody reads."""


def test_training_gives_the_same_tokenizer_with_any_number_of_threads(tmp_path: Path) -> None:
    found = []
    for workers in (1, 2):
        write_lines(tmp_path / "text.txt", 60)
        data = LINES | {"files": [str(tmp_path / "text.txt")], "workers": workers}
        run = make_run(tmp_path / str(workers), data)
        found.append(content(prepare(run, quiet) / "tokenizer"))
    assert found[0] == found[1]


def test_a_trained_tokenizer_gives_back_any_text(tmp_path: Path) -> None:
    folder = prepare(run_with(tmp_path, None), quiet)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    text = "  the sea\n\tñandú 海 🐢 <tag>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == tokenizer.bos_token == tokenizer.pad_token == "<|endoftext|>"


def test_training_documents_are_taken_evenly_from_the_training_split(tmp_path: Path) -> None:
    letters = [chr(0x4E00 + n) for n in range(200)]
    (tmp_path / "text.txt").write_text("\n".join(letter * 50 for letter in letters))
    data = LINES | {"files": [str(tmp_path / "text.txt")], "validation": {"fraction": 0.5}}
    run = make_run(tmp_path, data, {"training_documents": 10, "vocabulary_tokens": 2000})
    folder = prepare(run, quiet)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    learned = [n for n, letter in enumerate(letters) if len(tokenizer(letter)["input_ids"]) == 1]
    assert 5 <= len(learned) <= 10
    assert max(learned) - min(learned) > 100
    held_out = np.fromfile(folder / "validation" / "00000.ds", dtype="<u2")
    held_out_text = tokenizer.decode(held_out)
    assert not [n for n in learned if letters[n] in held_out_text]


def test_a_tokenizer_is_taken_from_a_folder_or_a_file(tmp_path: Path) -> None:
    words(200, eos_token="</s>", pad_token="<pad>").save_pretrained(tmp_path / "given")
    run = run_with(tmp_path, tmp_path / "given")
    prepare(run, quiet)
    manifest = open_prepared(run)
    assert (manifest.vocabulary_tokens, manifest.end_id, manifest.pad_id) == (200, 0, 1)
    run = run_with(tmp_path, tmp_path / "given" / "tokenizer.json")
    prepare(run, quiet)
    assert open_prepared(run).end_id == 0


def test_a_tokenizer_is_saved_alike_with_and_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tokenizer"
    words(300, unk_token="<unk>", eos_token="</s>").save_pretrained(str(folder))
    saved = []
    for offline in (False, True):
        monkeypatch.setattr(tokenization_utils_base, "is_offline_mode", lambda value=offline: value)
        vocabulary.save(AutoTokenizer.from_pretrained(str(folder)), tmp_path / str(offline))
        saved.append(content(tmp_path / str(offline)))
    assert saved[0] == saved[1]


def test_a_file_of_pieces_stays_beside_its_tokenizer_and_names_no_place(tmp_path: Path) -> None:
    folder = pieces.write_gemma(tmp_path / "gemma")
    vocabulary.save(AutoTokenizer.from_pretrained(str(folder)), tmp_path / "saved")
    saved = content(tmp_path / "saved")
    assert saved["tokenizer.model"] == content(folder)["tokenizer.model"]
    assert str(tmp_path) not in (tmp_path / "saved" / "tokenizer_config.json").read_text()


def test_the_model_brings_its_own_tokenizer(tmp_path: Path) -> None:
    words(200, eos_token="</s>").save_pretrained(tmp_path / "model")
    run = run_with(tmp_path, None, model={"name": "m", "source": str(tmp_path / "model")})
    folder = prepare(run, quiet)
    assert open_prepared(run).vocabulary_tokens == 200
    assert (folder / "tokenizer" / "tokenizer_config.json").exists()


def test_another_tokenizer_under_the_same_path_is_noticed(tmp_path: Path) -> None:
    run = run_with(tmp_path, tmp_path / "given")
    for count in (200, 300):
        words(count, eos_token="</s>").save_pretrained(tmp_path / "given")
        prepare(run, quiet)
        assert open_prepared(run).vocabulary_tokens == count


@pytest.mark.parametrize(
    "file", ["chat_template.jinja", "chat_template.json", "additional_chat_templates/tools.jinja"]
)
def test_another_chat_template_beside_a_tokenizer_is_noticed(tmp_path: Path, file: str) -> None:
    words(200, eos_token="</s>").save_pretrained(tmp_path / "given")
    run, found = run_with(tmp_path, tmp_path / "given"), set[str]()
    path = tmp_path / "given" / file
    path.parent.mkdir(exist_ok=True)
    for text in ("{{ messages[0].content }}", "{{ messages[-1].content }}"):
        path.write_text(text)
        found.add(vocabulary.fingerprint(run))
    assert len(found) == 2


def test_large_vocabularies_take_four_bytes_a_token(tmp_path: Path) -> None:
    words(70_000, eos_token="</s>").save_pretrained(tmp_path / "given")
    run = run_with(tmp_path, tmp_path / "given")
    folder = prepare(run, quiet)
    manifest = open_prepared(run)
    assert manifest.dtype == "uint32"
    assert (folder / "train" / "00000.ds").stat().st_size == 4 * manifest.tokens("train")
    assert (folder / "train" / "00000.ds.metadata").read_text().split("\n")[0].endswith("|4")


def of_images_too() -> PreTrainedTokenizerFast:
    """As Gemma 3's: behind all words a token that stands for an image."""
    tokenizer = words(200, eos_token="</s>")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<begin_image>"]})
    model = tokenizer.backend_tokenizer
    special = {"image_token": "<image>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="</s>", extra_special_tokens=special
    )


def test_what_stands_for_an_image_needs_no_row_of_a_model_that_reads_text(tmp_path: Path) -> None:
    """The hub's Gemma 3 with 270M and 1B have one row less than their tokenizer has tokens."""
    tokenizer = of_images_too()
    tokenizer.save_pretrained(tmp_path / "given")
    assert len(tokenizer) == 202
    run = run_with(tmp_path, tmp_path / "given")
    folder = prepare(run, quiet)
    assert open_prepared(run).vocabulary_tokens == 201
    assert len(AutoTokenizer.from_pretrained(folder / "tokenizer")) == 202


def test_a_text_with_what_stands_for_an_image_is_refused(tmp_path: Path) -> None:
    of_images_too().save_pretrained(tmp_path / "given")
    run = run_with(tmp_path, tmp_path / "given")
    with (tmp_path / "text.txt").open("a") as file:
        file.write("a cat as in <image> here\n" * 4)
    with pytest.raises(UserError, match=r"'<image>', token 201 .* only 201 are of text"):
        prepare(run, quiet)


def test_a_word_piece_tokenizer_numbers_the_texts_of_a_pair(tmp_path: Path) -> None:
    vocabulary.wordpiece([prose(n, 9) for n in range(20)], 300).save_pretrained(tmp_path)
    pair = AutoTokenizer.from_pretrained(tmp_path)("the sea", "an island")
    second = pair["input_ids"].index(3) + 1
    assert pair["token_type_ids"] == [int(n >= second) for n in range(len(pair["input_ids"]))]


def test_tokens_are_added_whoever_made_the_tokenizer(tmp_path: Path) -> None:
    words(200, eos_token="</s>").save_pretrained(tmp_path / "given")
    added = ["<|user|>", "<|bot|>"]
    for path, before in ((str(tmp_path / "given"), 200), (None, 300)):
        write_lines(tmp_path / "text.txt", 60)
        data = LINES | {"files": [str(tmp_path / "text.txt")], "template": "<|user|> {text}"}
        run = make_run(tmp_path, data, {"path": path, "add_tokens": added})
        folder = prepare(run, quiet)
        tokens = np.fromfile(folder / "train" / "00000.ds", dtype="<u2")
        manifest = open_prepared(run)
        assert manifest.vocabulary_tokens == before + 2
        assert np.count_nonzero(tokens == before) == manifest.documents("train")
        read = AutoTokenizer.from_pretrained(folder / "tokenizer")
        assert read.convert_tokens_to_ids(added) == [before, before + 1]


def test_a_token_that_is_there_already_is_refused(tmp_path: Path) -> None:
    words(200, eos_token="</s>").save_pretrained(tmp_path / "given")
    write_lines(tmp_path / "text.txt", 60)
    data = LINES | {"files": [str(tmp_path / "text.txt")]}
    run = make_run(tmp_path, data, {"path": str(tmp_path / "given"), "add_tokens": ["</s>"]})
    with pytest.raises(UserError, match=r"tokenizer\.add_tokens: .* has '</s>' already"):
        prepare(run, quiet)


def test_an_encoder_ends_documents_with_its_separator(tmp_path: Path) -> None:
    words(200, sep_token="[SEP]", pad_token="[PAD]").save_pretrained(tmp_path / "given")
    run = run_with(tmp_path, tmp_path / "given")
    prepare(run, quiet)
    assert open_prepared(run).end_id == 0


def beginning(count: int) -> PreTrainedTokenizerFast:
    """A tokenizer that puts <s> before a text, as Llama's does."""
    tokenizer = words(count, eos_token="</s>", bos_token="<s>")
    begin = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", begin)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("bos", "puts_it", "begins"),
    [("auto", True, 1.0), ("auto", False, 0.0), ("always", False, 1.0), ("never", True, 0.0)],
)
def test_documents_begin_as_the_tokenizer_begins_them(
    bos: str, puts_it: bool, begins: float, tmp_path: Path
) -> None:
    given = beginning(200) if puts_it else words(200, eos_token="</s>", bos_token="<s>")
    given.save_pretrained(tmp_path / "given")
    write_lines(tmp_path / "text.txt", 60)
    data = LINES | {"files": [str(tmp_path / "text.txt")], "bos": bos}
    run = make_run(tmp_path, data, {"path": str(tmp_path / "given")})
    folder = prepare(run, quiet)
    read = np.fromfile(folder / "train" / "00000.ds", dtype="<u2")
    ends = np.fromfile(folder / "train" / "00000.ds.index", dtype="<u8").astype(int)
    documents = np.split(read, ends[:-1])
    begin = given.convert_tokens_to_ids("<s>")
    assert np.mean([document[0] == begin for document in documents]) == begins
    assert all(np.count_nonzero(document == begin) == begins for document in documents)
    manifest = open_prepared(run)
    assert manifest.begin_id == (begin if begins else None)
    assert manifest.tokens("train") == len(read)
    if bos == "auto":
        text = given.decode(documents[0][int(begins) : -1])
        assert given(text)["input_ids"] == documents[0][:-1].tolist(), "as it does at inference"


def test_a_tokenizer_without_a_beginning_cannot_put_one(tmp_path: Path) -> None:
    words(200, eos_token="</s>").save_pretrained(tmp_path / "given")
    write_lines(tmp_path / "text.txt", 60)
    data = LINES | {"files": [str(tmp_path / "text.txt")], "bos": "always"}
    run = make_run(tmp_path, data, {"path": str(tmp_path / "given")})
    with pytest.raises(UserError, match=r"data\.bos=always, and the tokenizer has no beginning"):
        prepare(run, quiet)


def test_a_tokenizer_that_knows_no_end_is_refused(tmp_path: Path) -> None:
    words(200).save_pretrained(tmp_path / "given")
    run = run_with(tmp_path, tmp_path / "given")
    with pytest.raises(UserError, match="neither an end-of-text nor a separator"):
        prepare(run, quiet)
    assert not (run_dir.prepared(run) / "tokenizer").exists()


def test_a_folder_without_a_tokenizer_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"tokenizer\.path=.*empty"):
        prepare(run_with(tmp_path, tmp_path / "empty"), quiet)
    model = {"name": "m", "source": str(tmp_path / "empty")}
    with pytest.raises(UserError, match=r"model\.source=.*empty") as caught:
        prepare(run_with(tmp_path, None, model=model), quiet)
    assert "tokenizer.path" in caught.value.hint


def test_a_tokenizer_without_a_fast_form_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({"<unk>": 0, "a</w>": 1}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CTRLTokenizer"}')
    with pytest.raises(UserError, match=r"CTRLTokenizer.* has no fast form"):
        vocabulary.load(run_with(tmp_path, folder))
