"""The checkpoints of a running loop: one at a time, in the background, and the time they cost."""

import time

from atoll.data.shards import text_digest
from atoll.monitor.observers import Observers
from atoll.plan.checkpoint_interval import interval_steps, seconds_between_failures
from atoll.sharding.process_group import of_first
from atoll.train import checkpoint
from atoll.train.assemble import TrainState
from atoll.train.guard import Guard, Trouble
from atoll.train.optimizer import step_counts
from atoll.train.replay import check_copies
from atoll.train.state_dict import is_deepspeed, state_dict

SAVE_FAILED = 255  # above the codes of signals; `finish` raises before a process could end with it
FIRST_STEPS = 10  # before the first checkpoint of a start whose interval is to be found


def texts_of(train_state: TrainState) -> list[str]:
    """A digest of the text of each source, as it was when its tokens were made."""
    manifests = [source.manifest for source in train_state.validation.sources]
    return [text_digest(manifest.input_fingerprints) for manifest in manifests]


def tokenizer_of(train_state: TrainState) -> str:
    """The sha256 of the tokenizer that made the tokens; sources share one."""
    return train_state.validation.sources[0].manifest.tokenizer_sha256


class CheckpointSaver:
    """Saves a train state; observers hear of each checkpoint when it is whole."""

    def __init__(
        self, train_state: TrainState, first_step: int, guard: Guard, observers: Observers
    ) -> None:
        self.train_state, self.guard, self.observers = train_state, guard, observers
        self.pending: checkpoint.Pending | None = None
        self.blocked_seconds = 0.0
        self.saved_step, self.saved_at = first_step, time.monotonic()
        self.next_step = first_step + FIRST_STEPS  # where the interval is to be found

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint follows this step."""
        every = self.train_state.run.checkpoint.every_steps
        if every == "auto":
            return step >= self.next_step
        return every > 0 and step % every == 0

    def save(self, step: int, tokens: int) -> Trouble | None:
        """Start to save the state of `step`, once the save before is whole.

        A state that is no good is not saved: what is wrong with it is returned.
        """
        with self.train_state.heartbeat.at("checkpoint"):
            return self._save(step, tokens)

    def _save(self, step: int, tokens: int) -> Trouble | None:
        self.finish()
        train_state, run = self.train_state, self.train_state.run
        state = state_dict(train_state)
        trouble = self.guard.of_state(state, step)
        if trouble is not None:
            return trouble
        check_copies(train_state, state, step)
        progress = checkpoint.Progress(
            step,
            self.guard.samples_of(step)[1],
            tokens,
            train_state.world.size,
            step_counts(train_state.optimizer),
            self.guard.saved(),
            texts_of(train_state),
            tokenizer_of(train_state),
        )
        self.pending = checkpoint.start_save(
            train_state.run_folder,
            state,
            progress,
            run.checkpoint.keep,
            train_state.world,
            is_copy=is_deepspeed(train_state),
        )
        self.blocked_seconds += self.pending.blocked_seconds
        if run.checkpoint.every_steps == "auto":
            self._find_interval(self.pending)
        elif not run.checkpoint.asynchronous:
            self.finish()
        return None

    def _find_interval(self, pending: checkpoint.Pending) -> None:
        """Measure this save to its end; the first rank's figures say when the next is due."""
        now, run = time.monotonic(), self.train_state.run
        step_seconds = (now - self.saved_at) / max(1, pending.step - self.saved_step)
        copied_seconds = pending.blocked_seconds + checkpoint.await_copy(pending)
        self.finish()
        between = seconds_between_failures(run.nodes, run.restart.failures_per_node_day)
        save_seconds = pending.done.result()
        steps = interval_steps(copied_seconds, save_seconds, step_seconds, between)
        steps = of_first(self.train_state.world, steps)
        self.saved_step, self.saved_at = pending.step, time.monotonic()
        self.next_step = pending.step + steps
        for observer in self.observers:
            observer.on_record(
                {
                    "event": "checkpoint_interval",
                    "step": pending.step,
                    "steps": steps,
                    "step_seconds": step_seconds,
                    "blocked_seconds": copied_seconds,
                    "save_seconds": save_seconds,
                    "seconds_between_failures": between,
                }
            )

    def failure_code(self) -> int:
        """Of a save that has failed in the background: all ranks are to hear of it now; else 0."""
        done = None if self.pending is None else self.pending.done
        return SAVE_FAILED if done is not None and done.done() and done.exception() else 0

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
