"""Everything that one run needs to know, and what must agree in it."""

from typing import Literal

from pydantic import model_validator

from atoll.settings.fields import Count, CountOrZero, Settings, Word
from atoll.settings.learning import (
    Checkpoint,
    Data,
    Evaluation,
    Export,
    Generation,
    Model,
    Optimizer,
    Precision,
    Task,
    Tokenizer,
    Training,
)
from atoll.settings.machine import Facility, Folders, Image, Launcher, Restart


class Sharding(Settings):
    """How the model is spread: layouts applied in order, and the engine that takes a step."""

    name: Word
    layouts: list[str]
    engine: Literal["plain"] = "plain"
    shard: Literal["none", "node", "all"] | Count = "none"
    reshard_after_forward: bool = True
    sync_every_microbatch: bool = False


class Federation(Settings):
    """The part this run plays in a campaign; `none`: it trains alone."""

    name: Literal["none"] = "none"


class Run(Settings):
    """Everything one run needs to know."""

    name: Word
    seed: CountOrZero = 0
    deterministic: bool = False
    nodes: Count = 1
    ranks_per_node: Count
    folders: Folders
    facility: Facility
    image: Image
    launcher: Launcher
    sharding: Sharding
    model: Model
    tokenizer: Tokenizer
    data: Data
    task: Task
    optimizer: Optimizer
    precision: Precision
    training: Training
    checkpoint: Checkpoint
    restart: Restart = Restart()
    evaluation: Evaluation
    export: Export
    generation: Generation
    federation: Federation = Federation()

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @model_validator(mode="after")
    def _launcher_has_its_scheduler(self) -> "Run":
        scheduler, launcher = self.facility.scheduler, self.launcher.name
        if (scheduler == "pbs") and launcher != "mpiexec":
            raise ValueError(
                f"launcher={launcher} starts tasks with srun, and {self.facility.name} has PBS",
                "launcher=mpiexec",
            )
        if scheduler == "none" and launcher == "mpiexec":
            raise ValueError(
                f"launcher=mpiexec needs a scheduler, and {self.facility.name} has none",
                "launcher=static_node",
            )
        return self

    @model_validator(mode="after")
    def _batch_divides(self) -> "Run":
        per_pass = self.world_size * self.training.microbatch_samples
        if self.training.global_batch_samples % per_pass:
            raise ValueError(
                f"training.global_batch_samples ({self.training.global_batch_samples}) must be "
                f"divisible by ranks x training.microbatch_samples "
                f"({self.world_size} x {self.training.microbatch_samples} = {per_pass})"
            )
        return self

    @model_validator(mode="after")
    def _sharding_fits(self) -> "Run":
        shard = self.sharding.shard
        if isinstance(shard, int) and self.world_size % shard:
            raise ValueError(
                f"world size ({self.world_size}) must be divisible by sharding.shard ({shard})"
            )
        if not self.sharding.layouts and self.world_size > 1:
            raise ValueError(
                f"sharding={self.sharding.name} is one process, but this run has "
                f"{self.world_size} ranks: set ranks_per_node=1, or choose ddp or full_shard"
            )
        return self
