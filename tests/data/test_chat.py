"""Conversations become tokens with a loss mask, in whichever layout and file they come."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import CALL, SYSTEM, TALK, TEMPLATES, TOOL_TALK, turn, without_marks
from data_runs import content, make_run
from test_chat_template import speaking

from atoll import run_dir
from atoll.data import shards
from atoll.data.samples import Samples, open_samples
from atoll.data.sources import blocks
from atoll.data.sources.conversations import Conversation, conversation_of
from atoll.data.sources.corpus import train_corpus
from atoll.data.tokenize import open_prepared, prepare
from atoll.errors import UserError
from atoll.settings import Run

SHARE_GPT = [
    {"from": {"user": "human", "assistant": "gpt"}[message["role"]], "value": message["content"]}
    for message in TALK
]
ALPACA = {"instruction": "Add these.", "input": "2 and 3", "output": "5"}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    speaking(TEMPLATES["chatml"]).save_pretrained(str(folder))
    return folder


def chat_run(
    folder: Path, tokenizer: Path, path: Path, chat_template: str = "", **data: Any
) -> Run:
    held_out = write_rows(folder / "held_out.jsonl", [{"messages": TALK}])
    values = {
        "files": [str(path)],
        "format": "chat",
        "sequence_tokens": 256,
        "workers": 1,
        "validation": {"files": [str(held_out)]},
    }
    given = {"path": str(tokenizer)} | ({"chat_template": chat_template} if chat_template else {})
    return make_run(folder, data=values | data, tokenizer=given)


def train_samples(run: Run) -> Samples:
    folder = prepare(run, lambda line: None)
    open_prepared(run, verify=True)
    return open_samples(run.data, folder, "train")


def learned_texts(samples: Samples, tokenizer: Any) -> list[str]:
    """The text of each stretch of targets, over all samples."""
    texts = []
    batch = samples.batch(np.arange(len(samples)))
    for labels in batch.labels_BT.tolist():
        stretch: list[int] = []
        for label in [*labels, -100]:
            if label >= 0:
                stretch.append(label)
            elif stretch:
                texts.append(tokenizer.decode(stretch))
                stretch = []
    return sorted(texts)


ANSWERS = sorted(f"{message['content']}<|im_end|>" for message in TALK[1::2])


@pytest.mark.parametrize("template", ["", without_marks(TEMPLATES["chatml"])])
def test_loss_is_on_what_the_assistant_says(tmp_path: Path, tokenizer: Path, template: str) -> None:
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"messages": TALK}, "", {"messages": [SYSTEM, *TALK[:2]]}]
    )
    run, lines = chat_run(tmp_path, tokenizer, rows, template), list[str]()
    prepare(run, lines.append)
    assert "conversations as messages: 2 files" in lines
    samples = train_samples(run)
    assert learned_texts(samples, speaking(None)) == sorted([*ANSWERS, ANSWERS[0]])
    manifest = shards.read_manifest(run_dir.prepared(run))
    assert manifest.documents("train") == 2 and manifest.blank("train") == 1
    every = np.arange(len(samples))
    targets = int((samples.batch(every).labels_BT >= 0).sum())
    assert int(samples.targets(every).sum()) == targets


def test_the_mask_is_the_one_that_transformers_gives(tmp_path: Path, tokenizer: Path) -> None:
    talk = [turn("user", "Où ça? \U0001f41a"), turn("assistant", "  Là-bas 🐚\n\n    oui ")]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": [SYSTEM, *TALK, *talk]}])
    for template in ("", without_marks(TEMPLATES["chatml"])):
        run = chat_run(tmp_path, tokenizer, rows, template)
        samples = train_samples(run)
        theirs = speaking(TEMPLATES["chatml"]).apply_chat_template(
            [SYSTEM, *TALK, *talk], return_assistant_tokens_mask=True, return_dict=True
        )
        count = int(samples.useful(np.arange(1))[0])
        batch = samples.batch(np.arange(1))
        assert batch.tokens_BT[0, :count].tolist() == theirs["input_ids"]
        mask = (batch.labels_BT[0, : count - 1] >= 0).int().tolist()
        assert mask == theirs["assistant_masks"][1:]


@pytest.mark.parametrize(("train_on", "texts"), [("last", ANSWERS[1:]), ("all", None)])
def test_what_is_trained_on(
    tmp_path: Path, tokenizer: Path, train_on: str, texts: list[str] | None
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": TALK}])
    samples = train_samples(chat_run(tmp_path, tokenizer, rows, train_on=train_on))
    if texts is None:
        assert int(samples.targets(np.arange(1))[0]) == int(samples.useful(np.arange(1))[0]) - 1
    else:
        assert learned_texts(samples, speaking(None)) == [TALK[3]["content"] + "<|im_end|>"]


LAYOUTS = {
    "messages": ({"messages": TALK}, TALK),
    "ShareGPT": ({"conversations": SHARE_GPT, "system": SYSTEM["content"]}, [SYSTEM, *TALK]),
    "Alpaca": (ALPACA, [turn("user", "Add these.\n\n2 and 3"), turn("assistant", "5")]),
    "prompt and completion": (
        {"prompt": "2 + 3?", "completion": "5"},
        [turn("user", "2 + 3?"), turn("assistant", "5")],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "arrow"])
def test_layouts_are_recognised(tmp_path: Path, tokenizer: Path, layout: str, suffix: str) -> None:
    row, messages = LAYOUTS[layout]
    path = write_table(tmp_path / f"rows.{suffix}", [row, row])
    run = chat_run(tmp_path, tokenizer, path)
    assert [part.layout for part in train_corpus(run.data).parts] == [layout]
    assert [talk.messages for talk in conversations(run)] == [messages, messages]


def test_a_column_of_turns_may_have_any_name(tmp_path: Path, tokenizer: Path) -> None:
    path = write_table(tmp_path / "rows.parquet", [{"dialogue": TALK}])
    run = chat_run(tmp_path, tokenizer, path, text_field="dialogue")
    assert [talk.messages for talk in conversations(run)] == [TALK]


def test_a_mistyped_column_is_not_another_one(tmp_path: Path, tokenizer: Path) -> None:
    path = write_table(tmp_path / "rows.parquet", [{"messages": TALK, "messages_clean": TALK}])
    run = chat_run(tmp_path, tokenizer, path, text_field="messages_claen")
    with pytest.raises(UserError, match="no 'messages_claen' in the fields: messages, messages_"):
        train_corpus(run.data)


@pytest.mark.parametrize(
    "history",
    [
        [{"user": "q1", "assistant": "a1"}],
        [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"}],
        ["q1", "a1"],
        ["question", "answer"],
        [["q1", "a1", "more"]],
        {"q1": "a1"},
    ],
)
def test_a_history_that_is_no_list_of_pairs_makes_no_turns(history: Any) -> None:
    row = {"instruction": "q2", "output": "a2"}
    assert len(conversation_of("here", row | {"history": [["q1", "a1"]]}).messages) == 4
    with pytest.raises(UserError, match="here: history is no list of pairs"):
        conversation_of("here", row | {"history": history})


def test_an_empty_prompt_is_no_traceback() -> None:
    answer = [turn("system", "Be kind."), turn("assistant", "5")]
    found = conversation_of("here", {"prompt": [], "completion": answer})
    assert found.messages == answer


def write_table(path: Path, rows: list[Any]) -> Path:
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".jsonl":
        write_rows(path, rows)
    elif path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    return path


def conversations(run: Run) -> list[Conversation]:
    """What is read of a run's training rows, in this process."""
    corpus = train_corpus(run.data)
    return [
        conversation_of(row.place, row.fields, run.data.text_field)
        for block in blocks.blocks(corpus, 100)
        for row in blocks.read(corpus, block)[0]
        if row.fields
    ]


