"""Data sets of the hub, from made-up repositories on disk that are laid out as the real ones."""

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from composing import ROOT
from data_runs import make_run

from atoll import run_dir
from atoll.config.compose import compose
from atoll.data import shards
from atoll.data.sources import blocks, corpus
from atoll.data.sources.corpus import Corpus
from atoll.data.sources.hub import fingerprint, load
from atoll.data.tokenize import prepare
from atoll.errors import UserError
from atoll.settings import Data

datasets = pytest.importorskip("datasets")
SCRIPT = "import datasets\n\n\nclass Mc4(datasets.GeneratorBasedBuilder):\n    pass\n"
# data -> the files of its repository: (those of its training split, of its validation, others)
LAYOUTS = {
    "clean_mc4_it": (
        [f"clean-mc4-it/c4-it.tfrecord-{n:05d}-of-01024.json.gz" for n in (0, 1, 99)],
        ["clean-mc4-it/c4-it-validation.tfrecord-00000-of-00008.json.gz"],
        [
            "clean-mc4-it/c4-it.tfrecord-00100-of-01024.json.gz",
            "clean-mc4-it/c4-it.tfrecord-01000-of-01024.json.gz",
            "clean-mc4-it/c4-it-validation.tfrecord-00001-of-00008.json.gz",
        ],
    ),
    "mc4_cs": (
        [f"multilingual/c4-cs.tfrecord-{n:05d}-of-01024.json.gz" for n in (0, 99, 100, 199)],
        ["multilingual/c4-cs-validation.tfrecord-00000-of-00002.json.gz"],
        [
            "multilingual/c4-cs.tfrecord-00200-of-01024.json.gz",
            "multilingual/c4-csb.tfrecord-00000-of-01024.json.gz",
            "multilingual/c4-cs-validation.tfrecord-00001-of-00002.json.gz",
            "en/c4-train.00000-of-01024.json.gz",
        ],
    ),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def documents(text: Corpus | None) -> list[str]:
    assert text is not None
    return [
        document for block in blocks.blocks(text, 100) for document in blocks.read(text, block)[0]
    ]


def repository(folder: Path, files: list[str]) -> Path:
    """A data set's repository: a script of its name, and rows that say which file they are of."""
    folder.mkdir(parents=True)
    (folder / f"{folder.name}.py").write_text(SCRIPT)
    (folder / "README.md").write_text("---\nlicense: odc-by\n---\n")
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        rows = [
            {"text": f"{name} {row}", "timestamp": "2020-02-22T22:24:31Z", "url": "u"}
            for row in range(2)
        ]
        with gzip.open(folder / name, "wt") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_repository_with_a_script_is_read_by_its_files(name: str, tmp_path: Path) -> None:
    train, validation, others = LAYOUTS[name]
    folder = repository(tmp_path / name, [*train, *validation, *others])
    data = compose(
        [f"data={name}", f"data.hub={folder}", "facility=laptop"], ROOT / "hydra_conf"
    ).run.data
    assert documents(corpus.train_corpus(data)) == [
        f"{file} {row}" for file in train for row in (0, 1)
    ]
    held_out = documents(corpus.validation_corpus(data))
    assert held_out == [f"{file} {row}" for file in validation for row in (0, 1)]
    assert (data.max_documents, data.validation.max_documents) == (10_000_000, 12_000)


def hub(tmp_path: Path, folder: Path, **more: object) -> Data:
    return make_run(tmp_path, {"source": "hub", "hub": str(folder), **more}).data


def test_a_script_is_refused_with_a_way_out(tmp_path: Path) -> None:
    folder = repository(tmp_path / "scripted", ["train.json.gz"])
    with pytest.raises(UserError, match="scripts are no longer supported") as caught:
        corpus.train_corpus(hub(tmp_path, folder))
    assert "data.hub_files" in caught.value.hint and "refs/convert/parquet" in caught.value.hint
    data = hub(tmp_path, folder, hub_files={"train": "train.json.gz"})
    assert documents(corpus.train_corpus(data)) == ["train.json.gz 0", "train.json.gz 1"]


def test_files_that_are_not_named_or_not_there(tmp_path: Path) -> None:
    folder = repository(tmp_path / "scripted", ["train.json.gz"])
    data = hub(tmp_path, folder, hub_files={"train": ["train.json.gz"]}, hub_split="dev")
    with pytest.raises(UserError, match="names no files of the split 'dev'"):
        corpus.train_corpus(data)
    with pytest.raises(UserError, match="cannot be loaded"):
        corpus.train_corpus(hub(tmp_path, folder, hub_files={"train": ["none.json.gz"]}))
    with pytest.raises(UserError, match=r"unknown kind of file: train\.rar"):
        corpus.train_corpus(hub(tmp_path, folder, hub_files={"train": ["train.rar"]}))


def test_names_of_the_hub_become_addresses_of_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked, splits = [], []

    class Builder:
        config = SimpleNamespace(data_files=None)

        def __init__(self, kind: str, config: object = None, **more: object) -> None:
            asked.append((kind, config, more))

        def download_and_prepare(self) -> None:
            pass

        def as_dataset(self, split: str) -> object:
            splits.append(split)
            return datasets.Dataset.from_dict({"text": ["a"]})

    monkeypatch.setattr(datasets, "load_dataset_builder", Builder)
    parts = {"source": "hub", "hub": "a/b"}
    files = {"train": ["x/*.parquet"]}
    for more in (
        {"hub_files": files},
        {"hub_files": files, "hub_revision": "refs/convert/parquet"},
        {"hub_revision": "v2", "hub_config": "tiny"},
    ):
        corpus.train_corpus(make_run(tmp_path, parts | more).data)
    addresses = [
        "hf://datasets/a/b/x/*.parquet",
        "hf://datasets/a/b@refs%2Fconvert%2Fparquet/x/*.parquet",
    ]
    for (kind, _, more), address in zip(asked, addresses, strict=False):
        assert kind == "parquet" and more["data_files"] == {"train": [address]}
    assert asked[2] == ("a/b", "tiny", {"revision": "v2"}) and splits == ["train"] * 3


def test_the_same_documents_as_datasets_shuffle_and_select(tmp_path: Path) -> None:
    rows = {
        split: datasets.Dataset.from_dict({"text": [f"{split} {n}" for n in range(size)]})
        for split, size in (("train", 3000), ("test", 1500))
    }
    datasets.DatasetDict(rows).save_to_disk(str(tmp_path / "yelp"))
    line = ["data=yelp_review_full", f"data.hub={tmp_path / 'yelp'}", "facility=laptop"]
    data = compose(line, ROOT / "hydra_conf").run.data
    for split, text in (
        ("train", corpus.train_corpus(data)),
        ("test", corpus.validation_corpus(data)),
    ):
        expected = rows[split].shuffle(seed=42).select(range(1024))["text"]
        assert documents(text) == list(expected)


@pytest.fixture
def asked() -> list[str]:
    """Who has asked that server."""
    return []


@pytest.fixture
def address_of(asked: list[str]) -> Iterator[Callable[[Path], str]]:
    """Where a server of this machine has a file."""

    class Handler(SimpleHTTPRequestHandler):
        def handle(self) -> None:
            asked.append(str(self.client_address))
            super().handle()

    handler = partial(Handler, directory="/")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield lambda path: f"http://127.0.0.1:{server.server_port}{path}"
        server.shutdown()


def test_a_data_set_reads_no_file_that_is_not_its_own(
    tmp_path: Path, address_of: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its README may name any path of the machine that reads it, or an address of its network."""
    private, folder = tmp_path / "diary.txt", tmp_path / "owner"
    private.write_text("mine\n")
    folder.mkdir()
    monkeypatch.chdir(folder)  # an address is no path below it
    for path in (private, "../diary.txt", address_of(private)):
        entry = f"configs:\n- config_name: default\n  data_files: {path}\n"
        (folder / "README.md").write_text(f"---\n{entry}---\n")
        words = ["data=hub", f"data.hub={folder}", "facility=laptop"]
        with pytest.raises(UserError, match=r"diary\.txt, which is no file of"):
            load(compose(words).run.data, "train", "data.hub_split")
    (folder / "README.md").write_text("")
    (folder / "rows.txt").write_text("ours\n")
    assert len(load(compose(words).run.data, "train", "data.hub_split")) == 1


@pytest.mark.parametrize("card", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize("archive", ["", "zip://rows.txt::"])
def test_an_address_of_a_data_set_is_not_asked(
    tmp_path: Path, asked: list[str], address_of: Callable[[Path], str], card: str, archive: str
) -> None:
    (tmp_path / "rows.txt").write_text("mine\n")
    address = archive + address_of(tmp_path / "rows.txt")
    entry = f"configs:\n- config_name: default\n  data_files: {address}\n"
    (tmp_path / card).write_text(f"---\n{entry}---\n" if card == "README.md" else entry)
    data = compose(["data=hub", f"data.hub={tmp_path}", "facility=laptop"]).run.data
    with pytest.raises(UserError, match=r"rows\.txt, which is no file of that data set"):
        load(data, "train", "data.hub_split")
    assert asked == []


def test_of_two_configurations_of_one_name_the_last_is_looked_at(
    tmp_path: Path, asked: list[str], address_of: Callable[[Path], str]
) -> None:
    (tmp_path / "rows.txt").write_text("ours\n")
    files = {"a": "rows.txt", "b": "rows.txt", "A": address_of(tmp_path / "rows.txt")}
    entry = "".join(
        f"- config_name: {name.lower()}\n  data_files: {file}\n" for name, file in files.items()
    )
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{entry}---\n")
    words = ["data=hub", f"data.hub={tmp_path}", "data.hub_config=b", "facility=laptop"]
    with pytest.raises(UserError, match="which is no file of that data set"):
        load(compose(words).run.data, "train", "data.hub_split")
    assert asked == []


def test_an_address_around_a_file_is_not_asked(
    tmp_path: Path, asked: list[str], address_of: Callable[[Path], str]
) -> None:
    (tmp_path / "rows.txt").write_text("ours\n")
    files = f"{address_of(tmp_path)}/x::{tmp_path}/rows.txt"
    entry = f"configs:\n- config_name: default\n  data_files: {files}\n"
    (tmp_path / "README.md").write_text(f"---\n{entry}---\n")
    data = compose(["data=hub", f"data.hub={tmp_path}", "facility=laptop"]).run.data
    with pytest.raises(UserError, match="which is no file of that data set"):
        load(data, "train", "data.hub_split")
    assert asked == []


def test_what_names_no_file_is_no_address(tmp_path: Path) -> None:
    """A separator of columns, a description, and a configuration that is not asked for."""
    (tmp_path / "rows.csv").write_text("text::other\nours::x\n")
    about = "  sep: '::'\n  description: see https://elsewhere.org\n"
    other = "- config_name: other\n  data_files: https://elsewhere.org/rows.csv\n"
    entry = f"configs:\n- config_name: own\n  data_files: rows.csv\n{about}{other}"
    (tmp_path / "README.md").write_text(f"---\n{entry}---\n")
    words = ["data=hub", f"data.hub={tmp_path}", "data.hub_config=own", "facility=laptop"]
    data = compose(words).run.data
    assert load(data, "train", "data.hub_split")["text"] == ["ours"]


@pytest.mark.parametrize("name", ["text", "json"])
def test_what_reads_files_is_no_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Alone it would be all files of the working folder: over ssh, the home folder."""
    (tmp_path / "mail").mkdir()
    (tmp_path / "mail" / "letter.txt").write_text("mine\n")
    (tmp_path / "mail" / "letter.json").write_text('{"text": "mine"}\n')
    data = compose(["data=hub", f"data.hub={name}", "facility=laptop"]).run.data
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="which is no file of that data set"):
        load(data, "train", "data.hub_split")


def test_a_folder_that_is_linked_is_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "scratch" / "sub").mkdir(parents=True)
    (tmp_path / "scratch" / "sub" / "train.jsonl").write_text('{"text": "ours"}\n')
    (tmp_path / "link").symlink_to(tmp_path / "scratch")
    data = compose(["data=hub", f"data.hub={tmp_path / 'link'}", "facility=laptop"]).run.data
    assert len(load(data, "train", "data.hub_split")) == 1


