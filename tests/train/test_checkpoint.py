"""Checkpoints: whole or absent, verified, and independent of what happens after `start_save`."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_run
import torch
import torch.distributed.checkpoint as dcp
from rank_pool import RankPool
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from atoll import run_dir
from atoll.errors import UserError
from atoll.monitor.observers import Observer, StepRecord
from atoll.settings import Run
from atoll.sharding.process_group import SharedError, World, barrier, gathered
from atoll.train import checkpoint, checkpoint_manifest
from atoll.train import train as trainer
from atoll.train.checkpoint_files import bytes_of_all

ALONE = World(0, 1, torch.device("cpu"))


def progress(step: int, ranks: int = 1) -> checkpoint.Progress:
    return checkpoint.Progress(step, step * 8, step * 1000, ranks, {})


def state(world: World, value: float) -> dict[str, torch.Tensor]:
    """A sharded matrix, a replicated vector and a scalar, all filled from `value`."""
    matrix = torch.arange(24.0).reshape(6, 4) + value
    if world.size > 1:
        matrix = distribute_tensor(matrix, init_device_mesh("cpu", (world.size,)), [Shard(0)])
    return {
        "model/matrix": matrix,
        "model/vector": torch.full((3,), value),
        "step": torch.tensor(value),
    }


def test_what_another_run_learned_is_not_left_behind_where_it_is_frozen(tmp_path: Path) -> None:
    """Else it would be the source's again, beside layers that were trained with it."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    path = tmp_path / "trunk" / "checkpoints" / "step-00000003"
    whole = {f"model/{name}": p.detach() for name, p in model.named_parameters()}
    dcp.save(whole, checkpoint_id=path, no_dist=True)
    train_state: Any = SimpleNamespace(model=model)
    trainer.refuse_frozen(train_state, path)
    model["a"].requires_grad_(False)
    with pytest.raises(UserError, match=r"learned a\.bias, which is frozen here") as refused:
        trainer.refuse_frozen(train_state, path)
    assert f"model.source={tmp_path}/trunk/export" in refused.value.hint
    shutil.rmtree(path)
    parts = {name: value for name, value in whole.items() if "model/b" in name}
    dcp.save(parts, checkpoint_id=path, no_dist=True)
    trainer.refuse_frozen(train_state, path)  # there, too, it was the source's


def save(folder: Path, world: World, step: int, keep: int = 2) -> None:
    pending = checkpoint.start_save(
        folder, state(world, float(step)), progress(step, world.size), keep, world
    )
    checkpoint.finish(pending)


def load(folder: Path, world: World) -> tuple[int, list[float]]:
    path = checkpoint.latest(folder)
    assert path is not None
    tensors = state(world, -1.0)
    checkpoint.load(path, tensors, world)
    matrix = tensors["model/matrix"]
    whole = matrix.full_tensor() if world.size > 1 else matrix
    assert torch.equal(whole, torch.arange(24.0).reshape(6, 4) + float(tensors["step"]))
    return checkpoint.load_progress(path).step, tensors["model/vector"].tolist()


def save_on_ranks(world: World, folder: Path, step: int) -> None:
    save(folder, world, step)


def load_on_ranks(world: World, folder: Path) -> tuple[int, list[float]]:
    return load(folder, world)


