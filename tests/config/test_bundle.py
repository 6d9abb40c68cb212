"""A bundle gives its model and tokens to the run it was made for, and its tokens to others."""

import json
from pathlib import Path

import pytest

from atoll import run_dir
from atoll.config.bundle import made_for
from atoll.errors import UserError

MODEL = ["model=from_path", "model.source=hub/model", "model.revision=abc"]


TALKS = "{name: own, files: [talks.jsonl]}"  # a source

BOOK = "{name: book, files: [book.txt]}"
TAIL = "data.validation={fraction: null, tail: 0.05}"
SHARE = "data.validation={fraction: 0.05, tail: null}"


def words(*more: str) -> list[str]:
    return ["facility=laptop", "data=python_stdlib", *MODEL, *more]


@pytest.fixture
def bundle(here: Path, composed) -> Path:
    """As `atoll prepare` leaves it, but for the tokens themselves."""
    folder, run = here / "bundle", composed(*words())
    tokenizer = folder / "tokens" / "tokenizer"
    for path in (tokenizer, folder / "model"):
        path.mkdir(parents=True)
        (path / "tokenizer.json").write_text("{}")
    run_dir.write_whole(run_dir.bundle_request(folder), run.as_yaml())
    manifest = {"made_for": made_for(run.run), "files": {}}
    run_dir.write_whole(run_dir.bundle_manifest(folder), json.dumps(manifest))
    return folder


@pytest.fixture
def trained(here: Path) -> Path:
    """A model that came of the bundle's: another folder, the same tokenizer."""
    folder = here / "trained"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_the_model_is_the_bundles(bundle: Path, composed) -> None:
    run = composed(*words(f"folders.bundle={bundle}")).run
    assert run.model.source == str(bundle / "model") and run.model.revision is None


def test_another_model_learns_from_the_bundles_tokens(
    bundle: Path, trained: Path, composed
) -> None:
    """As in a campaign's round: the model is the coordinator's, the text the facility's."""
    own = [f"model.source={trained}", "model.revision=null", f"tokenizer.path={trained}"]
    run = composed(*words(f"folders.bundle={bundle}", *own)).run
    assert run.model.source == str(trained)
    assert run_dir.prepared(run) == bundle / "tokens"


def test_another_models_tokens_must_mean_the_same(bundle: Path, trained: Path, composed) -> None:
    (trained / "tokenizer.json").write_text('{"other": 1}')
    with pytest.raises(UserError, match=r"tokens of the bundle .* another tokenizer than"):
        composed(*words(f"folders.bundle={bundle}", f"model.source={trained}"))


@pytest.mark.parametrize("change", ["data.document=line", "seed=1", "model.revision=other"])
def test_a_bundle_of_other_settings_is_refused(
    bundle: Path, trained: Path, composed, change: str
) -> None:
    with pytest.raises(UserError, match="was made with") as refused:
        composed(*words(f"folders.bundle={bundle}", change))
    assert ("here too, or make one" in refused.value.hint) == change.startswith("model")
    if not change.startswith("model"):
        with pytest.raises(UserError, match="was made with data="):
            composed(*words(f"folders.bundle={bundle}", f"model.source={trained}", change))


