"""Many campaigns of the atlas at once on one device: every weight is a stack, one of each facility.

The arithmetic is that of atlas_rounds.py, where facilities train one after the other; the test
beside it holds both to the same losses. Models this small leave a GPU idle, a stack of a thousand
does not. What is sent are whole models; fragments stay with atlas_rounds.py.
Legend: C campaigns, K facilities of each, R = C*K models, B samples, T tokens, P values of a model.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from atlas_rounds import BATCH, DOWN, SYNCHRONOUS, Cell, Sent, drawn, model_of, settings
from atlas_texts import TOKENS, Texts, divided
from stacked_llama import Stack, adamw, losses, mean_losses, shares_answered
from torch import Tensor

from atoll.federation import combine
from atoll.federation.codec import BLOCK
from atoll.federation.combine import COMBINE
from atoll.federation.error_feedback import encoded_tensors, write_encoded
from atoll.federation.next_model import RESIDUAL
from atoll.federation.step import STEPS, fresh_memory
from atoll.federation.tensors import Stretch
from atoll.train.optimizer import learning_rate

LOCAL = ("update", "outer_rate", "beta1")  # what alone differs among cells that encode together


@dataclass
class Together:
    """Campaigns of as many facilities and steps each, at some step of theirs."""

    cells: Sequence[Cell]
    texts: dict[str, Texts]  # by how they are divided
    config: Any  # of the model, as Hugging Face's
    weights: Stack  # [R, ...], of facility k of campaign c at c*K + k
    means: Stack  # AdamW's two moments
    squares: Stack
    rounds: "list[Rounds]"

    @property
    def facilities(self) -> int:
        return self.cells[0].facilities

    @property
    def device(self) -> torch.device:
        return next(iter(self.weights.values())).device


@dataclass
class Rounds:
    """Campaigns in a row whose rounds are as long, and which encode alike."""

    first: int
    cells: Sequence[Cell]
    parts: "list[Part]"

    @property
    def last(self) -> int:
        return self.first + len(self.cells)


@dataclass
class Part:
    """Tensors that are encoded together: in one piece, where each of them is whole blocks."""

    names: Sequence[str]
    values_CP: Tensor  # of the global models
    residual_RP: Tensor  # what each facility's encoding has left out
    memory_CP: Stack  # of the server's step, and what the way down has left out


def run_together(cells: Sequence[Cell], device: torch.device, compiled: bool) -> list[dict]:
    """What run_cell gives, for each of these cells, which have as many facilities and steps."""
    # sums in one piece: a GPU has no cache of a processor's to care for
    with torch.device(device), patch.object(combine, "CACHED", 1 << 40):
        campaigns = begun(in_order(cells), device)
        loss = torch.compile(losses) if compiled else losses
        update = torch.compile(adamw) if compiled else adamw
        train(campaigns, loss, update)
        found = dict(zip(campaigns.cells, outcomes(campaigns), strict=True))
    return [found[cell] for cell in cells]


def in_order(cells: Sequence[Cell]) -> list[Cell]:
    """What is averaged in every step first, then what encodes alike side by side."""
    alike = {(c.facilities, c.steps, c.optimizer, c.fragments, c.overlap_rounds) for c in cells}
    [(_, steps, *rest)] = alike
    if rest != ["adamw", 1, 0] or any(steps % cell.inner_steps for cell in cells):
        raise ValueError(f"whole rounds of whole models with AdamW, not {rest}")
    return sorted(cells, key=lambda c: (c.update != SYNCHRONOUS, _alike(c), _local(c)))


def _alike(cell: Cell) -> tuple[Any, ...]:
    return cell.codec, cell.inner_steps


def _local(cell: Cell) -> tuple[Any, ...]:
    return tuple(getattr(cell, name) for name in LOCAL)


def begun(cells: Sequence[Cell], device: torch.device) -> Together:
    with torch.device("cpu"):
        of_each = {cell.seed: cell for cell in cells}
        models = {seed: model_of(settings(cell)) for seed, cell in of_each.items()}
        texts = {split: divided(cells[0].facilities, split) for split in {c.split for c in cells}}
    config = next(iter(models.values())).hf.config
    of_seed = {seed: dict(model.named_parameters()) for seed, model in models.items()}
    owners = [cell.seed for cell in cells for _ in range(cell.facilities)]
    weights = {
        name: torch.stack([of_seed[seed][name].detach().to(device) for seed in owners])
        for name in of_seed[owners[0]]
    }
    means, squares = ({n: torch.zeros_like(w) for n, w in weights.items()} for _ in range(2))
    for weight in weights.values():
        weight.requires_grad_()
    campaigns = Together(cells, texts, config, weights, means, squares, [])
    campaigns.rounds += rounds_of(campaigns)
    return campaigns


def rounds_of(campaigns: Together) -> Iterator[Rounds]:
    first = sum(cell.update == SYNCHRONOUS for cell in campaigns.cells)
    for _, group in groupby(campaigns.cells[first:], _alike):
        cells = list(group)
        rounds = Rounds(first, cells, [])
        rounds.parts += parts_of(campaigns, rounds)
        yield rounds
        first = rounds.last


def parts_of(campaigns: Together, rounds: Rounds) -> Iterator[Part]:
    """Of whole blocks all tensors in one piece; those with a short block each for itself."""
    sizes = {name: weight[0].numel() for name, weight in campaigns.weights.items()}
    whole = [name for name, size in sizes.items() if size % BLOCK == 0]
    kinds: dict[str, float] = {}
    for cell in rounds.cells:
        kinds |= fresh_memory(cell.rule)
    for names in ([whole] if whole else []) + [[name] for name in sizes if name not in whole]:
        values_RP = flat(campaigns, names, rounds)
        values_CP = values_RP[:: campaigns.facilities].clone()
        memory = {kind: torch.full_like(values_CP, begin) for kind, begin in kinds.items()}
        memory[RESIDUAL] = torch.zeros_like(values_CP)
        yield Part(names, values_CP, torch.zeros_like(values_RP), memory)


@torch.no_grad()
def flat(campaigns: Together, names: Sequence[str], rounds: Rounds) -> Tensor:
    """The facilities' own weights, [R, P] of these campaigns."""
    own = slice(rounds.first * campaigns.facilities, rounds.last * campaigns.facilities)
    return torch.cat([campaigns.weights[name][own].flatten(1) for name in names], dim=1)