def change_after_copy(world: World, folder: Path) -> None:
    """Save with a copy that takes long, and change the tensors as soon as that is allowed."""
    staged = DefaultStager._stage

    def slowly(stager: DefaultStager, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        time.sleep(0.3)
        return staged(stager, tensors)

    tensors = state(world, 5.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DefaultStager, "_stage", slowly)
        pending = checkpoint.start_save(folder, tensors, progress(5, world.size), 2, world)
        assert not pending.copied.done()
        assert checkpoint.await_copy(pending) > 0
    for tensor in tensors.values():
        tensor.zero_()
    checkpoint.finish(pending)
    assert checkpoint.await_copy(pending) == 0


@pytest.mark.parametrize("loading", [1, 2, 4])
def test_saved_on_three_ranks_loads_on_any(ranks: RankPool, tmp_path: Path, loading: int) -> None:
    ranks.run(save_on_ranks, tmp_path, 3, world=3)
    assert ranks.run(load_on_ranks, tmp_path, world=loading) == [(3, [3.0] * 3)] * loading


@pytest.mark.parametrize("size", [1, 2])
def test_the_state_is_copied_before_it_may_change(
    ranks: RankPool, tmp_path: Path, size: int
) -> None:
    ranks.run(change_after_copy, tmp_path, world=size)
    assert ranks.run(load_on_ranks, tmp_path, world=size)[0] == (5, [5.0] * 3)


def test_keeps_the_last(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11):
        save(tmp_path, ALONE, step, keep=2)
    assert sorted(os.listdir(run_dir.checkpoints(tmp_path))) == ["step-00000010", "step-00000011"]


def test_order_is_by_step_not_by_time(tmp_path: Path) -> None:
    save(tmp_path, ALONE, 2)
    save(tmp_path, ALONE, 10)
    os.utime(run_dir.checkpoint(tmp_path, 2), (2**31, 2**31))
    latest = checkpoint.latest(tmp_path)
    assert latest is not None and latest.name == "step-00000010"


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "metadata"])
def test_damage_is_named(ranks: RankPool, tmp_path: Path, damage: str) -> None:
    ranks.run(save_on_ranks, tmp_path, 3, world=2)
    folder = run_dir.checkpoint(tmp_path, 3)
    victim = folder / (".metadata" if damage == "metadata" else "__1_0.distcp")
    content = bytearray(victim.read_bytes())
    if damage == "remove":
        victim.unlink()
    else:
        content[len(content) // 2] ^= 1
        victim.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    answers = ranks.run(explained_load, tmp_path, world=2)
    assert answers[0] == answers[1]
    assert victim.name in answers[0] and "corrupted" in answers[0] and "rm -r" in answers[0]


def barriers_beside_a_save(world: World, folder: Path) -> float:
    """Rank 0 talks to the others first and saves later, the rest the other way round."""
    staged = DefaultStager._stage

    def slowly(stager: DefaultStager, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        time.sleep(0.5 if world.rank == 0 else 0.0)
        return staged(stager, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DefaultStager, "_stage", slowly)
        pending = checkpoint.start_save(folder, state(world, 5.0), progress(5, 2), 2, world)
        time.sleep(0.0 if world.rank == 0 else 0.2)
        ranks = gathered(world, world.rank)
        barrier(world)
        checkpoint.finish(pending)
    return sum(ranks)


def test_ranks_may_talk_while_a_checkpoint_is_saved(ranks: RankPool, tmp_path: Path) -> None:
    """As the profile of a step's communication does, behind the step that saved."""
    assert ranks.run(barriers_beside_a_save, tmp_path, world=2) == [1, 1]
    assert ranks.run(load_on_ranks, tmp_path, world=2)[0] == (5, [5.0] * 3)


def test_a_save_that_fails_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        raise RuntimeError("no memory is left to pin")

    save(tmp_path, ALONE, 3)
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", write)
    with pytest.raises(UserError) as error:
        save(tmp_path, ALONE, 7)
    assert "step 7 cannot be written" in error.value.found
    assert "rank 0: RuntimeError: no memory is left to pin" in error.value.found
    assert "name=" not in error.value.hint and "free some space" not in error.value.hint
    assert "goes on from its last checkpoint" in error.value.hint
    assert os.listdir(run_dir.checkpoints(tmp_path)) == ["step-00000003"]
    monkeypatch.undo()
    assert load(tmp_path, ALONE) == (3, [3.0] * 3)


def explained_load(world: World, folder: Path) -> str:
    with pytest.raises(UserError) as error:
        load(folder, world)
    return str(error.value)


def test_a_run_that_cannot_be_saved_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"GiB free, one checkpoint takes"):
        checkpoint.check_space(tmp_path, bytes_of_all(state(ALONE, 1.0), ALONE), 0)


def steps_before_a_failure(world: World, run: Run) -> tuple[int, str]:
    """How many steps a run of twelve takes whose third step cannot be saved."""
    steps: list[int] = []

    def write(*_: Any) -> None:
        raise SharedError("checkpoint of step 3 cannot be written: the disk is full", "make room")

    class Watcher(Observer):
        def after_step(self, update: StepRecord) -> None:
            steps.append(update.step)
            time.sleep(0.05)  # a thread fails meanwhile

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_write", write)
        patch.setattr(trainer, "watching", lambda _: nullcontext((Watcher(),)))
        try:
            trainer.train(run, run_dir.folder(run), world, lambda: 0)
        except UserError as error:
            return max(steps), error.found
    return max(steps), ""


def test_a_save_that_fails_is_heard_of_at_once(ranks: RankPool, tmp_path: Path) -> None:
    """Not with the next checkpoint: all until then would be lost."""
    small_run.write_text(tmp_path)
    changes: dict[str, Any] = {"training__steps": 12, "checkpoint__every_steps": 3}
    run = small_run.settings(tmp_path, 2, **changes)
    small_run.ready(run)
    [(steps, found), (steps_there, _)] = ranks.run(steps_before_a_failure, run, world=2)
    assert steps == steps_there <= 5 and "the disk is full" in found


def full_disk_on_rank_one(world: World, folder: Path) -> str:
    """Rank 1 may write no file over 100 bytes: the kernel then fails its writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(UserError) as error:
            save(folder, world, 7)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return str(error.value)


def test_a_full_disk_ends_on_every_rank_and_leaves_the_old(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_on_ranks, tmp_path, 3, world=2)
    answers = ranks.run(full_disk_on_rank_one, tmp_path, world=2)
    assert all("step 7 cannot be written" in a and "free some space" in a for a in answers)
    assert ranks.run(load_on_ranks, tmp_path, world=2)[0] == (3, [3.0] * 3)
    # nor is what was written of the new one left to fill the disk
    assert os.listdir(run_dir.checkpoints(tmp_path)) == ["step-00000003"]


KILLED = """
import os, signal, sys
from pathlib import Path
import test_checkpoint as t
calls = 0
def killing(original, last):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    return call
def attempt(folder, last):
    t.save(folder, t.ALONE, 1)
    for name in ("fsync", "rename", "replace"):
        setattr(os, name, killing(getattr(os, name), last))
    t.save(folder, t.ALONE, 2)
    (folder / "calls").write_text(str(calls))
def forked(folder, last):
    if (child := os.fork()) == 0:
        attempt(folder, last)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
folder = Path(sys.argv[1])
assert forked(folder / "none", -1) == 0
steps = int((folder / "none" / "calls").read_text())
for at in range(1, steps + 1, 2):
    print(at, forked(folder / str(at), at))
"""


def test_a_kill_at_any_step_of_writing_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    argv = [sys.executable, "-c", KILLED, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ends = dict(line.split() for line in done.stdout.splitlines())
    assert len(ends) >= 3, "there are steps to be killed at"
    for at, end in ends.items():
        folder = tmp_path / at
        assert int(end) == -signal.SIGKILL
        step, vector = load(folder, ALONE)
        assert step in (1, 2) and vector == [float(step)] * 3
        save(folder, ALONE, 3)
        left = os.listdir(run_dir.checkpoints(folder))
        assert not [name for name in left if name.startswith(".")], "leftovers are collected"


def test_a_manifest_that_is_no_json_is_named(tmp_path: Path) -> None:
    save(tmp_path, ALONE, 1)
    (run_dir.checkpoint(tmp_path, 1) / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        load(tmp_path, ALONE)


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    save(tmp_path, ALONE, 1)
    folder = run_dir.checkpoint(tmp_path, 1)
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert sorted([*listed, "manifest.json"]) == sorted(os.listdir(folder))


def test_waiting_is_counted_and_nothing_is_waited_for_twice(tmp_path: Path) -> None:
    assert checkpoint.await_copy(None) == 0.0
    assert checkpoint.finish(None) == 0.0
    before = time.monotonic()
    pending = checkpoint.start_save(tmp_path, state(ALONE, 4.0), progress(4), 2, ALONE)
    blocked = pending.blocked_seconds
    assert 0 < blocked <= time.monotonic() - before
    waited = checkpoint.await_copy(pending) + checkpoint.finish(pending)
    assert pending.step == 4 and pending.copied.done()
    assert pending.blocked_seconds == pytest.approx(blocked + waited)
    assert before <= pending.started <= time.monotonic()
    assert 0 < pending.done.result() <= time.monotonic() - before
    assert checkpoint.await_copy(pending) == 0.0
    assert checkpoint.finish(pending) < 0.1


def test_what_is_not_whole_is_not_the_latest(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    folder = run_dir.checkpoints(tmp_path)
    folder.mkdir()
    assert checkpoint.latest(tmp_path) is None
    save(tmp_path, ALONE, 2)
    save(tmp_path, ALONE, 5)
    (folder / "step-00000009").mkdir()
    shutil.copytree(folder / "step-00000005", folder / ".step-00000008.partial")
    shutil.copytree(folder / "step-00000005", folder / "step-00000007.old")
    assert checkpoint.latest(tmp_path) == folder / "step-00000005"


def test_progress_comes_back_whole(tmp_path: Path) -> None:
    written = checkpoint.Progress(3, 24, 3000, 1, {"skipped": 2})
    pending = checkpoint.start_save(tmp_path, state(ALONE, 3.0), written, 2, ALONE)
    checkpoint.finish(pending)
    path = checkpoint.latest(tmp_path)
    assert path is not None and path.name == "step-00000003"
    assert checkpoint.load_progress(path) == written
    assert written.samples_behind(7, 10) == 24 + (7 - 3) * 10


def test_a_step_that_is_saved_again_takes_the_place_of_the_old(tmp_path: Path) -> None:
    save(tmp_path, ALONE, 2)
    stale = run_dir.checkpoint(tmp_path, 2) / "stale"
    stale.write_text("")
    (run_dir.checkpoints(tmp_path) / ".step-00000001.partial").mkdir()
    (run_dir.checkpoints(tmp_path) / "notes").mkdir()
    save(tmp_path, ALONE, 2)
    assert load(tmp_path, ALONE) == (2, [2.0] * 3)
    assert not stale.exists()
    assert sorted(os.listdir(run_dir.checkpoints(tmp_path))) == ["notes", "step-00000002"]


def test_the_manifest_states_size_and_digest_of_each_file(tmp_path: Path) -> None:
    save(tmp_path, ALONE, 1)
    folder = run_dir.checkpoint(tmp_path, 1)
    content = json.loads((folder / "manifest.json").read_text())
    for name, facts in content["files"].items():
        assert facts["bytes"] == (folder / name).stat().st_size > 0
        assert facts["sha256"] == run_dir.sha256_of(folder / name)
    assert content["progress"]["step"] == 1


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.unlink(), "__0_0.distcp is missing"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), r"has (\d+) bytes, (\d+) were"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"has (\d+) bytes, (\d+) were"),
        (lambda path: path.write_bytes(b"\0" * path.stat().st_size), "have the sha256"),
    ],
)
def test_damage_is_told_apart(tmp_path: Path, damage: Any, reason: str) -> None:
    save(tmp_path, ALONE, 1)
    damage(run_dir.checkpoint(tmp_path, 1) / "__0_0.distcp")
    with pytest.raises(UserError, match=reason):
        load(tmp_path, ALONE)


@pytest.mark.parametrize(
    "other", [{"model/matrix": torch.zeros(7, 4)}, {"model/other": torch.zeros(2)}]
)
def test_another_model_s_checkpoint_is_refused_in_two_lines(
    tmp_path: Path, other: dict[str, torch.Tensor]
) -> None:
    save(tmp_path, ALONE, 1)
    path = run_dir.checkpoint(tmp_path, 1)
    with pytest.raises(UserError) as refused:
        checkpoint.load(path, state(ALONE, 0.0) | other, ALONE)
    assert refused.value.found.startswith(f"checkpoint {path} does not fit this run: ")
    assert "\n" not in refused.value.found
    assert refused.value.hint == "start a new run with another name="


def test_the_space_that_a_checkpoint_needs_is_all_of_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"a": torch.zeros(2**20), "b": torch.zeros(2**20, dtype=torch.bfloat16)}
    needed = 4 * 2**20 + 2 * 2**20
    usage = shutil.disk_usage(tmp_path)
    folder = tmp_path / "runs" / "x"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    checkpoint.check_space(folder, bytes_of_all(tensors, ALONE), 0)
    checkpoint.check_space(folder, bytes_of_all(tensors, ALONE), 0)
    assert folder.is_dir()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(UserError, match=r"has 0\.01 GiB free, one checkpoint takes 0\.01 GiB"):
        checkpoint.check_space(folder, bytes_of_all(tensors, ALONE), 0)
    big = {"a": torch.empty(2**30, device="meta")}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=3 * 2**30))
    with pytest.raises(UserError, match=r"has 3\.00 GiB free, one checkpoint takes 4\.00 GiB"):
        checkpoint.check_space(folder, bytes_of_all(big, ALONE), 0)


def bytes_on_ranks(world: World) -> int:
    """Beside what `state` has: a stage's own layer, and moments that are each rank's alone."""
    own = {f"model/layer{world.rank}": torch.zeros(10 + world.rank)}
    own |= {f"optimizer/moment/rank{world.rank}": torch.zeros(7, dtype=torch.int8)}
    return bytes_of_all(state(world, 1.0) | own, world)


def test_a_checkpoint_has_the_tensors_of_every_stage_and_shared_ones_once(ranks: RankPool) -> None:
    shared = 4 * 24  # the matrix: what has no mesh is of a stage here
    of_stages = 2 * (4 * 3 + 4) + 4 * (10 + 11)
    assert ranks.run(bytes_on_ranks, world=2) == [shared + of_stages + 2 * 7] * 2


def test_there_is_room_for_those_kept_and_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, needed = {"a": torch.zeros(2**20)}, 3 * 4 * 2**20
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    checkpoint.check_space(tmp_path, bytes_of_all(tensors, ALONE), 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(UserError, match=r"2 are kept while the next is written: 0\.01 GiB"):
        checkpoint.check_space(tmp_path, bytes_of_all(tensors, ALONE), 2)
    with pytest.raises(UserError, match=r"2 are kept while the next is written: 12\.00 GiB"):
        checkpoint.check_space(
            tmp_path, bytes_of_all({"a": torch.empty(2**30, device="meta")}, ALONE), 2
        )


@pytest.mark.parametrize(("saved_by", "reads_own"), [(1, True), (2, False)])
def test_as_many_ranks_as_saved_read_their_own_metadata_alone(
    saved_by: int, reads_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = []
    tensors = state(ALONE, 4.0)
    written = progress(4, saved_by)
    checkpoint.finish(checkpoint.start_save(tmp_path, tensors, written, 2, ALONE))
    monkeypatch.setattr(checkpoint, "read_own", lambda *words: metadata.append(words[-1]))
    checkpoint.load(run_dir.checkpoint(tmp_path, 4), tensors, ALONE)
    assert [each is not None for each in metadata] == [reads_own]


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_the_thread_that_saves_takes_the_device_of_its_rank(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread begins with a node's first device, where each rank would take memory."""
    taken = []

    def set_device(device: torch.device) -> None:
        taken.append((device, threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    on_host = checkpoint._stager(torch.device("cpu"))
    monkeypatch.setattr(checkpoint, "_stager", lambda device: on_host)
    device = torch.device(kind, 3) if kind == "cuda" else torch.device(kind)
    world = replace(ALONE, device=device)
    checkpoint.finish(checkpoint.start_save(tmp_path, state(ALONE, 4.0), progress(4), 2, world))
    assert taken == [(device, False)] * (kind == "cuda")


def newest_on_ranks(world: World, folder: Path) -> Path | None:
    return checkpoint.newest_intact(folder, world)


def test_a_corrupted_checkpoint_is_kept_aside_and_the_one_before_is_taken(
    ranks: RankPool, tmp_path: Path
) -> None:
    for step in (3, 5):
        ranks.run(save_on_ranks, tmp_path, step, world=2)
    (run_dir.checkpoint(tmp_path, 5) / "__1_0.distcp").write_bytes(b"x")
    answers = ranks.run(newest_on_ranks, tmp_path, world=2)
    assert set(answers) == {run_dir.checkpoint(tmp_path, 3)}
    names = sorted(os.listdir(run_dir.checkpoints(tmp_path)))
    assert names == ["step-00000003", "step-00000005.corrupted"]


def newest_where_one_cannot_read(world: World, folder: Path, times: int) -> tuple[str, str]:
    """The newest, or the mistake; so many of rank 1's reads fail as a server's that is away."""
    original, failures = run_dir.sha256_of, iter(range(times))

    def sha256_of(path: Path) -> str:
        if world.rank == 1 and next(failures, None) is not None:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return original(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_dir, "sha256_of", sha256_of)
        patch.setattr(checkpoint_manifest, "READ_AGAIN_SECONDS", (0.0, 0.0))
        try:
            return str(checkpoint.newest_intact(folder, world)), ""
        except UserError as error:
            return error.found, error.hint


def test_a_file_system_that_does_not_answer_corrupts_no_checkpoint(
    ranks: RankPool, tmp_path: Path
) -> None:
    for step in (3, 5):
        ranks.run(save_on_ranks, tmp_path, step, world=2)
    newest = str(run_dir.checkpoint(tmp_path, 5))
    answers = ranks.run(newest_where_one_cannot_read, tmp_path, 2, world=2)
    assert answers == [(newest, "")] * 2, "it was away for a moment"
    answers = ranks.run(newest_where_one_cannot_read, tmp_path, 100, world=2)
    for found, hint in answers:
        assert "cannot be read: Input/output error" in found and newest in found
        assert "when its file system answers" in hint
    names = sorted(os.listdir(run_dir.checkpoints(tmp_path)))
    assert names == ["step-00000003", "step-00000005"]


def test_a_run_whose_only_checkpoint_is_corrupted_does_not_begin_anew(tmp_path: Path) -> None:
    save(tmp_path, ALONE, 1)
    (run_dir.checkpoint(tmp_path, 1) / "__0_0.distcp").write_bytes(b"x")
    with pytest.raises(UserError, match="corrupted"):
        checkpoint.newest_intact(tmp_path, ALONE)
    assert checkpoint.latest(tmp_path) == run_dir.checkpoint(tmp_path, 1)
    assert checkpoint.newest_intact(tmp_path / "fresh", ALONE) is None


@pytest.mark.parametrize(
    "words", ["unexpected pos 704 vs 598", "PytorchStreamWriter failed writing file data/0"]
)
def test_torch_s_words_for_a_full_disk_are_told_as_one(words: str) -> None:
    failures = {1: (RuntimeError(words), None)}
    with (
        pytest.raises(UserError, match="No space left on device") as error,
        checkpoint._as_user_error("checkpoint of step 7 cannot be written", "no hint"),
    ):
        raise CheckpointException("save", failures)  # type: ignore[arg-type]
    assert "free some space" in error.value.hint