def test_calls_of_tools_are_learned_and_what_they_give_is_not(
    tmp_path: Path, tokenizer: Path
) -> None:
    call = CALL | {"function": {"name": "wind", "arguments": '{"at": "reef"}'}}  # as OpenAI has it
    talk = [
        {"role": "assistant", "content": None, "tool_calls": [call]} if "tool_calls" in m else m
        for m in TOOL_TALK
    ]
    as_json = write_rows(tmp_path / "rows.jsonl", [{"messages": talk}])
    as_columns = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": talk, "tools": "[]"}]), as_columns)
    for path in (as_json, as_columns):
        run = chat_run(tmp_path, tokenizer, path, TEMPLATES["qwen2_5"], sequence_tokens=512)
        texts = learned_texts(train_samples(run), speaking(None))
        assert (
            '<tool_call>{"name": "wind", "arguments": {"at": "reef"}}</tool_call><|im_end|>'
            in texts
        )
        assert len(texts) == 3 and not any('knots"' in text for text in texts)


def test_an_empty_list_of_calls_is_none() -> None:
    talk = [turn(m["role"], m["content"], tool_calls=[]) for m in TALK]
    assert conversation_of("row 1", {"messages": talk}).messages == TALK


@pytest.mark.parametrize("long", ["cut", "drop"])
def test_long_conversations_are_cut_at_a_turn_or_left_out(
    tmp_path: Path, tokenizer: Path, long: str
) -> None:
    endless = [turn("user", "x" * 300), TALK[1]]
    talks = [TALK[:2], [*TALK, *endless], endless]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": talk} for talk in talks])
    run = chat_run(tmp_path, tokenizer, rows, long_conversations=long)
    lines: list[str] = []
    folder = prepare(run, lines.append)
    texts = learned_texts(open_samples(run.data, folder, "train"), speaking(None))
    cut, dropped = (1, 1) if long == "cut" else (0, 2)
    assert texts == (sorted([*ANSWERS, ANSWERS[0]]) if long == "cut" else ANSWERS[:1])
    counted = f"{cut} are cut at a turn and {dropped} left out"
    assert any(counted in line for line in lines), lines
    manifest = shards.read_manifest(folder)
    assert (manifest.cut("train"), manifest.dropped("train")) == (cut, dropped)


