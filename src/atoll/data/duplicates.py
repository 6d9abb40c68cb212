"""Documents that are the same, or nearly: exact by a digest of their tokens, near by MinHash.

Near are two texts that share most of their runs of five words (Broder 1997, "On the resemblance
and containment of documents"): candidates agree in one band of their signatures, then are compared.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.data.keyed_hash import U64, keyed

SHINGLE_WORDS = 5
NEAR = 0.8  # of all runs of words that either has, the share that both have
# texts that share 0.8 meet in a band with probability 0.95; those that share half with 0.06
BANDS, ROWS = 16, 8


def digests(documents: Sequence[npt.NDArray[Any]]) -> U64:
    """64 bits of each document's tokens."""
    words = b"".join(blake2b(tokens.tobytes(), digest_size=8).digest() for tokens in documents)
    return np.frombuffer(words, dtype=np.uint64)


def near_duplicates(texts: Sequence[str]) -> int:
    """How many of these texts nearly repeat one that stands before them."""
    from sklearn.feature_extraction.text import HashingVectorizer

    vectorizer = HashingVectorizer(
        token_pattern=r"\S+",
        ngram_range=(SHINGLE_WORDS, SHINGLE_WORDS),
        n_features=2**31 - 1,
        binary=True,
        norm=None,
        alternate_sign=False,
    )
    rows = vectorizer.transform(texts)
    rows = rows[np.diff(rows.indptr) > 0]  # others are shorter than a run of words
    if not rows.shape[0]:
        return 0
    shingles, first = rows.indices.astype(np.uint64), rows.indptr[:-1]
    repeats: set[int] = set()
    for band in range(BANDS):
        functions = range(band * ROWS, (band + 1) * ROWS)
        signature = [np.minimum.reduceat(keyed(n, shingles), first) for n in functions]
        repeats |= _repeats(rows, keyed(band, *signature), repeats)
    return len(repeats)


def _repeats(rows: Any, band: U64, known: set[int]) -> set[int]:
    """The rows that agree in a band with one before them, and are near it."""
    _, group = np.unique(band, return_inverse=True)
    earliest: dict[int, int] = {}
    near = set()
    for number, own in enumerate(group.tolist()):
        before = earliest.setdefault(own, number)
        if before != number and number not in known and _resemblance(rows, before, number) >= NEAR:
            near.add(number)
    return near


def _resemblance(rows: Any, a: int, b: int) -> float:
    """Jaccard: what both have, of what either has."""
    ours, theirs = (rows.indices[rows.indptr[n] : rows.indptr[n + 1]] for n in (a, b))
    both = len(np.intersect1d(ours, theirs, assume_unique=True))
    return both / (len(ours) + len(theirs) - both)
