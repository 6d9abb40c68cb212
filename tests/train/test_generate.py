"""Texts from a checkpoint, an export and an adapter; many prompts from a file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families
import pytest
import small_run
import tiny
import torch
from chat_templates import TEMPLATES
from rank_pool import RankPool
from transformers import AutoConfig, AutoModelForCausalLM

from atoll import run_dir
from atoll.errors import UserError
from atoll.models import text_generator
from atoll.sharding.process_group import World
from atoll.train import checkpoint, generate, harness, run_scores, scores

SIZES = tiny.CONFIGS["llama"] | {"vocab_size": 300, "hidden_size": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("speaking")
    small_run.write_text(path)
    config = AutoConfig.for_model(**SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(path / "base")
    return path


@pytest.fixture(scope="module")
def plain(ranks: RankPool, folder: Path) -> Path:
    run = small_run.settings(folder, 2, name="plain", model__config=SIZES, export__dtype="float32")
    run_folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=2)
    return run_folder


@pytest.fixture(scope="module", params=["none", "nf4"])
def adapted(ranks: RankPool, folder: Path, request: pytest.FixtureRequest) -> Path:
    changes: dict[str, Any] = {
        "name": f"adapted-{request.param}",
        "model": {
            "name": "llama",
            "source": str(folder / "base"),
            "lora": {"rank": 4, "alpha": 8},
            "quantisation": request.param,
        },
        "tokenizer": {"vocabulary_tokens": 290, "path": str(small_tokenizer(folder))},
        "sharding": small_run.sharding("ddp"),
        "export": {"dtype": "float32"},
    }
    run = small_run.settings(folder, 2, **changes)
    run_folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=2)
    return run_folder


def small_tokenizer(folder: Path) -> Path:
    """The one that a run on the same text trains."""
    run = small_run.settings(folder, 1, sharding=small_run.sharding("single"), name="words")
    small_run.ready(run)
    return run_dir.prepared(run) / "tokenizer"


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert generate.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def test_a_checkpoint_speaks_like_the_export(
    plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = checkpoint.latest(plain)
    assert last is not None
    cold = ["--prompt", "the reef", "--temperature", "0.01"]
    assert said(capsys, last, *cold) == said(capsys, run_dir.export(plain), *cold)
    assert said(capsys, plain, *cold) == run_dir.sample_file(plain).read_text()


def test_a_checkpoint_speaks_like_the_export_where_files_have_more_than_parameters(
    ranks: RankPool,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """Apertus keeps the ends of its activations in buffers."""
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(True)  # memory that nothing was written to is NaN
    config = families.config_of("apertus") | {"vocab_size": 300}
    run = small_run.settings(folder, 1, name="more", model__config=config, export__dtype="float32")
    run_folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=1)
    last = checkpoint.latest(run_folder)
    assert last is not None
    cold = ["--prompt", "the reef", "--temperature", "0.01"]
    assert said(capsys, last, *cold) == said(capsys, run_dir.export(run_folder), *cold)


def test_an_export_that_is_an_adapter_alone_speaks(
    ranks: RankPool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, tokenizer = shutil.copytree(folder / "base", folder / "whole"), small_tokenizer(folder)
    shutil.copytree(tokenizer, base, dirs_exist_ok=True)
    model = {"name": "llama", "source": str(base), "lora": {"rank": 4, "alpha": 8}}
    words = {"vocabulary_tokens": 290, "path": str(tokenizer)}
    saved = {"dtype": "float32", "merged": False}
    run = small_run.settings(folder, 1, name="alone", model=model, tokenizer=words, export=saved)
    run_folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=1)
    last = checkpoint.latest(run_folder)
    assert last is not None
    cold = ["--prompt", "the reef", "--temperature", "0.01"]
    assert said(capsys, run_folder, *cold) == said(capsys, last, *cold)


def test_an_adapter_alone_that_learned_to_chat_has_its_template(
    ranks: RankPool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its base writes text alone: the template and the tokenizer are the run's own."""
    talk = [{"role": "user", "content": "the reef"}, {"role": "assistant", "content": "one wind"}]
    (folder / "talks.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 40)
    words = {"path": str(small_tokenizer(folder)), "chat_template": TEMPLATES["alpaca"]}
    run = small_run.settings(
        folder,
        1,
        name="chatting",
        model={"name": "llama", "source": str(folder / "base"), "lora": {"rank": 4, "alpha": 8}},
        tokenizer=words,
        data__files=[str(folder / "talks.jsonl")],
        data__format="chat",
        data__sequence_tokens=64,
        export={"merged": False},
    )
    run_folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=1)
    assert said(capsys, run_folder, "--temperature", "0.01").startswith("user: the reef")
    template = run_dir.export(run_folder) / "adapter" / "chat_template.jinja"
    assert template.read_text() == TEMPLATES["alpaca"]


