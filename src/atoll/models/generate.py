"""Sample from an exported model with transformers alone."""

import argparse
from pathlib import Path

from atoll import run_dir
from atoll.errors import UserError
from atoll.settings import Generation, load_run


def main(argv: list[str]) -> int:
    """`atoll generate RUN`: print a sampled text and keep it in the run folder."""
    parser = argparse.ArgumentParser(prog="atoll generate", description=main.__doc__)
    parser.add_argument("run_folder", type=Path, metavar="RUN")
    parser.add_argument("--prompt", help="default: generation.prompt of the run")
    arguments = parser.parse_args(argv)
    run = load_run(run_dir.settings_file(arguments.run_folder))
    settings = run.generation
    if arguments.prompt is not None:
        settings = settings.model_copy(update={"prompt": arguments.prompt})
    text = sample(run_dir.export(arguments.run_folder), settings, run.seed)
    run_dir.write_whole(run_dir.sample_file(arguments.run_folder), text + "\n")
    print(text)
    return 0


def sample(export: Path, settings: Generation, seed: int) -> str:
    """The prompt and its continuation; the same for the same seed.

    Raises `UserError` if there is no export yet.
    """
    if not (export / "config.json").is_file():
        raise UserError(
            f"no exported model at {export}", "finish the run first: start its launch.sh again"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export, dtype="auto").eval()
    inputs = tokenizer(settings.prompt, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(seed)
    tokens_BT = model.generate(
        **inputs,
        do_sample=True,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
    )
    return str(tokenizer.decode(tokens_BT[0], skip_special_tokens=True))
