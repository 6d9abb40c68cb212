"""The state_dict that a checkpoint holds of a train state, whichever engine keeps it."""

from torch import Tensor

from atoll.sharding import deepspeed
from atoll.sharding.tied_ends import copied_names
from atoll.train.assemble import TrainState
from atoll.train.optimizer import Judge, clear_gradients, optimizer_state_dict, take_step


def is_deepspeed(train_state: TrainState) -> bool:
    return train_state.run.sharding.step_engine == "deepspeed"


def state_dict(train_state: TrainState) -> dict[str, Tensor]:
    """Every tensor a checkpoint holds, by name; plain shards get the rank's number."""
    if is_deepspeed(train_state):
        return deepspeed.state_of(train_state.wrapped)
    own = train_state.run.optimizer.name == "adamw_8bit" and train_state.world.size > 1
    suffix = f"/rank{train_state.world.rank}" if own else ""
    # what stays is read from the model's source again
    copies = copied_names(train_state.model)  # saved as what they are copies of, bit for bit
    parameters = {
        f"model/{copies.get(name, name)}": p.detach()
        for name, p in train_state.model.named_parameters()
        if p.requires_grad
    }
    moments = {
        f"optimizer/{copies.get(name, name)}/{key}{suffix}": value
        for (name, _, key), value in (
            (word.rpartition("/"), value)
            for word, value in optimizer_state_dict(train_state.optimizer).items()
        )
    }
    averages = {
        f"ema/{copies.get(name, name)}": value
        for name, value in train_state.optimizer.averages.items()
    }
    return parameters | moments | averages


def shapes(train_state: TrainState) -> dict[str, Tensor]:
    """As `state_dict`, for names and sizes alone: nothing is gathered."""
    if is_deepspeed(train_state):
        return deepspeed.shapes_of(train_state.wrapped)
    return state_dict(train_state)


def load_state_dict(train_state: TrainState, state: dict[str, Tensor]) -> None:
    """Take over what was loaded into `state`; the tensors of most engines are its own already."""
    if is_deepspeed(train_state):
        deepspeed.set_state(train_state.wrapped, state)


def parameters_of(train_state: TrainState) -> dict[str, Tensor]:
    """Name in the Hugging Face model -> parameter, as this rank has it."""
    if is_deepspeed(train_state):
        named = deepspeed.whole_parameters(train_state.wrapped)
    else:
        named = dict(train_state.model.named_parameters())
    copies = copied_names(train_state.model)
    return {n.removeprefix("hf."): parameter for n, parameter in named.items() if n not in copies}


def update(train_state: TrainState, rate: float, judge: Judge) -> Tensor:
    """Clip, update, clear the gradients; returns the gradient's norm before clipping."""
    if is_deepspeed(train_state):
        return deepspeed.take_step(train_state.wrapped, rate, judge)
    clip = train_state.run.optimizer.clip_norm
    return take_step(train_state.optimizer, rate, clip, train_state.pipeline_group, judge)


def discard_gradients(train_state: TrainState) -> None:
    """Forget the gradients of a step that is not taken."""
    if is_deepspeed(train_state):
        deepspeed.skip_step(train_state.wrapped)
    else:
        clear_gradients(train_state.optimizer)
