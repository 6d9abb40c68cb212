"""Whole runs: the same numbers on any number of ranks, resumed, exported; mistakes in two lines."""

import json
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import small_run
import tiny
import torch
from rank_pool import RankPool
from transformers import AutoModelForCausalLM, AutoTokenizer

from atoll import run_dir
from atoll.data.batch import Batch
from atoll.data.samples import open_samples
from atoll.errors import UserError
from atoll.report.results import summary_cells
from atoll.report.run import read
from atoll.settings import Run
from atoll.sharding.process_group import World
from atoll.train import checkpoint, generate, sampling
from atoll.train.loop import on_device
from atoll.train.train import train

TESTS = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_run.write_text(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two ranks that most tests compare with."""
    path = tmp_path_factory.mktemp("whole")
    small_run.write_text(path)
    return trained(ranks, small_run.settings(path, 2, name="whole"))


@pytest.fixture(scope="module")
def stopped(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, which fell over after its checkpoint of step 3."""
    path = tmp_path_factory.mktemp("stopped")
    small_run.write_text(path)
    run = small_run.settings(path, 2, name="stopped")
    run_folder = small_run.ready(run)
    ranks.run(stop_after, run, 3, world=2)
    assert checkpoint.latest(run_folder) == run_dir.checkpoint(run_folder, 3)
    return run_folder


def copied(run_folder: Path, run: Run) -> Path:
    """A run's folder, as the folder of another."""
    copy = run_dir.folder(run)
    shutil.copytree(run_folder, copy)
    return copy


def weight_files(run_folder: Path) -> list[Path]:
    return sorted(run_dir.export(run_folder).glob("*.safetensors"))


def trained(ranks: RankPool, run: Run) -> Path:
    run_folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=run.world_size)
    return run_folder


def plain_loss(run: Run, export: Path) -> float:
    """The held-out loss under transformers alone: each piece of a document by itself."""
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    samples = open_samples(run.data, run_dir.prepared(run), "validation")
    total, count = 0.0, 0
    for sample in range(len(samples)):
        batch = samples.batch(torch.tensor([sample]).numpy())
        pieces = batch.tokens_BT.flatten().split(batch.segment_lengths)
        labels = batch.labels_BT.flatten().split(batch.segment_lengths)
        for tokens, label in zip(pieces, labels, strict=True):
            targets = int((label != -100).sum())
            if targets:
                with torch.no_grad():
                    loss = model.eval()(input_ids=tokens[None], labels=tokens[None]).loss
                total, count = total + float(loss) * targets, count + targets
    return total / count


@pytest.mark.image
@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_export_has_the_loss_of_the_trainer(
    ranks: RankPool, folder: Path, architecture: str
) -> None:
    config = tiny.CONFIGS[architecture] | {"vocab_size": 300}
    run = small_run.settings(folder, 2, model__config=config, export__dtype="float32")
    run_folder = trained(ranks, run)
    before, after = small_run.records(run_folder, "evaluation")
    assert after["loss"] < before["loss"] - 0.1
    assert after["perplexity"] == pytest.approx(math.exp(after["loss"]))
    assert plain_loss(run, run_dir.export(run_folder)) == pytest.approx(after["loss"], abs=1e-5)


def test_the_average_of_the_weights_is_exported_beside_them(
    ranks: RankPool, folder: Path, whole: Path
) -> None:
    changes: dict[str, Any] = {"optimizer__ema_decay": 0.7, "export__dtype": "float32"}
    run = small_run.settings(folder, 2, name="averaged", **changes)
    straight = trained(ranks, run)
    assert small_run.losses(straight) == small_run.losses(whole)
    result = json.loads(run_dir.result_file(straight).read_text())
    average = run_dir.averaged_export(straight)
    assert abs(result["ema"]["loss"] - result["loss"]) > 1e-4
    assert plain_loss(run, average) == pytest.approx(result["ema"]["loss"], abs=1e-5)
    again = small_run.settings(folder, 2, name="again", **changes)
    stopped = small_run.ready(again)
    ranks.run(stop_after, again, 3, world=2)
    ranks.run(small_run.train_here, again, world=2)
    for file in sorted(average.glob("*.safetensors")):
        assert file.read_bytes() == (run_dir.averaged_export(stopped) / file.name).read_bytes()


