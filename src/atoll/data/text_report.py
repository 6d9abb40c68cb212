"""`atoll tokenize RUN_FOLDER --report`: what is in the text of each source, on one page.

It is read from the tokens, so that it can be made wherever they are, of a bundle too. Counts and
exact duplicates are of all documents; near duplicates and languages of a keyed draw of them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import py3langid
from tokenizers import Tokenizer

from atoll import run_dir
from atoll.data import shards
from atoll.data.duplicates import digests, near_duplicates
from atoll.data.keyed_hash import U64
from atoll.data.order import Ints, sample_ids
from atoll.data.shards import SPLITS, TokenManifest
from atoll.settings import Run

DRAWN_DOCUMENTS = 10_000
READ_TOKENS = 4096  # of a drawn document
LANGUAGE_CHARACTERS = 1000  # of a drawn document, that its language is told from
MOST_LANGUAGES = 8
BAR = 40  # letters of the longest
DRAW_KEY = 0
Documents = list[npt.NDArray[np.unsignedinteger[Any]]]


@dataclass(frozen=True)
class TextFacts:
    """What is known of the text of one source."""

    name: str
    manifest: TokenManifest
    lengths: Ints  # tokens of each document
    digests: U64  # of each document
    drawn: int  # documents that were compared and looked at
    near: int  # of those, nearly the same as another
    languages: Counter[str]  # ISO 639-1

    @property
    def repeated(self) -> int:
        return len(self.digests) - len(np.unique(self.digests))


def text_report(run: Run) -> str:
    """The page, as Markdown: a table with a column for each source, then their lengths."""
    facts = [
        _facts(data.name, folder)
        for data, folder in zip(run.data.each, run_dir.prepared_sources(run), strict=True)
    ]
    lines = [f"# Text of {run.data.name}", "", *_table(facts), "", "## Tokens of a document", ""]
    for each in facts:
        lines += [each.name, "", "```", *_histogram(each.lengths), "```", ""]
    return "\n".join(lines)


def _facts(name: str, folder: Path) -> TextFacts:
    manifest = shards.read_manifest(folder)
    tokenizer = Tokenizer.from_file(str(shards.tokenizer_folder(folder) / "tokenizer.json"))
    lengths, hashes = [], []
    for documents in _shards(folder, manifest):
        lengths.append(np.array([len(tokens) for tokens in documents], dtype=np.int64))
        hashes.append(digests(documents))
    every = np.concatenate(hashes)
    _, first = np.unique(every, return_index=True)  # near duplicates are beside exact ones
    count = min(DRAWN_DOCUMENTS, len(first))
    chosen = np.sort(first)[np.sort(sample_ids(DRAW_KEY, len(first), 0, count))]
    texts = _texts(folder, manifest, tokenizer, chosen)
    near = near_duplicates(texts)
    return TextFacts(name, manifest, np.concatenate(lengths), every, count, near, _languages(texts))


def _shards(folder: Path, manifest: TokenManifest) -> Iterator[Documents]:
    """The documents of each shard, of both splits."""
    dtype = np.dtype(manifest.dtype).newbyteorder("<")
    for split in SPLITS:
        for shard in manifest.shards(split):
            tokens = np.memmap(shards.tokens_file(folder, split, shard.number), dtype, "r")
            ends = np.fromfile(shards.index_file(folder, split, shard.number), "<u8")
            yield np.split(tokens, ends[:-1].astype(np.int64))


def _texts(folder: Path, manifest: TokenManifest, tokenizer: Any, chosen: Ints) -> list[str]:
    """The beginnings of the documents of these numbers."""
    texts: list[str] = []
    before = 0
    for documents in _shards(folder, manifest):
        inside = chosen[(chosen >= before) & (chosen < before + len(documents))] - before
        ids = [documents[n][:READ_TOKENS].tolist() for n in inside]
        texts += tokenizer.decode_batch(ids, skip_special_tokens=True)
        before += len(documents)
    return texts


def _languages(texts: Sequence[str]) -> Counter[str]:
    """Documents by language (ISO 639-1)."""
    return Counter(py3langid.classify(text[:LANGUAGE_CHARACTERS])[0] for text in texts)


def _table(facts: Sequence[TextFacts]) -> Iterator[str]:
    yield f"| | {' | '.join(each.name for each in facts)} |"
    yield "|---|" + "---:|" * len(facts)
    rows = [dict(_rows(each, facts)) for each in facts]
    for label in rows[0]:
        yield f"| {label} | {' | '.join(row[label] for row in rows)} |"


def _rows(each: TextFacts, facts: Sequence[TextFacts]) -> Iterator[tuple[str, str]]:
    documents, manifest = len(each.lengths), each.manifest
    others = [other.digests for other in facts if other is not each]
    yield "documents", f"{documents:,}"
    yield "of them held out", f"{manifest.documents('validation'):,}"
    yield "tokens", f"{int(each.lengths.sum()):,}"
    left_out = (manifest.blank, manifest.cut, manifest.dropped)
    counts = (sum(count(split) for split in SPLITS) for count in left_out)
    for label, count in zip(("blank", "cut at a turn", "left out, too long"), counts, strict=True):
        yield label, f"{count:,}"
    for label, share in (("median", 0.5), ("nine of ten", 0.9), ("longest", 1.0)):
        yield f"tokens of a document, {label}", f"{int(np.quantile(each.lengths, share)):,}"
    yield "exact repeats", _share(each.repeated, documents)
    if others:
        elsewhere = int(np.isin(each.digests, np.concatenate(others)).sum())
        yield "also in another source", _share(elsewhere, documents)
    yield "looked at closely", f"{each.drawn:,}"
    yield "of them near repeats", _share(each.near, each.drawn)
    yield "languages", _told(each)


def _told(each: TextFacts) -> str:
    common = each.languages.most_common(MOST_LANGUAGES)
    rest = each.drawn - sum(count for _, count in common)
    shown = [f"{name} {count / each.drawn:.0%}" for name, count in common]
    return ", ".join(shown + ([f"others {rest / each.drawn:.0%}"] if rest else []))


def _share(count: int, of: int) -> str:
    return f"{count:,} ({count / max(1, of):.1%})"


def _histogram(lengths: Ints) -> Iterator[str]:
    """A bar for each power of two."""
    powers = np.floor(np.log2(lengths)).astype(np.int64)
    counts = np.bincount(powers)
    for power in range(int(powers.min()), len(counts)):
        bar = "█" * round(BAR * int(counts[power]) / int(counts.max()))
        span = f"{1 << power:,} to {(2 << power) - 1:,}"
        yield f"{span:>20} {int(counts[power]):>12,}  {bar}".rstrip()
