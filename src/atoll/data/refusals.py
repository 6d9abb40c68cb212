"""What a text cannot be made into: a split without documents, more than the disk has room for."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from atoll import run_dir
from atoll.data import shards
from atoll.data.encode import CorpusBlocks
from atoll.data.shards import TokenManifest, TokenPlan
from atoll.errors import UserError
from atoll.settings import Run

# A token is rarely made of more text than this: the least room the tokens can need.
TEXT_BYTES_PER_TOKEN = 6


def refuse_empty_split(run: Run, corpora: list[CorpusBlocks]) -> None:
    """Find by counting, before any work, that no document falls to a split."""
    fraction = run.data.validation.fraction
    documents = corpora[0].documents
    held_out = int(corpora[0].source.held_out(0, documents).sum())
    if fraction is None or 0 < held_out < documents:
        return
    raise UserError(
        f"the {'train' if held_out else 'validation'} split is empty: with "
        f"data.validation.fraction = {fraction}, {held_out} of {documents} documents are held out",
        "make more documents of the text with data.document=paragraph or line, or set "
        "data.validation.fraction nearer to one half",
    )


def refuse_other_text(run: Run, fingerprints: Mapping[str, str]) -> None:
    """Find that a run which has steps to take would go on with another text than it began with.

    fingerprints: of the text as it is now, by its splits.
    """
    folder = run_dir.folder(run)
    steps = run_dir.complete_checkpoints(folder)
    is_over = run_dir.result_file(folder).is_file() and run_dir.export(folder).is_dir()
    if not steps or is_over:
        return
    manifest = run_dir.checkpoint(folder, steps[-1]) / "manifest.json"
    try:
        texts = json.loads(manifest.read_bytes()).get("progress", {}).get("texts", [])
    except (ValueError, AttributeError):
        return  # one that is damaged is set aside by the ranks, who judge the one before it
    if texts and shards.text_digest(fingerprints) not in texts:
        raise UserError(
            f"run {run.name} has trained {steps[-1]} steps, and its text has changed since: a file "
            "is new, gone or another one",
            "put the text back as it was, or begin anew with another name=",
        )


def refuse_blank_split(manifest: TokenManifest) -> None:
    """Find that every document of a split was blank."""
    for split in shards.SPLITS:
        if not manifest.tokens(split):
            raise UserError(
                f"the {split} split is empty: all of its {manifest.blank(split)} documents are "
                f"blank",
                "give text with words in it, or choose another data.text_field",
            )


def refuse_too_long(manifest: TokenManifest, run: Run) -> None:
    """Find that no conversation of a split fits into a sample."""
    for split in shards.SPLITS:
        if not manifest.tokens(split) and manifest.dropped(split):
            raise UserError(
                f"the {split} split is empty: each of its {manifest.dropped(split)} conversations "
                f"has more than {run.data.sequence_tokens} tokens, to its first answer or in all",
                "set data.sequence_tokens higher, or data.long_conversations=cut",
            )


def refuse_other_media(folder: Path, plan: TokenPlan, largest_token: int) -> None:
    """Find what stands for an image or a sound: a model that reads text has no row for it."""
    if largest_token < plan.vocabulary_tokens:
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(shards.tokenizer_folder(folder) / "tokenizer.json"))
    raise UserError(
        f"the text has {tokenizer.id_to_token(largest_token)!r}, token {largest_token} of the "
        f"tokenizer: it stands for what is no text, and only {plan.vocabulary_tokens} are of text",
        "take it out of the text",
    )


def least_bytes(corpora: list[CorpusBlocks]) -> int:
    spans = (span for text in corpora for block in text.blocks for span in block.spans)
    text_bytes = sum(span.stop - span.start for span in spans)
    return 2 * text_bytes // TEXT_BYTES_PER_TOKEN + 8 * sum(text.documents for text in corpora)


def refuse_small_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    present = sum(path.stat().st_size for path in folder.glob("*/*.ds*"))
    if needed - present > free:
        raise UserError(
            f"too little room for the tokens in {folder}: {free:,} bytes free, "
            f"at least {needed - present:,} needed",
            "make room, or set folders.prepared to another file system",
        )
