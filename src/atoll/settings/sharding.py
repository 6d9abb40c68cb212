"""How the model, and the work of a step, is spread over the ranks."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from atoll.settings.fields import Count, Settings, Word


class Sharding(Settings):
    """How the model is spread: layouts applied in order, and the engine that takes a step."""

    name: Word  # what sharding=NAME calls it
    layouts: list[str]  # what wraps the model, in this order, as ddp or fsdp
    exchange: str | None = None  # of gradients, where no layout does it
    # what takes a step: PyTorch itself, or DeepSpeed
    engine: Literal["plain", "deepspeed"] = "plain"
    # ranks over which parameters are spread: one, those of a node, all, or so many
    shard: Literal["none", "node", "all"] | Count = "none"
    # a number: after the forward pass, parameters stay spread over so many neighbours alone
    reshard_after_forward: Annotated[bool, Field(strict=True)] | Count = True
    # reduce gradients after each microbatch: less memory, more traffic
    sync_every_microbatch: bool = False
    offload: bool = False  # parameters, gradients and optimizer live in the host's memory
    tensor: Count = 1  # ranks that divide each layer's matrices
    context: Count = 1  # ranks that divide the tokens of a sample
    expert: Count = 1  # ranks that divide the experts of a mixture
    pipeline: Count = 1  # ranks that divide the layers, each a stage or more
    stages_per_rank: Count = 1  # of a pipeline; more than 1 interleaves them, and ranks wait less
    deepspeed: dict[str, Any] = {}  # DeepSpeed's own configuration, which wins over what is derived

    @property
    def spreads(self) -> bool:
        """Whether anything in it is made for more than one rank."""
        return bool(self.layouts or self.exchange or self.engine != "plain")

    @property
    def step_engine(self) -> str:
        """What takes a step: a pipeline is one of several ranks, whatever else is chosen."""
        return "pipeline" if self.pipeline > 1 else self.engine

    @property
    def axes_used(self) -> str:
        """Those that divide layers, matrices, tokens or experts, as they are typed."""
        sizes = {name: getattr(self, name) for name in ("tensor", "context", "pipeline", "expert")}
        return ", ".join(f"sharding.{name}={size}" for name, size in sizes.items() if size > 1)

    @model_validator(mode="after")
    def _axes_go_together(self) -> "Sharding":
        used = self.axes_used
        if used and "fsdp" not in self.layouts:
            raise ValueError(
                f"{used}: sharding={self.name} spreads samples alone",
                "these axes go with full_shard, shard_grad_op and the hybrid ones",
            )
        if self.expert > 1 and self.tensor > 1:
            raise ValueError(
                f"sharding.expert={self.expert} with sharding.tensor={self.tensor}: mixtures have "
                "no plan for tensor ranks",
                "sharding.tensor=1: context and pipeline go",
            )
        if self.stages_per_rank > 1 and self.pipeline == 1:
            raise ValueError(
                f"sharding.stages_per_rank={self.stages_per_rank} needs a pipeline",
                "set sharding.pipeline, or stages_per_rank=1",
            )
        if self.offload and "fsdp" not in self.layouts and self.engine != "deepspeed":
            raise ValueError(
                f"sharding.offload=true: sharding={self.name} keeps its state on the devices",
                "choose full_shard, or deepspeed_zero3_offload",
            )
        return self
