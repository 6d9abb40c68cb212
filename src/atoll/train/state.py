"""What a checkpoint holds of a trainee, whichever engine keeps it."""

from torch import Tensor

from atoll.sharding import deepspeed
from atoll.train.assemble import Trainee
from atoll.train.optimizer import optimizer_state, take_step


def is_deepspeed(trainee: Trainee) -> bool:
    return trainee.run.sharding.step_engine == "deepspeed"


def state_of(trainee: Trainee) -> dict[str, Tensor]:
    """Every tensor a checkpoint holds, by name; plain shards get the rank's number."""
    if is_deepspeed(trainee):
        return deepspeed.state_of(trainee.wrapped)
    own = trainee.run.optimizer.name == "adamw_8bit" and trainee.world.size > 1
    suffix = f"/rank{trainee.world.rank}" if own else ""
    # what stays is read from the model's source again
    parameters = {
        f"model/{name}": p.detach()
        for name, p in trainee.model.named_parameters()
        if p.requires_grad
    }
    moments = {
        f"optimizer/{name}{suffix}": value
        for name, value in optimizer_state(trainee.stepper).items()
    }
    return parameters | moments


def set_state(trainee: Trainee, state: dict[str, Tensor]) -> None:
    """Take over what was loaded into `state`; the tensors of most engines are its own already."""
    if is_deepspeed(trainee):
        deepspeed.set_state(trainee.wrapped, state)


def parameters_of(trainee: Trainee) -> dict[str, Tensor]:
    """Name in the Hugging Face model -> parameter, as this rank has it."""
    if is_deepspeed(trainee):
        named = deepspeed.whole_parameters(trainee.wrapped)
    else:
        named = dict(trainee.model.named_parameters())
    return {name.removeprefix("hf."): parameter for name, parameter in named.items()}


def update(trainee: Trainee, rate: float) -> Tensor:
    """Clip, update, clear the gradients; returns the gradient's norm before clipping."""
    if is_deepspeed(trainee):
        return deepspeed.take_step(trainee.wrapped, rate)
    clip = trainee.run.optimizer.clip_norm
    return take_step(trainee.stepper, rate, clip, trainee.pipeline_group)