def train(campaigns: Together, loss: Callable[..., Tensor], update: Callable[..., None]) -> None:
    cells, steps = campaigns.cells, campaigns.cells[0].steps
    rates_SR = rates(campaigns)
    batches = Batches(campaigns)
    synchronous = sum(cell.update == SYNCHRONOUS for cell in cells)
    optimizer = settings(cells[0]).optimizer
    for step in range(1, steps + 1):
        loss(campaigns.weights, batches.of(step), campaigns.config).sum().backward()
        average(campaigns, synchronous)
        step_tensor = torch.tensor(float(step), device=campaigns.device)
        update(
            campaigns.weights,
            {name: weight.grad for name, weight in campaigns.weights.items()},
            campaigns.means,
            campaigns.squares,
            rates_SR[step - 1],
            step_tensor,
            (*optimizer.betas, optimizer.epsilon, optimizer.weight_decay),
        )
        for weight in campaigns.weights.values():
            weight.grad = None
        for rounds in campaigns.rounds:
            if step % rounds.cells[0].inner_steps == 0:
                average_models(campaigns, rounds)


def rates(campaigns: Together) -> Tensor:
    """Of every step the rate of each model: [steps, R]."""
    steps = range(1, campaigns.cells[0].steps + 1)
    of_each = {cell.rate: cell for cell in campaigns.cells}
    of_rate = {
        rate: [learning_rate(settings(cell).optimizer, s, cell.steps, 1) for s in steps]
        for rate, cell in of_each.items()
    }
    rows = [of_rate[cell.rate] for cell in campaigns.cells for _ in range(cell.facilities)]
    return torch.tensor(rows).T.contiguous()


class Batches:
    """What each facility reads in a step: the places that atlas_rounds.batch_of draws."""

    def __init__(self, campaigns: Together) -> None:
        texts, offsets, length = [], {}, 0
        for split, of_split in campaigns.texts.items():
            for place, text in enumerate(of_split.training):
                offsets[split, place] = length
                texts.append(text)
                length += len(text)
        self.text_N = torch.cat(texts).to(campaigns.device)
        steps = range(1, campaigns.cells[0].steps + 1)
        seen: dict[tuple[Any, ...], Tensor] = {}
        rows = []
        for cell in campaigns.cells:
            for place in range(cell.facilities):
                key = (cell.seed, cell.split, place)
                if key not in seen:
                    size = len(campaigns.texts[cell.split].training[place]) - TOKENS
                    places = [places_of(cell.seed, place, step, size) for step in steps]
                    seen[key] = torch.stack(places) + offsets[cell.split, place]
                rows.append(seen[key])
        self.places_RSB = torch.stack(rows).to(campaigns.device)
        self.window_T = torch.arange(TOKENS + 1, device=campaigns.device)

    def of(self, step: int) -> Tensor:
        """Inputs and targets, [R, B, T + 1]."""
        return self.text_N[self.places_RSB[:, step - 1, :, None] + self.window_T].long()


@cache
def places_of(seed: int, place: int, step: int, size: int) -> Tensor:
    with torch.device("cpu"):
        return torch.randint(size, (BATCH,), generator=drawn(seed, place, step))


@torch.no_grad()
def average(campaigns: Together, synchronous: int) -> None:
    """Of the first campaigns, which step together, every facility takes the mean gradient."""
    models = synchronous * campaigns.facilities
    for weight in campaigns.weights.values() if models else ():
        gradients = weight.grad[:models].unflatten(0, (synchronous, campaigns.facilities))
        gradients.copy_(gradients.mean(1, keepdim=True).expand_as(gradients))


