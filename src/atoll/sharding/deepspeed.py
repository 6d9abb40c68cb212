"""DeepSpeed's ZeRO as an engine: it spreads, exchanges, clips and steps; state stays ours.

Parameters and moments are read and set whole, by DeepSpeed's own functions, so that checkpoints
are those of every other strategy and a run may go on with another one.
"""

import importlib
import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from atoll.data.batch import Batch
from atoll.errors import UserError
from atoll.settings import Run
from atoll.sharding.process_group import set_timeouts
from atoll.sharding.step_plan import StepPlan

MOMENTS = ("exp_avg", "exp_avg_sq")


def initialize(
    run: Run, model: nn.Module, optimizer: Any, dtype: torch.dtype, device: torch.device
) -> Any:
    """DeepSpeed's engine around a whole model and its optimizer.

    device: where batches are; offloaded parameters are elsewhere. Raises `UserError` where
    DeepSpeed is not installed.
    """
    _name_device(device)
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            f"sharding={run.sharding.name} needs DeepSpeed, which does not import here: {error}",
            "make setup installs it (a wheel: pip install 'WHEEL[deepspeed]'), or take full_shard",
        ) from error
    if device.type == "cpu":
        # it would compile its own exchange through shared memory at the start; gloo does
        backend: Any = importlib.import_module("deepspeed.comm.torch")
        backend.build_shm_op = lambda: None
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    refuse_unusable(run)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config_of(run, dtype), dist_init_required=False
    )
    if run.training.steps != 0:
        # it would link the moments of the first group alone, as that takes its first step
        _make_state(engine.optimizer)
    set_timeouts(run)
    return engine


def _name_device(device: torch.device) -> None:
    """Name this rank's device where DeepSpeed looks for it.

    It takes the device numbered as LOCAL_RANK, and there is none of that number where each task
    sees its own alone. Under Open MPI it insists that both variables say the same.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        number = os.environ.get("LOCAL_RANK", "0")
    else:
        number = str(device.index or 0)
    os.environ["LOCAL_RANK"] = number
    if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:
        os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = number


def refuse_unusable(run: Run) -> None:
    """Raise `UserError` for words that DeepSpeed does not know, and for disks it cannot read."""
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    words = run.sharding.deepspeed.get("zero_optimization", {})
    try:
        DeepSpeedZeroConfig(**words)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(["zero_optimization", *map(str, first["loc"])])
        raise UserError(
            f"sharding.deepspeed.{name}: {first['msg']}",
            "its words are listed at www.deepspeed.ai/docs/config-json",
        ) from None
    parts = {key: part for key, part in words.items() if isinstance(part, dict)}
    on_disk = [key for key, part in parts.items() if part.get("device") == "nvme"]
    if on_disk and not AsyncIOBuilder().is_compatible(False):
        raise UserError(
            f"{', '.join(on_disk)} on nvme needs DeepSpeed's async_io, which cannot be built here",
            "an image with libaio's headers (libaio-dev), or sharding=deepspeed_zero3_offload",
        )


def config_of(run: Run, dtype: torch.dtype) -> dict[str, Any]:
    """What DeepSpeed is told; `sharding.deepspeed` is its own words and wins."""
    return {
        "train_micro_batch_size_per_gpu": run.training.microbatch_samples,
        "gradient_accumulation_steps": run.microbatches,
        "gradient_clipping": run.optimizer.clip_norm or 0.0,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "steps_per_print": 10**9,
        # torch's own AdamW on the processor: no operator is compiled at the start
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **run.sharding.deepspeed,
    }


def step(engine: Any, batches: Sequence[Batch], scale: float, plan: StepPlan) -> Tensor:
    """Gradient accumulation over the microbatches; returns this rank's summed loss, unscaled."""
    total = torch.zeros((), device=batches[0].tokens_BT.device)
    for number, batch in enumerate(batches):
        engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
        loss = engine(batch, plan.compute_dtype)
        engine.backward(loss * scale, scale_wrt_gas=False)
        if number < len(batches) - 1:
            engine.step()  # which only counts, before the last
        total += loss.detach()
    return total


