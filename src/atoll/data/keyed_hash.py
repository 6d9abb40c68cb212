"""Keyed 64-bit hashing of whole arrays: the one source of chance in the data room.

The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood 2014): every bit of the input
reaches every bit of the output, and the result is the same on every machine.
"""

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]


def mixed(values: U64) -> U64:
    """Scramble each 64-bit value; a bijection."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


def keyed(seed: int, *words: U64) -> U64:
    """One 64-bit hash for each element of `words` under `seed`."""
    state = mixed(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))
    for word in words:
        state = mixed(state ^ mixed(word))
    return state


def fractions(hashes: U64) -> npt.NDArray[np.float64]:
    """Map hashes evenly to [0, 1)."""
    return np.asarray((hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53)