@torch.no_grad()
def average_models(campaigns: Together, rounds: Rounds) -> None:
    """A round's end: encode, combine, step, encode, add, and send to all."""
    count, codec = campaigns.facilities, rounds.cells[0].codec
    for part in rounds.parts:
        before_RP = part.values_CP.repeat_interleave(count, 0)
        change_RP = flat(campaigns, part.names, rounds) - before_RP
        update_RP, part.residual_RP = through(codec, change_RP, part.residual_RP)
        added_CP = torch.cat(list(stepped(update_RP, part, rounds, count)))
        down = DOWN.get(codec, codec)
        decoded_CP, part.memory_CP[RESIDUAL] = through(down, added_CP, part.memory_CP[RESIDUAL])
        part.values_CP += decoded_CP
        put_back(campaigns, rounds, part)


def stepped(update_RP: Tensor, part: Part, rounds: Rounds, count: int) -> Iterator[Tensor]:
    """What the servers add, campaigns of the same rule together."""
    first = 0
    for _, group in groupby(rounds.cells, _local):
        cells = list(group)
        own = slice(first, first + len(cells))
        of_K = update_RP[first * count : own.stop * count].unflatten(0, (len(cells), count))
        shares_K = torch.full((count,), 1 / count, dtype=torch.float64, device="cpu")
        combined_N = COMBINE[cells[0].rule.combine](
            of_K.transpose(0, 1).flatten(1), shares_K, cells[0].rule
        )
        memory = {kind: values[own].view(-1) for kind, values in part.memory_CP.items()}
        yield STEPS[cells[0].update](combined_N, memory, cells[0].rule).view(len(cells), -1)
        first = own.stop


def through(codec: str, values_RP: Tensor, residual_RP: Tensor) -> tuple[Tensor, Tensor]:
    """What whoever reads an encoding finds, and what it left out: of each row for itself."""
    short = -values_RP.shape[1] % BLOCK
    if short and codec == "int2":  # its scale counts the values of a block: no others may be there
        return torch.vmap(_written, in_dims=(None, 0, 0))(codec, values_RP, residual_RP)
    padded, left = (F.pad(x, (0, short)) for x in (values_RP, residual_RP))
    both = _written(codec, padded.flatten(), left.flatten())
    decoded, left = (x.view_as(padded)[:, : values_RP.shape[1]].contiguous() for x in both)
    return decoded, left


def _written(codec: str, values_N: Tensor, residual_N: Tensor) -> tuple[Tensor, Tensor]:
    return write_encoded(Sent(), codec, Stretch("", 0, len(values_N)), values_N, residual_N)


def put_back(campaigns: Together, rounds: Rounds, part: Part) -> None:
    """Global weights in the place of every facility's own."""
    own = slice(rounds.first * campaigns.facilities, rounds.last * campaigns.facilities)
    sizes = [campaigns.weights[name][0].numel() for name in part.names]
    for name, values_CP in zip(part.names, part.values_CP.split(sizes, dim=1), strict=True):
        weight = campaigns.weights[name][own].unflatten(0, (-1, campaigns.facilities))
        weight.copy_(values_CP.view(len(values_CP), 1, *weight.shape[2:]).expand_as(weight))


@torch.no_grad()
def outcomes(campaigns: Together) -> Iterator[dict[str, Any]]:
    """Of every campaign what run_cell says; after its last step all its facilities are alike."""
    weights = {name: weight[:: campaigns.facilities] for name, weight in campaigns.weights.items()}
    texts = next(iter(campaigns.texts.values()))  # what nobody trains on is the same for all
    found = {
        "validation": mean_losses(weights, texts.validation_BT, campaigns.config),
        "test": mean_losses(weights, texts.test_BT, campaigns.config),
        "answered": shares_answered(weights, texts.questions_QAT, campaigns.config),
    }
    shapes = {name: tuple(weight.shape[1:]) for name, weight in weights.items()}
    parameters = sum(weight[0].numel() for weight in weights.values())
    for number, cell in enumerate(campaigns.cells):
        values = {name: float(of_all[number]) for name, of_all in found.items()}
        yield values | {"bytes": sent_bytes(cell, shapes), "parameters": parameters}


def sent_bytes(cell: Cell, shapes: dict[str, tuple[int, ...]]) -> int:
    """Of a facility, both ways."""

    def size(codec: str) -> int:
        stored = encoded_tensors(shapes, codec).values()
        return sum(dtype.itemsize * length for dtype, (length,) in stored)

    if cell.update == SYNCHRONOUS:
        return 2 * size("fp32") * cell.steps
    rounds = cell.steps // cell.inner_steps
    return rounds * (size(cell.codec) + size(DOWN.get(cell.codec, cell.codec)))