def forward(engine: Any, batch: Batch, plan: StepPlan) -> Tensor:
    """The summed loss of one microbatch, without gradients."""
    loss: Tensor = engine(batch, plan.compute_dtype)
    return loss


def take_step(
    engine: Any, rate: float, judge: Callable[[Tensor], Callable[[], Tensor]] | None = None
) -> Tensor:
    """Exchange what is left, clip, update, clear; returns the norm before clipping.

    judge: norm -> a call that is 1.0 where the update is left out. Asked before the step, which
    alone knows the norm, it judges by the loss; DeepSpeed leaves out an update of gradients that
    are no numbers.
    """
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
    if judge is not None and bool(judge(torch.zeros(()))()):
        skip_step(engine)
        return torch.tensor(math.nan)
    engine.step()
    norm = torch.tensor(float(engine.get_global_grad_norm()))
    if judge is not None and engine.optimizer.overflow:
        judge(torch.tensor(math.nan))()
    return norm


def skip_step(engine: Any) -> None:
    """Clear the gradients and what else a step leaves, and change no weight.

    It goes DeepSpeed's own way for gradients that are no numbers.
    """
    outer = engine.optimizer
    outer._update_scale = lambda *_: setattr(outer, "overflow", True)
    try:
        engine.step()
    finally:
        del outer._update_scale


def state_of(engine: Any) -> dict[str, Tensor]:
    """Every parameter and moment, whole, in fp32, under the names that all strategies use.

    A copy in the node's memory: a device has room for one whole tensor, and not for all.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    _make_state(engine.optimizer)
    state = {}
    for name, parameter in engine.module.named_parameters():
        weight = safe_get_full_fp32_param(parameter)
        state[f"model/{name}"] = _copied(weight)
        for moment in MOMENTS:
            value = safe_get_full_optimizer_state(parameter, moment)
            state[f"optimizer/{name}/{moment}"] = _copied(value)
        updates = engine.global_steps - engine.skipped_steps
        state[f"optimizer/{name}/step"] = torch.tensor(float(updates))
    return state


def shapes_of(engine: Any) -> dict[str, Tensor]:
    """What `state_of` gives, without its memory: nothing is gathered."""
    state = {}
    for name, parameter in engine.module.named_parameters():
        # of ZeRO-3's, each rank has a part
        shape = getattr(parameter, "ds_shape", parameter.shape)
        whole = torch.empty(shape, dtype=torch.float32, device="meta")
        state[f"model/{name}"] = whole
        state |= {f"optimizer/{name}/{moment}": whole.clone() for moment in MOMENTS}
        state[f"optimizer/{name}/step"] = torch.tensor(0.0, device="meta")
    return state


def set_state(engine: Any, state: dict[str, Tensor]) -> None:
    """Give DeepSpeed's engine the state that a checkpoint holds."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    for name, parameter in engine.module.named_parameters():
        weight = state[f"model/{name}"]
        safe_set_full_fp32_param(parameter, weight)
        # what the next forward pass takes, else renewed by a step only
        with GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter.copy_(weight)
        for moment in MOMENTS:
            safe_set_full_optimizer_state(parameter, state[f"optimizer/{name}/{moment}"], moment)
    count = state[f"optimizer/{name}/step"]
    for inner in engine.optimizer.optimizer.state.values():  # of the torch optimizer inside
        inner["step"] = count.clone()
    engine.global_steps, engine.skipped_steps = int(count), 0


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def whole_parameters(engine: Any) -> dict[str, Tensor]:
    """Name -> the whole parameter in fp32, on every rank."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}


def _make_state(outer: Any) -> None:
    """Give the torch optimizer inside the state that its first step would make."""
    if outer.optimizer.state:
        return
    own = getattr(outer, "single_partition_of_fp32_groups", None)  # of ZeRO-1 and 2
    for partition in outer.fp32_partitioned_groups_flat if own is None else own:
        moments = {moment: torch.zeros_like(partition) for moment in MOMENTS}
        outer.optimizer.state[partition] = {"step": torch.tensor(0.0), **moments}
    if own is not None:
        outer._lazy_init_hp_params_optimizer_state()
