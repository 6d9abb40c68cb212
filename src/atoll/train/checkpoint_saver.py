"""The checkpoints of a running loop: one at a time, in the background, and the time they cost."""

from atoll.monitor.observers import Observers
from atoll.train import checkpoint
from atoll.train.assemble import TrainState
from atoll.train.optimizer import step_counts
from atoll.train.state_dict import state_dict


class CheckpointSaver:
    """Saves a train state; observers hear of each checkpoint when it is whole."""

    def __init__(self, train_state: TrainState, observers: Observers) -> None:
        self.train_state, self.observers = train_state, observers
        self.pending: checkpoint.Pending | None = None
        self.blocked_seconds = 0.0

    def save(self, step: int, tokens: int) -> None:
        """Start to save the state of `step`, once the save before is whole."""
        with self.train_state.heartbeat.at("checkpoint"):
            self._save(step, tokens)

    def _save(self, step: int, tokens: int) -> None:
        self.finish()
        train_state, run = self.train_state, self.train_state.run
        samples = step * run.training.global_batch_samples
        counts = step_counts(train_state.optimizer)
        progress = checkpoint.Progress(step, samples, tokens, train_state.world.size, counts)
        self.pending = checkpoint.start_save(
            train_state.run_folder,
            state_dict(train_state),
            progress,
            run.checkpoint.keep,
            train_state.world,
        )
        self.blocked_seconds += self.pending.blocked_seconds
        if not run.checkpoint.asynchronous:
            self.finish()

    def await_copy(self) -> None:
        """Wait until the state may change: until then it is being copied."""
        with self.train_state.heartbeat.at("checkpoint"):
            self.blocked_seconds += checkpoint.await_copy(self.pending)

    def finish(self) -> None:
        """Wait until the save is whole, if there is one."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        with self.train_state.heartbeat.at("checkpoint"):
            self.blocked_seconds += checkpoint.finish(pending)
        for observer in self.observers:
            observer.on_checkpoint(pending.step, pending.done.result(), pending.blocked_seconds)

    def take_blocked_seconds(self) -> float:
        """For how long training stood still since this was last called."""
        seconds, self.blocked_seconds = self.blocked_seconds, 0.0
        return seconds
