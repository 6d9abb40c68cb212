"""Bytes of four languages that come with Python and the locked packages, divided among facilities.

    python benchmarks/atlas_texts.py FILE       keep them, for atlas.py --texts on another machine

Legend: N bytes of a text, B samples, T tokens of a sample.
"""

import hashlib
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LANGUAGE_BYTES = 2_400_000
HELD_OUT = 0.1  # of each language, in files of its own
TOKENS = 64  # of a sample
VALIDATION_SAMPLES, TEST_SAMPLES = 64, 192  # of each language
QUESTIONS, ANSWERS, ANSWER_TOKENS = 64, 4, 16
LIBRARY, PACKAGES = (Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib"))
travelled: dict[str, Tensor] = {}  # of another machine, in the place of this one's
# language -> where its files are
LANGUAGES = {
    "Python": ((LIBRARY, "*.py"), (LIBRARY / "asyncio", "*.py"), (LIBRARY / "email", "*.py")),
    "C++": ((PACKAGES / "torch/include", "**/*.h"),),
    "English": ((LIBRARY / "pydoc_data", "topics.py"), (PACKAGES, "*.dist-info/METADATA"),
                (PACKAGES, "lm_eval/**/*.md")),
    "Cython": tuple((PACKAGES / name, "**/*.pyx") for name in ("scipy", "sklearn", "pyarrow")),
}  # fmt: skip


@dataclass(frozen=True)
class Texts:
    """What facilities train on, one text each, and what nobody trains on, alike for all."""

    training: Sequence[Tensor]  # uint8 [N] of each facility
    validation_BT: Tensor  # a token more than a sample has: inputs and targets
    test_BT: Tensor
    questions_QAT: Tensor  # the first answer of each is how the text goes on


def divided(facilities: int, split: str) -> Texts:
    """iid: each facility has a share of every language; by_language: of as few as may be."""
    training, held_out = zip(*(_language(name) for name in LANGUAGES), strict=True)
    if split == "iid":
        shares = [[text.chunk(facilities)[n] for text in training] for n in range(facilities)]
    else:
        shares = [list(_of_few(training, n, facilities)) for n in range(facilities)]
    windows = [_windows(text, TEST_SAMPLES + VALIDATION_SAMPLES) for text in held_out]
    return Texts(
        [torch.cat(share) for share in shares],
        torch.cat([each[:VALIDATION_SAMPLES] for each in windows]),
        torch.cat([each[VALIDATION_SAMPLES:] for each in windows]),
        torch.cat([_questions(text) for text in held_out]),
    )


def samples(text_N: Tensor, count: int, draws: torch.Generator) -> Tensor:
    """Windows at places that are drawn: [B, T + 1], int64."""
    places_B = torch.randint(len(text_N) - TOKENS, (count,), generator=draws)
    return text_N[places_B[:, None] + torch.arange(TOKENS + 1)].long()


def _of_few(texts: Sequence[Tensor], place: int, facilities: int) -> Iterator[Tensor]:
    """Facility `place` of so many: whole languages, or its part of one."""
    if facilities <= len(texts):
        yield from texts[place::facilities]
        return
    sharing = range(place % len(texts), facilities, len(texts))
    yield texts[place % len(texts)].chunk(len(sharing))[place // len(texts)]


def keep(path: Path) -> None:
    parts = {name: _language(name) for name in LANGUAGES}
    kept = {f"{name}, training": training.contiguous() for name, (training, _) in parts.items()}
    kept |= {f"{name}, held out": held_out.contiguous() for name, (_, held_out) in parts.items()}
    save_file(kept, path)


def take(path: Path) -> None:
    """Before any text is asked for."""
    travelled.update(load_file(path))


@cache
def digest() -> str:
    """Of all texts: they change with Python and the locked packages."""
    parts = [part for name in LANGUAGES for part in _language(name)]
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:12]


@cache
def _language(name: str) -> tuple[Tensor, Tensor]:
    """Its text to train on, and the held-out one: files in an order drawn once, up to a size."""
    if travelled:
        return travelled[f"{name}, training"], travelled[f"{name}, held out"]
    paths = sorted({path for folder, pattern in LANGUAGES[name] for path in folder.glob(pattern)})
    random.Random(name).shuffle(paths)
    content, cut = bytearray(), 0
    for path in paths:
        content += path.read_bytes()
        cut = cut or (len(content) if len(content) >= HELD_OUT * LANGUAGE_BYTES else 0)
        if len(content) >= LANGUAGE_BYTES:
            break
    text = torch.frombuffer(content[:LANGUAGE_BYTES], dtype=torch.uint8).clone()
    return text[cut:], text[:cut]


def _windows(text_N: Tensor, count: int) -> Tensor:
    """So many windows, evenly over a text, in an order of no meaning."""
    places = torch.linspace(0, len(text_N) - TOKENS - 1, count).long()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return text_N[places[order][:, None] + torch.arange(TOKENS + 1)].long()


def _questions(text_N: Tensor) -> Tensor:
    """How does the text go on? [Q, A, T]: a context, and answers of other places of the text."""
    context = TOKENS - ANSWER_TOKENS
    windows_QT = _windows(text_N, QUESTIONS)[:, :TOKENS]
    answers = [windows_QT[:, context:].roll(shift, 0) for shift in range(ANSWERS)]
    return torch.stack([torch.cat([windows_QT[:, :context], a], 1) for a in answers], 1)


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