@pytest.mark.parametrize("is_dict", [True, False])
def test_a_saved_data_set_has_no_files_of_others(tmp_path: Path, is_dict: bool) -> None:
    for name, text in (("mine", "private"), ("theirs", "x")):
        rows = datasets.Dataset.from_dict({"text": [text]})
        (datasets.DatasetDict({"train": rows}) if is_dict else rows).save_to_disk(tmp_path / name)
    part = Path("train") if is_dict else Path()
    state = tmp_path / "theirs" / part / "state.json"
    [private] = (tmp_path / "mine" / part).glob("*.arrow")
    content = json.loads(state.read_text()) | {"_data_files": [{"filename": str(private)}]}
    state.write_text(json.dumps(content))
    data = compose(["data=hub", f"data.hub={tmp_path / 'theirs'}", "facility=laptop"]).run.data
    with pytest.raises(UserError, match="which is no file of that data set"):
        load(data, "train", "data.hub_split")


def test_rows_that_hold_a_time_have_a_fingerprint() -> None:
    found = set()
    for year in (2020, 2021, 2021):
        message = {"role": "user", "content": "x", "at": datetime(year, 2, 22, tzinfo=UTC)}
        rows = datasets.Dataset.from_list([{"messages": [message]}])
        found.add(fingerprint(rows, ["messages"]))
    assert len(found) == 2


