"""A family that nobody tried, tried before it trains: one step of a small copy against eager."""

import copy
from typing import Any

import torch
from torch import Tensor

from atoll.data.batch import Batch
from atoll.errors import UserError, first_line
from atoll.models.build import skeleton
from atoll.models.causal_lm import CausalLM
from atoll.models.parts import PARTS, parts_of
from atoll.models.tiny_copy import TOKENS, VOCABULARY, tiny_copy
from atoll.models.weights import fill, fill_buffers, materialize, random_reader

# held by tests/models/test_families.py, which tries each of them in more ways than this
TRIED = (
    "apertus", "cohere", "gemma", "gemma2", "gemma3_text", "gpt_neox", "granite", "llama",
    "mistral", "mixtral", "olmo2", "olmoe", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3",
)  # fmt: skip
TOLERANCE = 1e-5
ROUNDINGS = 2  # of a family that rounds more than that: so many times its own distance from fp64
LENGTHS = (7, 5, 12, 8)  # of the documents that are packed into one sample


def self_check(config: Any) -> str | None:
    """What was tried, in a sentence, or None for a family that tests have tried.

    Raises `UserError` with the difference where packed documents have not the same loss and
    gradients as each of them alone in transformers, with eager attention, in fp32: to 1e-5, or to
    twice what rounding alone changes there.
    """
    if config.model_type in TRIED or config.model_type in PARTS:
        return None
    small = tiny_copy(config)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            difference, where = _difference(small)
    except UserError:
        raise
    except Exception as error:  # what a family's own code raises at inputs that it does not know
        raise UserError(
            f"{config.model_type} was never tried here, and a small copy of it fails with packed "
            f"documents: {type(error).__name__}: {first_line(error)[:200]}",
            "choose a model of a family that was tried: `atoll models` lists them",
        ) from error
    if not (difference <= TOLERANCE or difference <= ROUNDINGS * _rounding(small)):
        raise UserError(
            f"{config.model_type} was never tried here, and packed documents change it: {where} "
            f"differs by {difference:.2g} from each document alone in transformers",
            "choose a model of a family that was tried: `atoll models` lists them",
        )
    return (
        f"{config.model_type} was never tried here: a small copy of it has the same loss and "
        f"gradients as transformers with eager attention (to {difference:.1g})"
    )


def _difference(config: Any) -> tuple[float, str]:
    """The largest between packed and alone, in the mean loss or a gradient, and its name."""
    from transformers import AutoModelForCausalLM

    hf = skeleton(config)
    model = CausalLM(hf, parts_of(hf), TOKENS // 2).eval()
    materialize(model, torch.device("cpu"))
    empty = skeleton(config)
    fill(hf, random_reader(empty, parts_of(empty), 0))
    fill_buffers(hf)
    plain: Any = AutoModelForCausalLM.from_config(
        copy.deepcopy(config),  # else both would have its attention
        attn_implementation="eager",
        dtype=torch.float32,
        trust_remote_code=False,
    ).eval()
    with torch.no_grad():
        for own, parameter in zip(hf.parameters(), plain.parameters(), strict=True):
            own.copy_(parameter.add_(torch.randn(own.shape) * 0.02))
    batch, targets = _packed(), TOKENS - len(LENGTHS)
    packed = model(batch, torch.float32) / targets
    alone = sum(_loss(plain, tokens) for tokens in batch.tokens_BT[0].split(LENGTHS)) / targets
    packed.backward()
    torch.as_tensor(alone).backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    own = {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}
    differences = {"the loss": float(abs(packed - alone).detach())} | {
        name: float((own.get(name, torch.zeros(())) - gradient).abs().max())
        for name, gradient in expected.items()
    }
    # not a number is more than any
    worst = max(differences, key=lambda n: (differences[n] != differences[n], differences[n]))
    return differences[worst], worst


def _rounding(config: Any) -> float:
    """How far a gradient of the family in transformers is from that in fp64, by rounding alone."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        single: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            attn_implementation="eager",
            dtype=torch.float32,
            trust_remote_code=False,
        ).eval()
        with torch.no_grad():
            for parameter in single.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.02)
        batch = _packed()
    double = copy.deepcopy(single).double()
    for model in (single, double):
        losses = [_loss(model, tokens) for tokens in batch.tokens_BT[0].split(LENGTHS)]
        (torch.stack(losses).sum() / (TOKENS - len(LENGTHS))).backward()
    pairs = zip(single.parameters(), double.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None)


def _loss(plain: Any, tokens_T: Tensor) -> Tensor:
    logits = plain(input_ids=tokens_T[None], use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, tokens_T[1:], reduction="sum")


def _packed() -> Batch:
    tokens = torch.randint(3, VOCABULARY, (1, TOKENS))
    labels = torch.cat([tokens[0, 1:], tokens.new_tensor([-100])])[None]
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    labels[0, ends[1:] - 1] = -100
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return Batch(tokens, labels, positions, ends.int(), LENGTHS, TOKENS)