def test_a_model_that_no_device_has_room_for_speaks_on_the_processors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(30, 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for free, kind in ((1000, "cpu"), (10**6, "cuda")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 10**6))
        assert text_generator._device_for(model).type == kind
    assert "the processors say it" in capsys.readouterr().err


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[[Any], Callable[[str], Any]]:
    """Scores of the small base model on a rank of the processors, by what the harness does."""
    world = World(0, 1, torch.device("cpu"))
    whole = shutil.copytree(folder / "base", folder / "scored", dirs_exist_ok=True)
    shutil.copytree(small_tokenizer(folder), whole, dirs_exist_ok=True)

    def of(harness_does: Any) -> Callable[[str], Any]:
        monkeypatch.setattr(harness, "figures_of", harness_does)
        monkeypatch.setattr(scores, "tasks_of", lambda *_: ())
        monkeypatch.setattr(run_scores, "write_export", lambda _, to: shutil.copytree(whole, to))
        beat = SimpleNamespace(at=lambda _: None)
        state: Any = SimpleNamespace(run=SimpleNamespace(evaluation=None), world=world)
        state.scored_tasks, state.run_folder, state.heartbeat = (), folder / "scoring", beat
        nothing: Any = None
        calls = {
            "run": lambda: run_scores.run_scores(state, 0),
            "evaluate": lambda: scores.scores_of(whole, nothing, world),
        }
        return lambda which: calls[which]()

    return of


@pytest.mark.parametrize("which", ["run", "evaluate"])
def test_a_rank_scores_on_its_own_device_whatever_seems_free(
    which: str, asked: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a training keeps for itself is not free, and this rank's all the same."""
    devices: list[str] = []

    def figures(model: Any, *_: Any) -> dict[str, dict[str, float]]:
        devices.append(model.device.type)
        return {"a": {"acc": 1.0}}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 10**6))
    assert asked(figures)(which) in ({"a/acc": 1.0}, {"a": {"acc": 1.0}})
    assert devices == ["cpu"] and "the processors say it" not in capsys.readouterr().err


def no_room(*_: Any, **__: Any) -> Any:
    raise torch.cuda.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 9 GiB."
    )


@pytest.mark.parametrize(
    ("which", "hint"),
    [("run", "evaluation.tasks=[]"), ("evaluate", "CUDA_VISIBLE_DEVICES= atoll")],
)
def test_scores_of_a_model_that_a_device_has_no_room_for_end_in_two_lines(
    which: str, hint: str, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = asked(no_room)
    monkeypatch.setattr(text_generator.TextGenerator, "__new__", no_room)
    with pytest.raises(UserError, match="no room on the device for ") as refused:
        call(which)
    assert refused.value.found.endswith("out of memory. Tried to allocate 20.00 GiB")
    assert hint in refused.value.hint


@pytest.mark.image
def test_an_adapter_speaks_like_the_merged_export(
    adapted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = small_run.losses(adapted)
    assert steps[6] < steps[1]
    cold = ["--prompt", "the reef", "--temperature", "0.01"]
    merged = said(capsys, run_dir.export(adapted), *cold)
    last = checkpoint.latest(adapted)
    assert last is not None
    if "nf4" not in adapted.name:  # an adapter beside wide weights is another model
        assert said(capsys, last, *cold) == merged
        assert said(capsys, run_dir.export(adapted) / "adapter", *cold).startswith("the reef")
    saved = checkpoint.load_progress(last)
    assert saved.step == 6
    import torch.distributed.checkpoint as dcp

    names = dcp.FileSystemReader(last).read_metadata().state_dict_metadata
    assert names and all(".lora_" in name for name in names), "adapters alone"


def test_prompts_come_from_a_file(plain: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    prompts.write_text("the reef\na wind\n\none lagoon\n")
    words = [str(plain), "--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "3"]
    assert generate.main(words) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["prompt"] for one in found] == ["the reef", "a wind", "one lagoon"]
    assert all(one["text"].startswith(one["prompt"]) for one in found)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--prompt", "the reef " * 80], r"the prompt has \d+ tokens, the model 64 positions"),
        (["--prompts", "/no/such/file"], "cannot read /no/such/file"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0"),
    ],
)
def test_mistakes(plain: Path, words: list[str], found: str) -> None:
    with pytest.raises(UserError, match=found):
        generate.main([str(plain), *words])


def test_a_folder_without_a_prompt(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lies in no run folder"):
        generate.main([str(tmp_path)])