@pytest.mark.parametrize("sharding", ["full_shard", "shard_grad_op"])
def test_what_an_evaluation_gathered_is_in_no_export(
    ranks: RankPool, folder: Path, sharding: str
) -> None:
    """FSDP keeps weights gathered behind a pass without a backward one: in bf16, not averaged."""
    spread = {"sharding": small_run.sharding(sharding), "export__dtype": "float32"}
    alone: dict[str, Any] = spread | {"sharding": small_run.sharding("single")}
    narrow = spread | {"precision__compute": "bf16"}
    untrained: dict[str, Any] = {"training__steps": 0, "export__untrained": True}
    for name, changes in (("first", untrained), ("mean", {"optimizer__ema_decay": 0.7})):
        one = trained(ranks, small_run.settings(folder, 1, name=f"{name}-1", **alone, **changes))
        if name == "mean":
            two = small_run.settings(folder, 2, name=f"{name}-2", **spread, **changes)
            folders = [run_dir.averaged_export(run) for run in (one, trained(ranks, two))]
        else:
            two = small_run.settings(folder, 2, name=f"{name}-2", **narrow, **changes)
            folders = [run_dir.export(run) for run in (one, trained(ranks, two))]
        expected, found = (
            AutoModelForCausalLM.from_pretrained(export).state_dict() for export in folders
        )
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-5, msg=key)


