"""Documents from every kind of source, cut into blocks that depend on the text alone."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_runs import make_run
from hypothesis import given
from hypothesis import strategies as st

from atoll.data.sources import blocks, corpus
from atoll.data.sources.corpus import Corpus
from atoll.errors import UserError
from atoll.settings import Data


def settings(tmp_path: Path, **data: Any) -> Data:
    return make_run(tmp_path, data).data


def documents(text: Corpus, documents_per_shard: int = 100) -> list[str]:
    cut = blocks.blocks(text, documents_per_shard)
    return [document for block in cut for document in blocks.read(text, block)[0]]


def test_the_standard_library_is_read_without_its_tests(tmp_path: Path) -> None:
    text = corpus.train_corpus(settings(tmp_path, source="python_stdlib"))
    names = [part.name for part in text.parts]
    assert "argparse.py" in names
    assert "asyncio/tasks.py" in names
    assert names == sorted(names)
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "idlelib", "encodings"}
    assert documents(text)[names.index("argparse.py")] == text.parts[
        names.index("argparse.py")
    ].path.read_text("utf-8")


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("file", ["one\ntwo\n\n \n\tthree\r\nfour\n\n"]),
        ("paragraph", ["one\ntwo", "\tthree\r\nfour"]),
        ("line", ["one", "two", "", "", "\tthree", "four", ""]),
    ],
)
def test_text_files_hold_documents_of_three_kinds(
    tmp_path: Path, document: str, expected: list[str]
) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"one\ntwo\n\n \n\tthree\r\nfour\n\n")
    text = corpus.train_corpus(settings(tmp_path, files=[str(path)], document=document))
    assert documents(text) == expected


@pytest.mark.parametrize("ending", ["", "\n"])
def test_the_last_line_needs_no_line_feed(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "text.txt"
    path.write_text(f"one\ntwo{ending}")
    for document in ("line", "paragraph"):
        text = corpus.train_corpus(settings(tmp_path, files=[str(path)], document=document))
        assert "".join(documents(text)).replace("\n", "") == "onetwo"


@pytest.mark.image
def test_jsonl_and_parquet_give_their_text_field(tmp_path: Path) -> None:
    lines = [json.dumps({"body": "first", "n": 1}), "", json.dumps({"body": "zwölf\nTurtles"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    table = pa.table({"body": [f"row {n}" for n in range(25)], "n": list(range(25))})
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=10)
    data = settings(tmp_path, files=[str(tmp_path)], text_field="body")
    text = corpus.train_corpus(data)
    expected = ["first", "", "zwölf\nTurtles", *(f"row {n}" for n in range(25))]
    assert documents(text) == expected
    assert documents(text, documents_per_shard=7) == expected


def test_folders_globs_and_files_are_taken_in_order_and_once(tmp_path: Path) -> None:
    hidden = ("b/.hidden.txt", "b/.ipynb_checkpoints/1-checkpoint.txt")
    for name in ("b/2.txt", "b/1.txt", "b/c/3.txt", "a.txt", "b/notes.md", *hidden):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    entries = [f"{tmp_path}/b", f"{tmp_path}/**/[12].txt", f"{tmp_path}/a.txt"]
    text = corpus.train_corpus(settings(tmp_path, files=entries))
    assert documents(text) == ["b/1.txt", "b/2.txt", "b/c/3.txt", "a.txt"]


def test_a_linked_folder_of_text_is_not_left_out_without_a_word(tmp_path: Path) -> None:
    for name in ("corpus/2024/a.txt", "archive/2023/b.txt", "archive/pictures/c.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "corpus/latest").symlink_to("2024")  # its text is read in its own place
    (tmp_path / "corpus/pictures").symlink_to(tmp_path / "archive/pictures")
    given = settings(tmp_path, files=[f"{tmp_path}/corpus"])
    assert documents(corpus.train_corpus(given)) == ["corpus/2024/a.txt"]
    link = tmp_path / "corpus/2023"
    link.symlink_to(tmp_path / "archive/2023")
    with pytest.raises(UserError, match="corpus/2023 is a link to a folder with text") as caught:
        corpus.train_corpus(given)
    assert f"data.files=[{tmp_path}/corpus,{link}]" in caught.value.hint
    both = settings(tmp_path, files=[f"{tmp_path}/corpus/2024", str(link)])
    assert documents(corpus.train_corpus(both)) == ["corpus/2024/a.txt", "archive/2023/b.txt"]


def test_a_file_that_no_memory_holds_is_no_document(tmp_path: Path) -> None:
    path = tmp_path / "web.txt"
    with path.open("wb") as file:
        file.truncate(2 << 30)  # a hole: it takes no room
    text = corpus.train_corpus(settings(tmp_path, files=[str(path)], document="file"))
    with pytest.raises(UserError, match=r"one document of 2\.0 GiB") as caught:
        list(blocks.blocks(text, 100))
    assert "data.document=line" in caught.value.hint


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["missing.txt"], "no such file or folder: .*missing.txt"),
        (["*.txt"], r"no file matches .*\*.txt"),
        (["empty"], "holds no file that ends in"),
        (["picture.png"], "unknown kind of file: .*picture.png"),
        (["nothing.txt"], "holds no text: 1 files, 0 bytes"),
        ([], "data.files is empty"),
    ],
)
def test_missing_unknown_and_empty_files_are_named(
    tmp_path: Path, files: list[str], found: str
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "empty").mkdir()
    (tmp_path / "texts" / "picture.png").write_bytes(b"png")
    (tmp_path / "nothing.txt").touch()
    place = tmp_path if files == ["nothing.txt"] else tmp_path / "texts"
    data = settings(tmp_path, files=[str(place / file) for file in files])
    with pytest.raises(UserError, match=found):
        corpus.train_corpus(data)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{not json", r"rows.jsonl:2: not JSON"),
        ("[1, 2]", r"rows.jsonl:2: not a JSON object"),
        ('{"title": "x", "n": 1}', r"rows.jsonl:2: .*'text'.*: title, n"),
        ('{"text": 5}', r"rows.jsonl:2: .*'text'"),
        (r'{"text": "a \ud83d b"}', r"rows.jsonl:2: holds half of a character .*\\ud83d"),
        (r'{"text": "a \uDE00 b"}', r"rows.jsonl:2: holds half of a character .*\\ude00"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, found: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    text = corpus.train_corpus(settings(tmp_path, files=[str(path)]))
    with pytest.raises(UserError, match=found):
        documents(text)


def test_half_a_character_in_bytes_is_named_and_whole_ones_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(r'{"text": "\ud83d\ude00 \ud5c8 허", "other": "\ud83d"}' + "\n")
    text = corpus.train_corpus(settings(tmp_path, files=[str(path)]))
    assert documents(text) == ["😀 허 허"]
    path.write_bytes(b'{"text": "\xed\xa0\xbd"}\n')
    with pytest.raises(UserError, match=r"rows.jsonl:1: holds half of a character"):
        documents(corpus.train_corpus(settings(tmp_path, files=[str(path)])))


def test_columns_of_parquet_are_named_where_the_field_is_missing(tmp_path: Path) -> None:
    pq.write_table(pa.table({"title": ["a"], "n": [1]}), tmp_path / "t.parquet")
    for field, found in (("text", "no column 'text'; its columns are: title, n"), ("n", "int64")):
        data = settings(tmp_path, files=[str(tmp_path / "t.parquet")], text_field=field)
        with pytest.raises(UserError, match=found):
            documents(corpus.train_corpus(data))


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"text": ["a"] * 100}), path)
    path.write_bytes(path.read_bytes()[:-10])
    text = corpus.train_corpus(settings(tmp_path, files=[str(path)]))
    with pytest.raises(UserError, match=r"t\.parquet cannot be read as parquet"):
        documents(text)


def test_text_in_another_encoding_is_named_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("plain\ncafé\n".encode("latin-1"))
    text = corpus.train_corpus(settings(tmp_path, files=[str(path)], document="line"))
    with pytest.raises(UserError, match=r"latin\.txt is not UTF-8: byte 0xe9 at offset 9"):
        documents(text)


@pytest.mark.parametrize(
    ("content", "found", "hint"),
    [
        ("plain text\n".encode("utf-16"), "but UTF-16: byte 0xff", "iconv -f UTF-16 -t UTF-8"),
        ("plain text\n".encode("utf-16-le"), "but UTF-16LE: byte 0x00", "iconv -f UTF-16LE"),
        ("plain text\n".encode("utf-16-be"), "but UTF-16BE: byte 0x00", "iconv -f UTF-16BE"),
        (bytes(range(128)), "is no text: byte 0x00 at offset 0", "files of text"),
        (b"\x7fELF\x02\x00\x00\xff", "is no text", "files of text"),
        ("café\n".encode("latin-1"), "is not UTF-8: byte 0xe9", "file -i text.txt"),
    ],
)
@pytest.mark.parametrize("document", ["file", "line", "paragraph"])
def test_what_is_no_utf8_is_told_from_other_text(
    content: bytes, found: str, hint: str, document: str, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    text = corpus.train_corpus(settings(tmp_path, files=[str(path)], document=document))
    with pytest.raises(UserError) as caught:
        documents(text)
    assert found in caught.value.found and hint in caught.value.hint
    assert "LATIN1" not in caught.value.hint


def test_validation_text_may_not_be_trained_on(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    both = {"files": [str(tmp_path)], "validation": {"files": [str(tmp_path / "b.txt")]}}
    data = settings(tmp_path, **both)
    validation = corpus.validation_corpus(data)
    assert validation is not None
    with pytest.raises(UserError, match=r"1 of 1 .*b\.txt"):
        corpus.refuse_overlap(corpus.train_corpus(data), validation)


def test_the_fingerprint_follows_the_text_and_nothing_else(tmp_path: Path) -> None:
    def fingerprint(folder: Path) -> str:
        return corpus.train_corpus(settings(tmp_path, files=[str(folder)])).fingerprint

    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "a.txt").write_bytes(b"x" * 5_000_000)
    assert fingerprint(first) == fingerprint(second)
    with (second / "a.txt").open("r+b") as file:
        file.write(b"y")
    changed = fingerprint(second)
    assert changed != fingerprint(first)
    (second / "b.txt").write_text("more")
    assert fingerprint(second) not in (changed, fingerprint(first))


@given(
    sizes=st.lists(st.lists(st.integers(0, 400_000), max_size=30), min_size=1, max_size=5),
    documents_per_shard=st.integers(1, 40),
    max_documents=st.integers(1, 200),
)
def test_blocks_cover_each_document_once_and_keep_to_their_shard(
    sizes: list[list[int]], documents_per_shard: int, max_documents: int
) -> None:
    ends = [np.cumsum(np.array(part, dtype=np.int64)) for part in sizes]
    found = list(blocks.cut(ends, documents_per_shard, max_documents))
    everything = [(part, n) for part, counts in enumerate(sizes) for n in range(len(counts))]
    covered = [
        (span.part, n)
        for block in found
        for span in block.spans
        for n in range(span.first, span.first + span.documents)
    ]
    assert covered == everything[:max_documents]
    for block in found:
        last = block.first_document + block.documents - 1
        assert block.documents == sum(span.documents for span in block.spans) > 0
        assert block.first_document // documents_per_shard == block.shard
        assert last // documents_per_shard == block.shard
        size = sum(span.stop - span.start for span in block.spans)
        assert size <= blocks.BLOCK_BYTES or block.documents == 1


@pytest.mark.image
def test_hub_data_sets_are_read_from_a_saved_folder(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"body": [f"row {n}" for n in range(30)]})
    rows.save_to_disk(str(tmp_path / "plain"))
    both = datasets.DatasetDict({"train": rows, "test": rows.select(range(5))})
    both.save_to_disk(str(tmp_path / "splits"))
    hub = {"source": "hub", "text_field": "body"}
    plain = corpus.train_corpus(settings(tmp_path, **hub, hub=str(tmp_path / "plain")))
    assert documents(plain) == [f"row {n}" for n in range(30)]
    data = settings(tmp_path, **hub, hub=str(tmp_path / "splits"), validation={"split": "test"})
    validation = corpus.validation_corpus(data)
    assert validation is not None
    assert documents(validation) == [f"row {n}" for n in range(5)]
    assert corpus.train_corpus(data).fingerprint == plain.fingerprint
    wrong = settings(tmp_path, **hub, hub=str(tmp_path / "splits"), hub_split="dev")
    with pytest.raises(UserError, match="no split 'dev'; its splits are: train, test"):
        corpus.train_corpus(wrong)
    wrong = settings(tmp_path, source="hub", hub=str(tmp_path / "plain"))
    with pytest.raises(UserError, match="no column 'text'; its columns are: body"):
        corpus.train_corpus(wrong)


def test_a_folder_of_files_is_read_as_a_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "set" / "train.parquet")
    data = settings(tmp_path, source="hub", hub=str(tmp_path / "set"))
    assert documents(corpus.train_corpus(data)) == ["a", "b"]


def test_the_hub_out_of_reach_says_how_to_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    data = settings(tmp_path, source="hub", hub="nobody/has-this-data-set-here")
    with pytest.raises(UserError, match="nobody/has-this-data-set-here") as caught:
        corpus.train_corpus(data)
    assert "save_to_disk" in caught.value.hint


def test_splits_belong_to_the_hub(tmp_path: Path) -> None:
    data = settings(tmp_path, source="python_stdlib", validation={"split": "test"})
    with pytest.raises(UserError, match=r"data\.source is python_stdlib"):
        corpus.validation_corpus(data)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize(("suffix", "delimiter"), [("csv", ","), ("tsv", "\t")])
def test_records_of_csv_and_tsv_may_hold_lines_quotes_and_delimiters(
    tmp_path: Path, suffix: str, delimiter: str, ending: str
) -> None:
    texts = ["plain", 'a "word", or\ttwo', f"two{ending}lines{ending}{ending}and more", "", "zwölf"]
    texts += [f"row {n}" for n in range(40)]
    path = tmp_path / f"rows.{suffix}"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator=ending)
        writer.writerow(["n", "text"])
        writer.writerows([[str(n), text] for n, text in enumerate(texts)])
        file.write(ending)
    text = corpus.train_corpus(settings(tmp_path, files=[str(path)]))
    assert documents(text) == texts
    assert documents(text, documents_per_shard=2) == texts


def test_a_header_may_be_the_text_and_the_last_record_needs_no_line_end(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('\ntext\none\n\n"two"\n5" pipes')
    assert documents(corpus.train_corpus(settings(tmp_path, files=[str(path)]))) == [
        "one",
        "two",
        '5" pipes',
    ]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ('text,n\n"two\nlines",1\nx\n', r"rows\.csv:4: not csv: 1 fields where the header has 2"),
        ('text,n\nx,1\n"y"z,2\n', r"rows\.csv:3: not csv: ',' expected after '\"'"),
        ('text,n\nx,1\n"never closed,2\n', r"rows\.csv:3: not csv: unexpected end of data"),
        ('"text,n\nx,1\n', r"rows\.csv:1: not csv: unexpected end of data"),
        ("title,n\nx,1\n", r"rows\.csv has no column 'text'; its columns are: title, n"),
    ],
)
def test_a_malformed_record_is_named(tmp_path: Path, rows: str, found: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(rows)
    text = corpus.train_corpus(settings(tmp_path, files=[str(path)]))
    with pytest.raises(UserError, match=found):
        documents(text)


def test_csv_in_another_encoding_is_named_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "latin.csv"
    path.write_bytes("text\nplain\ncafé\n".encode("latin-1"))
    text = corpus.train_corpus(settings(tmp_path, files=[str(path)]))
    with pytest.raises(UserError, match=r"latin\.csv is not UTF-8: byte 0xe9 at offset 14"):
        documents(text)


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_files_are_read_in_both_forms(tmp_path: Path, kind: str) -> None:
    texts = [None, *(f"row {n}" for n in range(1, 30))]
    table = pa.table({"n": list(range(30)), "body": texts})
    make = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}[kind]
    path = tmp_path / "rows.arrow"
    with make(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    data = settings(tmp_path, files=[str(path)], text_field="body")
    text = corpus.train_corpus(data)
    expected = ["", *(f"row {n}" for n in range(1, 30))]
    assert documents(text) == expected
    assert documents(text, documents_per_shard=4) == expected
    for field, found in (("text", "no column 'text'; its columns are: n, body"), ("n", "int64")):
        data = settings(tmp_path, files=[str(path)], text_field=field)
        with pytest.raises(UserError, match=found):
            documents(corpus.train_corpus(data))
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(UserError, match=r"rows\.arrow cannot be read as arrow"):
        documents(corpus.train_corpus(settings(tmp_path, files=[str(path)], text_field="body")))


def test_parquet_is_read_across_row_groups_that_may_be_empty(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = pa.table({"text": [f"row {n}" for n in range(10)]})
    with pq.ParquetWriter(path, table.schema) as writer:
        for piece in (table[:3], table[3:3], table[3:9], table[9:]):
            writer.write_table(piece)
    text = corpus.train_corpus(settings(tmp_path, files=[str(path)]))
    for documents_per_shard in (2, 4, 100):
        assert documents(text, documents_per_shard) == [f"row {n}" for n in range(10)]