def test_none_that_fits_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": TALK}])
    run = chat_run(tmp_path, tokenizer, rows, sequence_tokens=16)
    with pytest.raises(UserError, match="each of its 1 conversations has more than 16 tokens"):
        prepare(run, lambda line: None)


BAD = [
    ({"messages": TALK[:1]}, r"rows.jsonl:3: no assistant turn, its roles are: user"),
    ({"messages": []}, "rows.jsonl:3: no assistant turn, its roles are: none"),
    ({"messages": [turn("pirate", "arr"), TALK[1]]}, "rows.jsonl:3: turn 1 has the role 'pirate'"),
    ({"messages": [{"role": "user"}, TALK[1]]}, r"rows.jsonl:3: turn 1 \(user\) has no content"),
    ({"messages": "hello"}, "rows.jsonl:3: messages is no list of turns"),
    ({"messages": ["hello"]}, "rows.jsonl:3: turn 1 is no object"),
    ({"messages": [turn("user", 5), TALK[1]]}, "rows.jsonl:3: the content of turn 1 is no text"),
    ({"text": "hello"}, "rows.jsonl:3: no conversation in the fields: text"),
    ({"messages": TALK, "tools": "none"}, "rows.jsonl:3: tools is no list"),
    (
        {"messages": [TALK[0], {"role": "assistant", "tool_calls": [{}]}]},
        "rows.jsonl:3: turn 2 calls",
    ),
    ("{", "rows.jsonl:3: not JSON"),
    ({"messages": [TALK[0], turn("assistant", "\ud83d")]}, "rows.jsonl:3: holds half of a char"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_record_is_named(tmp_path: Path, tokenizer: Path, row: Any, message: str) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": TALK}, "", row])
    with pytest.raises(UserError, match=message):
        conversations(chat_run(tmp_path, tokenizer, rows))


def test_a_bad_record_of_columns_is_named(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": TALK}, {"messages": TALK[:1]}]), path)
    with pytest.raises(UserError, match=r"rows.parquet: record 2: no assistant turn"):
        prepare(chat_run(tmp_path, tokenizer, path), lambda line: None)


def test_files_without_rows_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "talk.txt"
    path.write_text("hello\n")
    with pytest.raises(UserError, match="reads rows with messages"):
        train_corpus(chat_run(tmp_path, tokenizer, path).data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"packing": "concat"}, "data.packing=concat"),
        ({"bos": "always"}, "data.bos=always"),
        ({"template": "a {text}"}, "data.template="),
    ],
)
def test_settings_of_text_are_refused(
    tmp_path: Path, tokenizer: Path, data: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"data.format=chat with {message}"):
        chat_run(tmp_path, tokenizer, tmp_path / "rows.jsonl", **data)