def test_export_is_a_hugging_face_folder(ranks: RankPool, folder: Path) -> None:
    run = small_run.settings(folder, 2, model__config=tiny.CONFIGS["gpt2"] | {"vocab_size": 300})
    run_folder = trained(ranks, run)
    export = run_dir.export(run_folder)
    names = {path.name for path in export.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= names
    assert len([n for n in names if n.endswith(".safetensors")]) >= 2, "each rank wrote its files"
    mask = os.umask(0)
    os.umask(mask)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in export.iterdir()}
    assert modes == {0o666 & ~mask}
    config = json.loads((export / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"] and config["dtype"] == "bfloat16"
    assert "atoll" not in (export / "config.json").read_text()
    model = AutoModelForCausalLM.from_pretrained(export)
    assert model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(export)("the reef").input_ids


@pytest.mark.image
def test_generate_samples_from_the_export(
    ranks: RankPool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = trained(
        ranks, small_run.settings(folder, 1, sharding=small_run.sharding("single"))
    )
    assert generate.main([str(run_folder)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("the reef") and len(text) > len("the reef\n")
    assert run_dir.sample_file(run_folder).read_text() == text
    assert generate.main([str(run_folder)]) == 0
    assert capsys.readouterr().out == text, "the seed decides"


def test_generate_before_the_export_is_a_mistake(folder: Path) -> None:
    run_folder = small_run.ready(small_run.settings(folder, 1))
    with pytest.raises(UserError, match="no exported model"):
        generate.main([str(run_folder)])


SHAPES = [
    ("ddp", 2, 2, {}),
    ("full_shard", 4, 1, {}),
    ("hybrid_shard", 4, 2, {}),
    ("full_shard", 2, 4, {"training__activation_checkpointing": "full"}),
]


def test_the_same_losses_on_any_number_of_ranks(ranks: RankPool, folder: Path) -> None:
    alone = small_run.settings(
        folder,
        1,
        name="alone",
        sharding=small_run.sharding("single"),
        training__microbatch_samples=8,
    )
    reference = small_run.losses(trained(ranks, alone))
    assert len(reference) == 6 and reference[6] < reference[1]
    for number, (strategy, size, microbatch, more) in enumerate(SHAPES):
        run = small_run.settings(
            folder,
            size,
            name=f"shape{number}",
            sharding=small_run.sharding(strategy),
            training__microbatch_samples=microbatch,
            **more,
        )
        got = small_run.losses(trained(ranks, run))
        assert got == pytest.approx(reference, abs=1e-4), (strategy, size)


def stop_after(world: World, run: Run, step: int) -> None:
    """Train, and fall over once the checkpoint of `step` is visible."""
    original = checkpoint.start_save

    def start(run_folder: Path, state: Any, progress: Any, *more: Any, **named: Any) -> Any:
        if progress.step > step:
            raise RuntimeError("stopped")
        return original(run_folder, state, progress, *more, **named)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="stopped"):
        patch.setattr(checkpoint, "start_save", start)
        small_run.train_here(world, run)


@pytest.mark.parametrize("changes", [{}, {"optimizer__name": "adamw_8bit"}, {"dropout": 0.1}])
def test_a_resumed_run_is_bit_exact(ranks: RankPool, folder: Path, changes: dict[str, Any]) -> None:
    changes = dict(changes)
    if dropout := changes.pop("dropout", None):
        dropped = {"resid_pdrop": dropout, "attn_pdrop": dropout, "vocab_size": 300}
        changes["model__config"] = tiny.CONFIGS["gpt2"] | dropped
    whole = trained(ranks, small_run.settings(folder, 2, name="whole", **changes))
    run = small_run.settings(folder, 2, name="stopped", **changes)
    stopped = small_run.ready(run)
    ranks.run(stop_after, run, 3, world=2)
    assert checkpoint.latest(stopped) == run_dir.checkpoint(stopped, 3)
    ranks.run(small_run.train_here, run, world=2)
    assert small_run.losses(stopped) == small_run.losses(whole)
    assert run_dir.result_file(stopped).read_text() == run_dir.result_file(whole).read_text()
    totals = [small_run.records(f, "train")[-1]["tokens"] for f in (stopped, whole)]
    assert totals[0] == totals[1]


@pytest.mark.parametrize("size", [1, 4])
def test_resumes_on_another_number_of_ranks(
    ranks: RankPool, folder: Path, whole: Path, stopped: Path, size: int
) -> None:
    again = small_run.settings(folder, size, name="moved")
    moved = copied(stopped, again)
    ranks.run(small_run.train_here, again, world=size)
    assert small_run.losses(moved) == pytest.approx(small_run.losses(whole), abs=1e-4)


def test_eight_bit_state_does_not_move_to_other_ranks(ranks: RankPool, folder: Path) -> None:
    run = small_run.settings(folder, 2, optimizer__name="adamw_8bit")
    small_run.ready(run)
    ranks.run(stop_after, run, 3, world=2)
    again = small_run.settings(folder, 4, optimizer__name="adamw_8bit")
    answers = ranks.run(mistake, again, world=4)
    assert all("saved by 2 ranks, this start has 4" in answer for answer in answers)


def mistake(world: World, run: Run) -> str:
    with pytest.raises(UserError) as error:
        small_run.train_here(world, run)
    return str(error.value)


def test_a_finished_run_started_again_changes_nothing(
    ranks: RankPool, folder: Path, whole: Path
) -> None:
    run = small_run.settings(folder, 2)
    run_folder = copied(whole, run)
    before = {p: p.read_bytes() for p in run_folder.rglob("*") if p.is_file()}
    ranks.run(small_run.train_here, run, world=2)
    assert {p: p.read_bytes() for p in run_folder.rglob("*") if p.is_file()} == before


def test_a_run_goes_on_when_steps_are_added(ranks: RankPool, folder: Path, whole: Path) -> None:
    copied(whole, small_run.settings(folder, 2))
    more = small_run.settings(folder, 2, training__steps=8)
    before = [file.read_bytes() for file in weight_files(small_run.ready(more))]
    ranks.run(stop_after, more, 6, world=2)
    assert not run_dir.result_file(run_dir.folder(more)).exists(), "it is not finished any more"
    run_folder = trained(ranks, more)
    assert sorted(small_run.losses(run_folder)) == list(range(1, 9))
    starts = small_run.records(run_folder, "start")
    assert [(start["step"], start["steps"]) for start in starts] == [(0, 6), (6, 8)]
    assert summary_cells(read(run_folder))["steps"] == "8 of 8"
    assert json.loads(run_dir.result_file(run_folder).read_text())["steps"] == 8
    assert [file.read_bytes() for file in weight_files(run_folder)] != before


def test_a_run_that_holds_its_peak_is_cooled_down_by_another_one(
    ranks: RankPool, folder: Path
) -> None:
    """The branch has the losses of one run that did both."""
    held = {"optimizer__warmup_steps": 1, "optimizer__decay": "wsd"}
    both = small_run.settings(
        folder, 2, name="both", training__steps=6, optimizer__cooldown_steps=3, **held
    )
    trunk = small_run.settings(
        folder, 2, name="trunk", training__steps=4, optimizer__cooldown_steps=1, **held
    )
    origin = run_dir.checkpoint(trained(ranks, trunk), 3)
    branch = small_run.settings(
        folder,
        2,
        name="branch",
        training__steps=6,
        optimizer__cooldown_steps=3,
        checkpoint__initial_load_path=origin,
        **held,
    )
    small_run.ready(branch)
    ranks.run(stop_after, branch, 5, world=2)
    losses = small_run.losses(trained(ranks, branch))  # its own checkpoint comes first by now
    assert losses == {step: small_run.losses(trained(ranks, both))[step] for step in (4, 5, 6)}
    [start] = small_run.records(run_dir.folder(branch), "start")
    assert (start["step"], start["steps"]) == (3, 6)
    assert "6 of 6" in summary_cells(read(run_dir.folder(branch)))["steps"]
    lost = branch.checkpoint.model_copy(update={"initial_load_path": origin / "step-00000009"})
    lost_run = branch.model_copy(update={"name": "lost", "checkpoint": lost})
    small_run.ready(lost_run)
    answers = ranks.run(mistake, lost_run, world=2)
    assert all("is no complete checkpoint" in answer for answer in answers)


def test_runs_that_hand_on_their_moments_and_place_take_the_steps_of_one(
    ranks: RankPool, folder: Path
) -> None:
    """Other weights may come with them, as an average's: only moments and counts are handed on."""
    schedule = {"optimizer__warmup_steps": 2, "optimizer__decay": "cosine"}
    exact = schedule | {"export__dtype": "float32", "generation__prompt": None}
    both = trained(ranks, small_run.settings(folder, 2, name="both", **exact))
    half = exact | {"training__steps": 3, "training__schedule_steps": 6}
    first = trained(ranks, small_run.settings(folder, 2, name="first", **half))
    second = small_run.settings(
        folder,
        2,
        name="second",
        model__source=str(run_dir.export(first)),
        checkpoint__optimizer_load_path=run_dir.checkpoint(first, 3),
        training__consumed_steps=3,
        training__consumed_samples=24,
        checkpoint__every_steps=1,
        **half,
    )
    small_run.ready(second)
    ranks.run(stop_after, second, 2, world=2)  # killed, it goes on from its own checkpoints
    last = trained(ranks, second)
    expected = small_run.losses(both)
    assert {s + 3: loss for s, loss in small_run.losses(last).items()} == {
        s: expected[s] for s in (4, 5, 6)
    }
    one, two = ([p.read_bytes() for p in weight_files(run)] for run in (both, last))
    assert one == two


def test_no_step_has_the_dropout_of_an_earlier_rounds_step(folder: Path) -> None:
    """Of rounds whose steps are not those that the schedule counts."""
    batch = Batch(*torch.zeros(3, 1, 1, dtype=torch.int64), torch.tensor([0, 1]), (1,), 1)
    world = World(0, 1, torch.device("cpu"))
    # the first took 41 steps in place of the schedule's 10; one goes on with other text
    rounds = [(0, 0, None), (10, 41 * 8, None), (10, 0, None), (0, 0, 7), (10, 0, 7)]
    seeds = [
        on_device([batch], run, step, world)[0].seed
        for before, samples, data_seed in rounds
        for run in [
            small_run.settings(
                folder,
                1,
                training__consumed_steps=before,
                training__consumed_samples=samples,
                training__data_seed=data_seed,
            )
        ]
        for step in range(1, 42)
    ]
    assert len(set(seeds)) == 5 * 41


@pytest.mark.matrix
@pytest.mark.parametrize(
    "changes",
    [
        {"data__batching": "padding"},
        {"data__packing": "concat"},
        {"training__steps": None, "training__epochs": 0.5},
        {"deterministic": True},
        {"precision__compute": "bf16"},
        {"evaluation__every_steps": 2, "evaluation__max_samples": 3},
        {"export__dtype": "float16", "export__max_file_gib": 1e-5},
        {"checkpoint__asynchronous": False},
    ],
    ids=str,
)
def test_choices_of_a_run(ranks: RankPool, folder: Path, changes: dict[str, Any]) -> None:
    run_folder = trained(ranks, small_run.settings(folder, 2, **changes))
    first, *_, last = small_run.records(run_folder, "evaluation")
    assert last["loss"] < first["loss"]
    AutoModelForCausalLM.from_pretrained(run_dir.export(run_folder))


@pytest.mark.full
def test_compiled_blocks_give_the_same_losses(ranks: RankPool, folder: Path) -> None:
    """Where there is no C++ compiler, a run that asks for one is refused."""
    single = {"sharding": small_run.sharding("single"), "training__steps": 2}
    plain = trained(ranks, small_run.settings(folder, 1, name="plain", **single))
    run = small_run.settings(folder, 1, name="compiled", training__compile=True, **single)
    compiled = small_run.ready(run)
    if shutil.which("g++") is None:
        assert "needs a C++ compiler" in ranks.run(mistake, run, world=1)[0]
        return
    ranks.run(small_run.train_here, run, world=1)
    assert small_run.losses(compiled) == pytest.approx(small_run.losses(plain), abs=1e-4)


FIELDS = {
    "step", "tokens", "loss", "perplexity", "learning_rate", "gradient_norm", "tokens_per_second",
    "tokens_per_second_per_device", "mfu", "memory_gib", "data_wait_seconds", "checkpoint_seconds",
    "communication_bytes", "communication_seconds",
}  # fmt: skip


def test_metrics_have_their_fields(whole: Path) -> None:
    (start,) = small_run.records(whole, "start")
    for record in small_run.records(whole, "train"):
        assert record.keys() >= FIELDS
        flops = record["tokens_per_second_per_device"] * start["flops_per_token"]
        assert record["mfu"] == pytest.approx(flops / (start["peak_tflops_per_device"] * 1e12))
    saved = small_run.records(whole, "checkpoint")
    assert [record["step"] for record in saved] == [3, 6]
    assert all(record["blocked_seconds"] > 0 for record in saved)
    assert all(0 < record["save_seconds"] < 60 for record in saved)


@pytest.mark.parametrize("stop_at", [None, 4])
def test_every_step_is_in_one_line(ranks: RankPool, folder: Path, stop_at: int | None) -> None:
    """Lines every 5 steps beside evaluations and checkpoints every 3; stopped, then gone on."""
    cadence = {"training__log_every_steps": 5, "evaluation__every_steps": 3}
    changes = {"name": "lines", "training__steps": 8, "checkpoint__every_steps": 3, **cadence}
    run = small_run.settings(folder, 2, **changes)
    run_folder = small_run.ready(run)
    if stop_at is not None:
        ranks.run(stopped_in_time, run, stop_at, world=2)
    ranks.run(small_run.train_here, run, world=2)
    lines = small_run.records(run_folder, "train")
    tokens = [record["tokens"] for record in lines]
    ends = [record["step"] for record in lines]
    assert ends[-1] == 8
    spans = [end - before for before, end in zip([0, *ends], ends, strict=False)]
    per_step = [record["tokens_per_second"] * record["step_seconds"] for record in lines]
    counted = [count * span for count, span in zip(per_step, spans, strict=True)]
    between = [after - before for before, after in zip([0, *tokens], tokens, strict=False)]
    assert counted == pytest.approx(between), "no step is counted twice, and none is left out"


def stopped_in_time(world: World, run: Run, step: int) -> None:
    calls = iter(range(100))

    def stop_code() -> int:
        return run_dir.RESTART_CODE if next(calls) >= step - 2 else 0

    assert train(run, run_dir.folder(run), world, stop_code) == run_dir.RESTART_CODE


def test_an_evaluation_is_in_no_step_s_time(ranks: RankPool, folder: Path) -> None:
    changes = {"training__log_every_steps": 3, "evaluation__every_steps": 2}
    run = small_run.settings(folder, 1, sharding=small_run.sharding("single"), **changes)
    run_folder = small_run.ready(run)
    ranks.run(train_with_slow_evaluations, run, world=1)
    assert [r["step"] for r in small_run.records(run_folder, "train")] == [3, 6]
    for record in small_run.records(run_folder, "train"):
        assert record["step_seconds"] < 0.5
        assert record["tokens_per_second"] > 0


def train_with_slow_evaluations(world: World, run: Run) -> None:
    from atoll.train import evaluate

    shares = evaluate.shares

    def slowly(*args: Any) -> Any:
        time.sleep(2.0)
        return shares(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "shares", slowly)
        small_run.train_here(world, run)


@pytest.mark.parametrize(("tensor", "factor"), [(1, 2), (2, 1)])
def test_the_rate_scales_with_data_parallel_ranks_alone(
    ranks: RankPool, folder: Path, tensor: int, factor: int
) -> None:
    sharding = small_run.sharding("full_shard") | {"tensor": tensor}
    settings = {"optimizer__scale_with_ranks": "linear", "training__steps": 2}
    run = small_run.settings(folder, 2, name=f"of{tensor}", sharding=sharding, **settings)
    last = small_run.records(trained(ranks, run), "train")[-1]
    assert last["learning_rate"] == pytest.approx(factor * run.optimizer.learning_rate)


def launch(run_folder: Path, ranks: int, *command: str) -> subprocess.CompletedProcess[str]:
    argv = [
        sys.executable,
        "-m",
        "atoll",
        "launch",
        "--fork",
        str(ranks),
        str(run_folder),
        *command,
    ]
    paths = os.pathsep.join([str(TESTS), str(TESTS / "train"), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


def killed_in_save(run_folder: Path, placement: Any) -> int:
    """A command: train, and die with SIGKILL in the middle of the second checkpoint."""
    from atoll.train import train

    original, saves = run_dir.sha256_of, []

    def sha256_of(path: Path) -> str:
        if path.parent.parent == run_dir.checkpoints(run_folder):
            saves.append(path.parent.name)
        if len(set(saves)) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(path)

    run_dir.sha256_of = sha256_of
    return train.main(run_folder, placement)


@pytest.mark.image
def test_killed_in_the_middle_of_saving_resumes_to_the_same_losses(
    ranks: RankPool, folder: Path
) -> None:
    changes = {"checkpoint__every_steps": 2}
    whole = trained(ranks, small_run.settings(folder, 2, name="whole", **changes))
    killed = small_run.ready(small_run.settings(folder, 2, name="killed", **changes))
    first = launch(killed, 2, "test_train:killed_in_save")
    assert first.returncode != 0
    assert checkpoint.latest(killed) == run_dir.checkpoint(killed, 2), first.stderr
    second = launch(killed, 2)
    assert second.returncode == 0, second.stderr
    assert "resumed from" in second.stdout
    assert small_run.losses(killed) == small_run.losses(whole)


def assert_two_lines(finished: subprocess.CompletedProcess[str], found: str) -> None:
    assert finished.returncode != 0
    assert "Traceback" not in finished.stderr
    lines = [
        line for line in finished.stderr.splitlines() if line.startswith(("atoll:", "       "))
    ]
    assert len(lines) == 2, finished.stderr
    assert found in lines[0], finished.stderr


def test_mistakes_end_in_two_lines_whatever_the_ranks(folder: Path) -> None:
    run = small_run.settings(folder, 2, model__config=tiny.CONFIGS["llama"])
    run_folder = small_run.ready(run)
    assert_two_lines(launch(run_folder, 2), "290 tokens, the model's vocabulary only 128")
    assert_two_lines(launch(run_folder, 3), "3 ranks were started, the run asks for 2")


def test_a_corrupted_token_shard_is_named(folder: Path) -> None:
    run = small_run.settings(folder, 2, folders__prepared=str(folder / "prepared"))
    run_folder = small_run.ready(run)
    shard = next(run_dir.prepared(run).rglob("train/*.ds"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-2])
    assert_two_lines(launch(run_folder, 2), shard.name)
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert_two_lines(launch(run_folder, 2), shard.name)


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_corrupted_checkpoint_is_named(folder: Path, whole: Path) -> None:
    run_folder = copied(whole, small_run.settings(folder, 2))
    again = small_run.ready(small_run.settings(folder, 2, training__steps=8))
    assert again == run_folder
    newest = run_dir.checkpoint(run_folder, 6)
    flip_a_byte(newest / "__0_0.distcp")
    others = [path for path in run_dir.checkpoints(run_folder).iterdir() if path != newest]
    done = launch(run_folder, 2)
    assert done.returncode == 0, done.stderr
    assert "__0_0.distcp does not have the sha256" in done.stdout
    assert (newest.parent / f"{newest.name}.corrupted").is_dir()
    assert others and max(small_run.losses(run_folder)) == 8


def test_the_only_checkpoint_is_never_given_up_unseen(folder: Path, whole: Path) -> None:
    run_folder = copied(whole, small_run.settings(folder, 2))
    small_run.ready(small_run.settings(folder, 2, training__steps=8))
    newest = run_dir.checkpoint(run_folder, 6)
    for path in run_dir.checkpoints(run_folder).iterdir():
        if path != newest:
            shutil.rmtree(path)
    flip_a_byte(newest / "__0_0.distcp")
    assert_two_lines(launch(run_folder, 2), "__0_0.distcp does not have the sha256")


def mistake_of(world: World, run: Run) -> str:
    try:
        small_run.train_here(world, run)
    except UserError as error:
        return error.found
    return ""


def test_a_run_does_not_go_on_with_another_text(ranks: RankPool, tmp_path: Path) -> None:
    """Its tokens were deleted and made again, of one document more."""
    text = tmp_path / "text.txt"
    text.write_text(small_run.shared_text().read_text())
    changes: dict[str, Any] = {"folders": {"prepared": str(tmp_path / "prepared")}}
    changes["folders"]["runs"] = str(tmp_path / "runs")
    half = small_run.settings(tmp_path, 2, name="x", training__steps=3, **changes)
    small_run.ready(half)
    assert ranks.run(mistake_of, half, world=2) == ["", ""]
    with text.open("a") as lines:
        lines.write("the reef of coral\n")
    shutil.rmtree(tmp_path / "prepared")
    more = small_run.settings(tmp_path, 2, name="x", **changes)
    small_run.ready(more)
    for found in ranks.run(mistake_of, more, world=2):
        assert "run x was trained 3 steps on a text that has changed since" in found
    text.write_text(small_run.shared_text().read_text())
    shutil.rmtree(tmp_path / "prepared")
    small_run.ready(more)
    assert ranks.run(mistake_of, more, world=2) == ["", ""]


def test_a_run_does_not_go_on_with_another_tokenizer(ranks: RankPool, tmp_path: Path) -> None:
    """One was made anew in its place: the same text, and other words for its tokens."""
    (tmp_path / "text.txt").write_text(small_run.shared_text().read_text())
    made = small_run.settings(small_run.shared_text().parent, 2, name="any")
    small_run.ready(made)
    given = shutil.copytree(run_dir.prepared(made) / "tokenizer", tmp_path / "given")
    changes: dict[str, Any] = {"folders": {"prepared": str(tmp_path / "prepared")}}
    changes["folders"]["runs"] = str(tmp_path / "runs")
    changes["tokenizer"] = {"vocabulary_tokens": 290, "path": str(given)}
    half = small_run.settings(tmp_path, 2, name="x", training__steps=3, **changes)
    small_run.ready(half)
    assert ranks.run(mistake_of, half, world=2) == ["", ""]
    file = given / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    a, b = sorted(vocabulary)[-2:]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    kept = file.read_bytes()
    file.write_text(json.dumps(content))
    small_run.ready(half)
    run_folder = run_dir.folder(half)
    with pytest.raises(UserError, match="was trained on tokens of a tokenizer that has changed"):
        sampling.from_checkpoint(run_dir.checkpoint(run_folder, 3), half)
    shutil.rmtree(run_dir.export(run_folder))  # as after a kill before it is written
    for found in ranks.run(mistake_of, half, world=2):
        assert "run x was trained 3 steps on tokens of a tokenizer that has changed" in found
    more = small_run.settings(tmp_path, 2, name="x", **changes)
    small_run.ready(more)
    for found in ranks.run(mistake_of, more, world=2):
        assert "run x was trained 3 steps on tokens of a tokenizer that has changed" in found
    file.write_bytes(kept)
    small_run.ready(more)
    assert ranks.run(mistake_of, more, world=2) == ["", ""]