def test_answers_and_labels_count_for_what_a_data_set_is(tmp_path: Path) -> None:
    found = set()
    for number, worse in enumerate(("no", "never", "never")):
        rows = {"prompt": ["a?"] * 3, "chosen": ["yes"] * 3, "rejected": [worse] * 3}
        folder = tmp_path / str(number)
        datasets.Dataset.from_dict(rows).save_to_disk(folder)
        words = ["data=hub", "data.format=preference", f"data.hub={folder}", "task=preference"]
        words += ["tokenizer.chat_template=chatml"]
        words += ["tokenizer.add_tokens=['<|im_start|>','<|im_end|>']"]
        found.add(corpus.train_corpus(compose([*words, "facility=laptop"]).run.data).fingerprint)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("trained", "held_out", "meet"),
    [
        ("train", "train[:1%]", True),
        ("train[1%:]", "train[:1%]", False),
        ("train[:60%]", "train[40%:]", True),
        ("train+validation", "validation", True),
        ("train[:50%]+validation[:10]", "train[50%:]+validation[10:]", False),
        ("train", "validation", False),
    ],
)
def test_slices_and_sums_of_splits_are_held_out_too(
    trained: str, held_out: str, meet: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for split in ("train", "validation"):
        rows = datasets.Dataset.from_dict({"text": [f"{split} {n}" for n in range(100)]})
        rows.to_parquet(folder / f"{split}.parquet")
    words = [f"data.hub={folder}", f"data.hub_split='{trained}'", "data.validation.fraction=null"]
    words += [f"data.validation.split='{held_out}'", "facility=laptop"]
    data = compose(["data=hub", *words]).run.data
    validation = corpus.validation_corpus(data)
    assert validation is not None
    if not meet:
        corpus.refuse_overlap(corpus.train_corpus(data), validation)
        return
    with pytest.raises(UserError, match="are trained on too"):
        corpus.refuse_overlap(corpus.train_corpus(data), validation)


def test_a_set_saved_without_splits_holds_none_out(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path / "set")
    words = [f"data.hub={tmp_path / 'set'}", "data.validation.fraction=null"]
    words += ["data.validation.split=validation", "facility=laptop"]
    with pytest.raises(UserError, match="was saved as one data set"):
        corpus.validation_corpus(compose(["data=hub", *words]).run.data)


def test_a_run_that_has_steps_goes_on_with_the_tokens_of_an_older_version(tmp_path: Path) -> None:
    """Which knew a data set by its first column alone."""
    rows = {"prompt": [f"{n}?" for n in range(40)], "completion": [f"{n}." for n in range(40)]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "set")
    words = ["data=chat_hub", f"data.hub={tmp_path / 'set'}", "facility=laptop", "name=x"]
    words += [f"folders.{name}={tmp_path / name}" for name in ("runs", "prepared")]
    words += ["tokenizer.chat_template=chatml", "data.validation.fraction=0.2"]
    words += ["tokenizer.add_tokens=['<|im_start|>','<|im_end|>']", "data.workers=1"]
    run = compose([*words, "tokenizer.vocabulary_tokens=300"]).run
    folder = prepare(run, print)
    text = corpus.train_corpus(run.data)
    assert text.older_fingerprint not in (None, text.fingerprint)
    for path in (shards.plan_file(folder), shards.manifest_file(folder)):
        path.write_text(path.read_text().replace(text.fingerprint, str(text.older_fingerprint)))
    before = shards.manifest_file(folder).read_text()
    progress = {"texts": [shards.text_digest({"train+validation": str(text.older_fingerprint)})]}
    whole = run_dir.checkpoint(run_dir.folder(run), 3) / "manifest.json"
    run_dir.write_whole(whole, json.dumps({"progress": progress}))
    prepare(run, print)
    assert shards.manifest_file(folder).read_text() == before
    prepare(run.model_copy(update={"name": "new"}), print)
    assert text.fingerprint in shards.manifest_file(folder).read_text()