def test_a_damaged_loss_mask_is_named(tmp_path: Path, tokenizer: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": TALK}])
    run = chat_run(tmp_path, tokenizer, rows)
    path = shards.loss_file(prepare(run, lambda line: None), "train", 0)
    whole = path.read_bytes()
    path.write_bytes(bytes(len(whole)))
    with pytest.raises(UserError, match=r"00000.ds.loss is corrupted"):
        open_prepared(run, verify=True)
    path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=rf"has {len(whole) - 1} bytes instead of {len(whole)}"):
        open_prepared(run)
    prepare(run, lambda line: None)
    assert path.read_bytes() == whole, "only it is made again"


def test_any_number_of_workers_makes_the_same_bytes(tmp_path: Path, tokenizer: Path) -> None:
    many = [{"messages": TALK[: 2 + 2 * (n % 2)]} for n in range(30)]
    rows = write_rows(tmp_path / "rows.jsonl", many)
    folders = []
    for workers in (1, 2):
        home = tmp_path / str(workers)
        home.mkdir()
        run = chat_run(home, tokenizer, rows, workers=workers, documents_per_shard=8)
        folders.append(prepare(run, lambda line: None))
    one, two = (content(folder) for folder in folders)
    same = [name for name in one if name.startswith("train/")]
    assert len(same) == 5 * 4 and [one[name] for name in same] == [two[name] for name in same]


def test_conversations_of_the_hub(tmp_path: Path, tokenizer: Path) -> None:
    datasets = pytest.importorskip("datasets")
    call = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    talks = [TALK, [TALK[0], *call, turn("tool", "5"), TALK[1]]]
    path = tmp_path / "saved"
    datasets.Dataset.from_list([{"messages": talk} for talk in talks]).save_to_disk(str(path))
    run = chat_run(tmp_path, tokenizer, tmp_path, source="hub", files=[], hub=str(path))
    assert [part.layout for part in train_corpus(run.data).parts] == ["messages"]
    read = conversations(run)
    assert read[0].messages == TALK and read[1].messages[1] == {
        "role": "assistant",
        "tool_calls": [CALL],
    }


def test_a_tokenizer_that_is_made_needs_a_template(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no chat template"):
        make_run(tmp_path, data={"files": ["rows.jsonl"], "format": "chat"})


def test_a_tokenizer_is_made_of_what_is_said(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": TALK}] * 4)
    data = {"files": [str(rows)], "format": "chat", "validation": {"fraction": 0.5}, "workers": 1}
    added = {"chat_template": TEMPLATES["chatml"], "add_tokens": ["<|im_start|>", "<|im_end|>"]}
    run = make_run(tmp_path, data=data, tokenizer=added)
    folder = prepare(run, lambda line: None)
    assert (shards.tokenizer_folder(folder) / "chat_template.jinja").read_text() == TEMPLATES[
        "chatml"
    ]
    assert len(open_samples(run.data, folder, "train"))


def test_the_tokens_depend_on_what_they_were_made_with(tmp_path: Path, tokenizer: Path) -> None:
    runs = [
        chat_run(tmp_path, tokenizer, tmp_path / "rows.jsonl", template, **changes)
        for template, changes in (
            ("", {}),
            (TEMPLATES["qwen3"], {}),
            ("", {"train_on": "last"}),
            ("", {"sequence_tokens": 128}),
            ("", {"long_conversations": "drop"}),
        )
    ]
    assert len({run_dir.prepared_digest(run) for run in runs}) == len(runs)