@pytest.mark.parametrize(
    ("files", "change"),
    [
        (["data=text_files", "data.files=book.txt"], ""),
        (["data=chat_files", "data.files=talks.jsonl"], ""),
        (["data=chat_files", "data.files=talks.jsonl"], "data.files=others.jsonl"),
        (["data=text_files", "data.files=book.txt"], "data.validation.fraction=0.3"),
        (["data=chat_files", "data.files=talks.jsonl"], "seed=1"),
        (["data=hub", "data.hub=rows"], ""),
        (["data=hub", "data.hub=rows"], "data.hub=other/rows"),
        (["data=hub", "data.hub=rows/chat"], ""),
        (["data=hub", "data.hub=rows/chat"], "data.hub=other/chat"),
        (["data=hub", "data.hub=org/rows"], "data.hub=other/rows"),
        (["data=python_stdlib", "data.files=[asyncio/*]"], ""),
        (["data=python_stdlib", "data.files=[asyncio/*]"], "data.files=[email/*]"),
        (["data=python_stdlib", "data.files=[lib/asyncio]"], "data.files=[asyncio]"),
        (["data=text_files", "data.files=[code/*.txt]"], ""),
        (["data=text_files", "data.files=[code/*/*.txt]"], ""),
        (["data=text_files", "data.files=[code/*.txt]"], "data.files=[wiki/*.txt]"),
        (["data=text_files", "data.files=[code/*/*.txt]"], "data.files=[wiki/*/*.txt]"),
        (["data=text_files", "data.files=[book.txt,more.txt]"], ""),
        (["data=text_files", "data.files=[book.txt,more.txt]"], TAIL),
        (["data=text_files", "data.files=[code/*.txt]"], TAIL),
        (["data=text_files", "data.files=[code/*.txt]", TAIL], SHARE),
        (["data=mixture", f"data.sources=[{{name: web, hub: a/b}},{TALKS}]"], ""),
        (["data=mixture", f"data.sources=[{BOOK},{TALKS}]"], ""),
        (["data=mixture", f"data.sources=[{BOOK},{TALKS}]"], "data.validation.fraction=0.3"),
    ],
)
def test_the_same_files_lie_in_other_folders_at_a_facility(
    here: Path, composed, tmp_path: Path, monkeypatch, files: list[str], change: str
) -> None:
    """Or are not there at all: the bundle has their tokens."""
    home, away = tmp_path / "home", tmp_path / "away"
    for folder in (home, away):
        folder.mkdir()
    for name in ("book.txt", "talks.jsonl"):
        (home / name).touch()
    (home / "rows" / "chat").mkdir(parents=True)
    monkeypatch.chdir(home)
    line = ["facility=laptop", *MODEL, *files]
    made = composed(*line)
    run_dir.write_whole(run_dir.bundle_request(away / "bundle"), made.as_yaml())
    manifest = {"made_for": made_for(made.run), "files": {}}
    run_dir.write_whole(run_dir.bundle_manifest(away / "bundle"), json.dumps(manifest))
    monkeypatch.chdir(away)
    words = [*line, f"folders.bundle={away / 'bundle'}", *([change] if change else [])]
    if change:
        with pytest.raises(UserError, match="was made with data="):
            composed(*words)
    else:
        assert composed(*words).run.data == made.run.data


@pytest.mark.parametrize("text", [None, "", "data:", "data: {name: x}\ntokenizer: [", "\x00"])
def test_a_bundle_without_its_request_is_not_whole(bundle: Path, composed, text) -> None:
    file = run_dir.bundle_request(bundle)
    file.unlink()
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=f"the bundle {bundle} is not whole: {file} ") as refused:
        composed(*words(f"folders.bundle={bundle}"))
    assert "copy the bundle again" in refused.value.hint


def test_a_task_that_is_not_in_the_bundle_is_refused(bundle: Path, composed) -> None:
    line = [*words(f"folders.bundle={bundle}"), "evaluation.tasks=[arc_easy]"]
    with pytest.raises(UserError, match=r"holds the data of no task, this run is .* arc_easy"):
        composed(*line)
    path = run_dir.bundle_manifest(bundle)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tasks": ["arc_easy"]}))
    assert composed(*line).run.evaluation.tasks == ["arc_easy"]


def test_tasks_of_ones_own_are_read_from_the_bundle(bundle: Path, composed) -> None:
    own = run_dir.own_tasks(run_dir.tasks_folder(bundle))
    own.mkdir(parents=True)
    path = run_dir.bundle_manifest(bundle)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tasks": ["mine"]}))
    tasks = ["evaluation.tasks=[mine]", "evaluation.tasks_folder=tasks"]
    run = composed(*words(f"folders.bundle={bundle}"), *tasks).run
    assert run.evaluation.tasks_folder == str(own)


def test_tasks_of_ones_own_need_no_folder_beside_the_bundle(bundle: Path, composed) -> None:
    own = run_dir.own_tasks(run_dir.tasks_folder(bundle))
    own.mkdir(parents=True)
    run = composed(*words(f"folders.bundle={bundle}")).run
    assert run.evaluation.tasks_folder == str(own)
