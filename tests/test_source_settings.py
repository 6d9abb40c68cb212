"""Settings of several sources: what each takes from the rest, and mistakes in two lines."""

from pathlib import Path
from typing import Any

import pytest
from small_run import settings

from atoll import run_dir
from atoll.config.binds import own_folders
from atoll.config.paths import with_absolute_paths
from atoll.errors import UserError
from atoll.settings import Run, checked, dumped

A = {"name": "a", "files": "a.txt"}
B = {"name": "b", "files": "b.txt", "weight": 2}


def mixed(sources: list[dict[str, Any]], **changes: Any) -> Run:
    return settings(Path.cwd(), 2, data__files=[], data__sources=sources, **changes)


def test_a_source_takes_what_it_leaves_unset_from_data() -> None:
    hub = {"name": "c", "hub": "x/y", "hub_config": "it", "template": "q: {text}", "format": "text"}
    run = mixed([A, B | {"document": "file"}, hub], data__hub_split="all")
    a, b, c = run.data.each
    assert (a.source, a.files, a.document, a.hub_split) == ("files", ["a.txt"], "line", "train")
    assert (b.document, b.validation) == ("file", run.data.validation)
    assert (c.source, c.hub, c.hub_config, c.hub_split) == ("hub", "x/y", "it", "all")
    assert c.template == "q: {text}" and c.sequence_tokens == run.data.sequence_tokens
    assert checked(dumped(run)) == run


def test_a_curriculum_gives_every_source_its_weight_at_each_change() -> None:
    run = mixed(
        [A | {"weight": {0: 1, 1000: 0.2}}, B | {"weight": {0: 0, 500: 3}}, A | {"name": "c"}]
    )
    assert run.data.curriculum == [(0, [1, 0, 1]), (500, [1, 3, 1]), (1000, [0.2, 3, 1])]
    assert checked(dumped(run)) == run


def test_paths_of_sources_hold_wherever_a_job_runs(tmp_path: Path) -> None:
    own = {"validation": {"files": ["held/c.txt"]}, "files": ["c.txt"]}
    run = mixed([A, B | own, {"name": "p", "source": "python_stdlib", "files": ["email/*"]}])
    run = with_absolute_paths(run, tmp_path, tmp_path, tmp_path)
    a, b, p = run.data.each
    assert a.files == [str(tmp_path / "a.txt")] and p.files == ["email/*"]
    assert b.validation.files == [str(tmp_path / "held" / "c.txt")]
    assert {tmp_path, tmp_path / "held"} <= set(own_folders(run))


def test_runs_on_one_text_keep_their_prepared_folder() -> None:
    # fixed once and for all: another digest would make all tokens again
    values = dumped(settings(Path("/"), 2)) | {"seed": 0}
    values["data"] |= {"files": ["a.txt"]}
    assert run_dir.prepared_digest(checked(values)) == "26839bbb88"
    del values["data"]["sources"]
    assert run_dir.prepared_digest(checked(values)) == "26839bbb88"


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        ([A | {"weight": -1}], "data.sources: a has the weight -1"),
        ([A | {"weight": {0: 1, 5: -2}}], "data.sources: a has the weight -2"),
        ([A | {"weight": float("nan")}], "data.sources: a has the weight nan"),
        ([A | {"weight": 0}, B | {"weight": 0}], "the weights of a, b sum to nothing"),
        ([A | {"weight": {0: 1, 7: 0}}], "from step 7 on the weights of a sum to nothing"),
        ([A, B, A], "2 sources have the name a"),
        ([A | {"weight": {5: 1}}], "the curriculum of a begins with step 5"),
        ([A | {"weight": {}}], "the curriculum of a is empty"),
        ([A | {"template": "no place"}], "source a: data.template holds no {text}"),
        ([A, B | {"format": "preference"}], "some hold pairs of answers and some do not"),
        ([A, B | {"wieght": 1}], "unknown setting: data.sources.1.wieght"),
        ([A, {"weight": 1}], "setting missing: data.sources.1.name"),
    ],
)
def test_a_mistake_is_two_lines_and_names_the_source(
    sources: list[dict[str, Any]], found: str
) -> None:
    with pytest.raises(UserError) as error:
        mixed(sources)
    assert found in error.value.found and "\n" not in error.value.found and error.value.hint


@pytest.mark.parametrize(
    "changes",
    [
        {"training__epochs": 2, "training__steps": None},
        {"evaluation__every_epochs": 1},
        {"data__files": ["c.txt"]},
        {"data__hub": "a/b"},
    ],
)
def test_what_is_of_one_text_is_refused_beside_sources(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"data\.sources"):
        settings(Path.cwd(), 2, **({"data__files": [], "data__sources": [A, B]} | changes))
