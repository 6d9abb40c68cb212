"""What DPO compares with: the log-probabilities of every pair under the model as the run began.

They are computed once, by all ranks, before the first step, and kept in the run's folder.
"""

import hashlib
import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from atoll import run_dir
from atoll.data.samples import Samples
from atoll.models.source import source_folder
from atoll.sharding.engines import FORWARDS
from atoll.sharding.process_group import run_on_all_ranks, run_on_first_rank, say, summed
from atoll.sharding.step_plan import free_gathered
from atoll.train.assemble import TrainState
from atoll.train.checkpoint_saver import texts_of, tokenizer_of
from atoll.train.evaluate import shares


def set_reference(train_state: TrainState) -> None:
    """Give the samples of a preference run their reference; to be called before it resumes."""
    run, world = train_state.run, train_state.world
    if run.task.name != "preference" or run.task.loss != "dpo":
        return
    assert isinstance(train_state.training, Samples), "settings let pairs in windows through"
    path = run_dir.reference_file(train_state.run_folder)
    if not run_on_first_rank(world, lambda: _is_of_this(train_state, path)):
        say(world, "log-probabilities of the reference: once for all pairs …")
        arrays = {
            "train": _log_probabilities(train_state, train_state.training),
            "validation": _log_probabilities(train_state, train_state.validation),
        }
        run_on_first_rank(world, lambda: _keep(train_state, path, arrays))
    with run_on_all_ranks(world, lambda: np.load(path, allow_pickle=False)) as stored:
        train_state.training.reference = stored["train"]
        train_state.validation.reference = stored["validation"]


def _is_of_this(train_state: TrainState, path: Path) -> bool:
    """Whether what is kept is of these pairs and this model; a checkpoint knows its own text."""
    if not path.is_file():
        return False
    if run_dir.complete_checkpoints(train_state.run_folder):
        return True
    with np.load(path, allow_pickle=False) as stored:
        return "key" in stored and str(stored["key"]) == _key(train_state)


def _keep(train_state: TrainState, path: Path, arrays: dict[str, npt.NDArray[np.float32]]) -> None:
    written = io.BytesIO()
    np.savez(written, allow_pickle=False, key=np.array(_key(train_state)), **arrays)
    run_dir.write_whole(path, written.getvalue())


def _key(train_state: TrainState) -> str:
    """A digest of the pairs and of the weights: a file may be another one under its old name."""
    model = train_state.run.model
    start = None if model.lora is None else model.lora.start
    places = [source_folder(model), None if start is None else Path(start)]
    files = [path for place in places if place for path in sorted(place.glob("*.safetensors"))]
    weights = []
    for path in files:
        facts = path.stat()
        with open(path, "rb") as file:  # of large ones it has what adapters never change
            begin = hashlib.sha256(file.read(1 << 20)).hexdigest()
        weights.append([facts.st_size, facts.st_mtime_ns, begin])
    return run_dir.digest([texts_of(train_state), tokenizer_of(train_state), weights])


@torch.no_grad()
def _log_probabilities(train_state: TrainState, samples: Samples) -> npt.NDArray[np.float32]:
    """Of all samples [N, 2], on every rank."""
    run, world, axes = train_state.run, train_state.world, train_state.run.axes
    forward, microbatch = FORWARDS[run.sharding.step_engine], run.training.microbatch_samples
    every = torch.zeros(len(samples), 2, device=world.device)
    train_state.model.eval()
    rank = axes.data_rank(world.rank)
    for ids in shares(np.arange(len(samples)), rank, axes.data, microbatch):
        train_state.heartbeat.at("evaluation")
        counted = ids[ids >= 0]
        # a rank without samples still runs the pass: sharded layers gather on all ranks
        batch = samples.batch(counted if len(counted) else np.zeros(1, np.int64)).to(world.device)
        logp_B2 = forward(train_state.wrapped, batch, train_state.plan)
        if len(counted):
            every[torch.from_numpy(counted)] = logp_B2.float()
    free_gathered(train_state.wrapped)
    train_state.model.train()
    return summed(world, every).cpu().numpy()
