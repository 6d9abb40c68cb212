"""A model's continuations of prompts, printed as they come or kept with its run."""

import argparse
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers.utils import logging

from atoll import run_dir
from atoll.data.shards import tokenizer_folder
from atoll.data.tokenize import open_prepared
from atoll.data.waits import refuse_missing
from atoll.data.windows import Windows
from atoll.errors import UserError
from atoll.models.adapter import adapt, adapted_reader
from atoll.models.build import weights_for
from atoll.models.text_generator import TextGenerator, continue_text, from_folder
from atoll.models.weights import (
    fill,
    fill_buffers,
    fill_stored_buffers,
    materialize,
    stored_buffers,
)
from atoll.monitor.loggers import add_samples
from atoll.settings import Generation, Run
from atoll.sharding.process_group import World
from atoll.train import checkpoint
from atoll.train.parameter_groups import freeze
from atoll.train.tasks import TASKS
from atoll.train.untrained import write_untrained


def sample(
    arguments: argparse.Namespace,
    run: Run | None,
    prompts: list[str],
    settings: Generation,
    seed: int,
) -> None:
    """Continue the prompts as the words of `atoll generate` ask."""
    logging.disable_progress_bar()  # of transformers, which shows one without a terminal too
    is_whole_run = run_dir.settings_file(arguments.where).is_file() and arguments.out is None
    has_both = is_whole_run and arguments.both
    generator, printed = text_generator_of(arguments.where, run), arguments.out is None
    printed = printed and not has_both  # `atoll summary` shows them beside each other
    if arguments.chat or (run is not None and run.data.holds_conversations):
        generator = generator._replace(chat=True)
    texts = continue_prompts(generator, prompts, settings, seed, printed)
    if arguments.out is not None:
        pairs = zip(prompts, texts, strict=True)
        lines = [json.dumps({"prompt": p, "text": t}, ensure_ascii=False) for p, t in pairs]
        run_dir.write_whole(arguments.out, "\n".join(lines) + "\n")
    elif is_whole_run:
        _keep(run_dir.sample_file(arguments.where), generator, prompts, texts)
    if has_both and run is not None:
        untrained = _untrained(run)._replace(chat=generator.chat)
        texts = continue_prompts(untrained, prompts, settings, seed, False)
        _keep(run_dir.untrained_sample_file(arguments.where), untrained, prompts, texts)
    if is_whole_run and run is not None:
        _log_samples(run, arguments.where)


def _log_samples(run: Run, folder: Path) -> None:
    """Where a run has loggers that show texts."""
    step = max(run_dir.complete_checkpoints(folder), default=0)
    samples = {
        "before training": (run_dir.untrained_sample_file(folder), 0),
        "after training": (run_dir.sample_file(folder), step),
    }
    for name, (file, at_step) in samples.items():
        if file.is_file():
            add_samples(run, folder, at_step, {name: file.read_text()})


def _keep(file: Path, generator: TextGenerator, prompts: list[str], texts: list[str]) -> None:
    if generator.chat:
        texts = [_said(*pair) for pair in zip(prompts, texts, strict=True)]
    run_dir.write_whole(file, "\n".join(texts) + "\n")


def _untrained(run: Run) -> TextGenerator:
    """The model that a run began with."""
    with TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        write_untrained(run, Path(folder) / "model", tokenizer_folder(run_dir.prepared(run)))
        return from_folder(Path(folder) / "model")


def text_generator_of(
    where: Path, run: Run | None, device: torch.device | None = None
) -> TextGenerator:
    """The model of a folder; a run's own is its export. device: None chooses one, as for text."""
    if (where / "manifest.json").is_file() and where.parent.name == "checkpoints":
        if run is None:
            raise UserError(
                f"{where} is a checkpoint outside of its run folder",
                "leave it in runs/NAME/checkpoints: run.yaml says what it is made of",
            )
        generator = from_checkpoint(where, run)
        return generator._replace(model=generator.model.to(device)) if device else generator
    is_run = run_dir.settings_file(where).is_file()
    return from_folder(run_dir.export(where) if is_run else where, device)


def from_checkpoint(path: Path, run: Run) -> TextGenerator:
    """The model of a training state, in one process whatever the ranks that saved it."""
    from transformers import AutoTokenizer

    cpu = torch.device("cpu")
    alone = World(0, 1, cpu)
    is_whole = run.data.window_shards is None
    manifest = open_prepared(run) if is_whole else Windows(run, refuse_missing).manifest
    trained_with = checkpoint.load_progress(path).tokenizer
    if trained_with and trained_with != manifest.tokenizer_sha256:
        raise UserError(
            f"{path} was trained on tokens of a tokenizer that has changed since",
            "put its text back as it was and run `atoll tokenize RUN_FOLDER`, or give the run's "
            "export",
        )
    task = TASKS[run.task.name]
    config = task.config(run, manifest.vocabulary)
    model = task.model(config, run, manifest.vocabulary)
    adapt(model.hf, run.model.model_copy(update={"quantisation": "none"}))
    freeze(run.optimizer, model)
    shapes = {name: tuple(p.shape) for name, p in model.hf.named_parameters()}
    materialize(model, cpu)
    stays = not all(p.requires_grad for p in model.parameters())
    if stays or stored_buffers(model.hf):  # neither is in any checkpoint
        with weights_for(run.model, config, run.seed) as read:
            read = adapted_reader(read, run.seed, shapes, run.model.lora)
            (fill if stays else fill_stored_buffers)(model.hf, read)
    fill_buffers(model.hf)
    learning = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    checkpoint.load(path, {f"model/{name}": p for name, p in learning.items()}, alone)
    model.hf.set_attn_implementation("sdpa")
    folder = run_dir.prepared(run) / "tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return TextGenerator(model.hf.eval(), tokenizer)


def continue_prompts(
    generator: TextGenerator, prompts: list[str], settings: Generation, seed: int, printed: bool
) -> list[str]:
    """Continue each prompt, the same for the same seed; printed: on the terminal, as it comes."""
    from transformers import TextStreamer

    texts, chat = [], generator.chat
    for prompt in prompts:
        torch.manual_seed(seed)
        if chat and printed:
            print(_said(prompt, ""), end="", flush=True)
        make: Any = TextStreamer
        streamer = make(generator.tokenizer, skip_prompt=chat, skip_special_tokens=True)
        texts.append(continue_text(generator, prompt, settings, streamer if printed else None))
    return texts


def _said(prompt: str, answer: str) -> str:
    return f"user: {prompt}\nassistant: {answer}"
