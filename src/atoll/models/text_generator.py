"""Continue a text with a Hugging Face model: an export, or an adapter beside its model."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from atoll.data.chat_template import ChatTemplate, turn_end_id
from atoll.errors import UserError
from atoll.models.source import local_folder
from atoll.settings import Generation

# no code of theirs is run, and nobody is asked whether it may be
PLAIN: dict[str, Any] = {"dtype": "auto", "trust_remote_code": False}
NO_ROOM = "no room on the device for"
MOST_OF_DEVICE = 0.9  # of what is free, for weights: the rest is for a text's keys and values


class TextGenerator(NamedTuple):
    """A model that continues texts, or answers them as what a user says, and its tokenizer."""

    model: Any
    tokenizer: Any
    chat: bool = False


def from_folder(folder: Path, device: torch.device | None = None) -> TextGenerator:
    """The model of a Hugging Face folder, or of a folder with a peft adapter.

    An export that is an adapter alone has it one folder down. device: None chooses one by what it
    has free, of which what torch keeps of it in this process is no part.

    Raises `UserError` where it is neither, or its adapter's model is not to be had.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    below = folder / "adapter"
    if not (folder / "config.json").is_file() and (below / "adapter_config.json").is_file():
        folder = below
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        from peft import PeftModel

        home = _base_model_folder(adapter)
        model: Any = AutoModelForCausalLM.from_pretrained(home, **PLAIN)
        model = PeftModel.from_pretrained(model, str(folder))
        # in an export of ours the tokenizer stands beside the merged model, one folder up
        places = (folder, folder.parent, home)
        home = next((place for place in places if (place / "tokenizer.json").is_file()), home)
    else:
        _refuse_other_kinds(folder)
        home = folder
        model = AutoModelForCausalLM.from_pretrained(folder, **PLAIN)
    return TextGenerator(
        model.eval().to(device or _device_for(model)),
        AutoTokenizer.from_pretrained(home, trust_remote_code=False),
    )


def _device_for(model: Any) -> torch.device:
    """A GPU where the whole model fits into it, else the processors: slow, and it ends."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    free, _ = torch.cuda.mem_get_info()
    if needed <= MOST_OF_DEVICE * free:
        return torch.device("cuda")
    print(
        f"{needed / 2**30:.0f} GiB of weights, {free / 2**30:.0f} GiB free on a device: the "
        "processors say it",
        file=sys.stderr,
    )
    return torch.device("cpu")


@contextmanager
def memory_in_two_lines(what: str, hint: str) -> Iterator[None]:
    """Say in two lines that a device has no room for something.

    Raises `UserError` with torch's own figures.
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        words = ". ".join(str(error).strip().split(". ")[:2])
        raise UserError(f"{NO_ROOM} {what}: {words}", hint) from None


def continue_text(
    generator: TextGenerator, prompt: str, settings: Generation, streamer: Any
) -> str:
    """The prompt and its continuation, or in a chat the answer; to the streamer as it comes.

    Raises `UserError` for a prompt that the tokenizer cannot spell or that leaves no room.
    """
    model, tokenizer, chat = generator
    stops = _stops(generator) if chat else {}
    try:
        text = ChatTemplate(tokenizer).prompt([_asked(prompt)]) if chat else prompt
        inputs = tokenizer(
            text, add_special_tokens=not chat, return_tensors="pt", return_token_type_ids=False
        )
    except UserError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(
            f"the tokenizer has no tokens for the prompt {prompt!r}: {error}",
            "use characters that were in the text it was made from",
        ) from None
    used = inputs["input_ids"].shape[1]
    room = model.config.max_position_embeddings - used
    if not used or room < 1:
        raise UserError(
            f"the prompt has {used} tokens, the model {room + used} positions",
            "give a prompt of at least one token, and of fewer than the model's positions",
        )
    tokens_BT = model.generate(
        **inputs.to(model.device),
        do_sample=True,
        max_new_tokens=min(settings.max_new_tokens, room),
        temperature=settings.temperature,
        top_p=settings.top_p,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
        streamer=streamer,
        **stops,
    )
    shown_T = tokens_BT[0, used:] if chat else tokens_BT[0]
    text = str(tokenizer.decode(shown_T, skip_special_tokens=True))
    return text.removesuffix(ChatTemplate(tokenizer).turn_end()) if chat else text


def _asked(prompt: str) -> dict[str, str]:
    return {"role": "user", "content": prompt}


def _stops(generator: TextGenerator) -> dict[str, list[int]]:
    """The tokens that end an answer: the template's, the tokenizer's, and the model's own."""
    known = generator.model.generation_config.eos_token_id
    ids = {turn_end_id(generator.tokenizer), generator.tokenizer.eos_token_id}
    ids |= {*known} if isinstance(known, list) else {known}
    return {"eos_token_id": sorted(token for token in ids if token is not None)}


def _base_model_folder(adapter: Path) -> Path:
    """The folder of the model that an adapter belongs to."""
    config = json.loads(adapter.read_text())
    name = config.get("base_model_name_or_path") or ""
    beside = (adapter.parent / name).resolve() if name else adapter.parent
    return beside if beside.is_dir() else local_folder(name, config.get("revision"))


def _refuse_other_kinds(folder: Path) -> None:
    config = folder / "config.json"
    if not config.is_file():
        raise UserError(
            f"no exported model at {folder}",
            "finish the run first: start its launch.sh again; or name a checkpoint",
        )
    kinds = json.loads(config.read_text()).get("architectures") or []
    if any("Classification" in kind for kind in kinds):
        raise UserError(
            f"{folder} holds {kinds[0]}, which gives labels and writes no text",
            "evaluate it: atoll evaluate task=classification model.source=FOLDER …",
        )
