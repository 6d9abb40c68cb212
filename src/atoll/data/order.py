"""The endless order of samples, one permutation of them an epoch: its state is one integer.

The permutation is keyed by (seed, epoch). It is a Feistel network with cycle walking (Black and
Rogaway 2002, "Ciphers with arbitrary finite domains"), so any position is found without those
before it, and with any version of numpy: a resumed run goes on with the samples it would have seen.
"""

import numpy as np
import numpy.typing as npt

from atoll.data.keyed_hash import U64, keyed

Ints = npt.NDArray[np.int64]
ROUNDS = 6


def sample_ids(seed: int, sample_count: int, position: int, count: int) -> Ints:
    """The samples at positions position to position + count of the endless order."""
    positions = np.arange(position, position + count, dtype=np.uint64)
    epochs, places = np.divmod(positions, np.uint64(sample_count))
    half_bits = np.uint64(max(1, ((sample_count - 1).bit_length() + 1) // 2))
    shuffled = _feistel(seed, epochs, places, half_bits)
    # The network permutes a power of four; whoever lands outside goes on from there.
    while len(outside := np.flatnonzero(shuffled >= sample_count)):
        shuffled[outside] = _feistel(seed, epochs[outside], shuffled[outside], half_bits)
    return shuffled.astype(np.int64)


def rank_share(ids: Ints, rank: int, world_size: int, microbatch: int) -> list[Ints]:
    """The microbatches of one rank; those of all ranks together are the global batch `ids`."""
    assert len(ids) % (world_size * microbatch) == 0, "settings let an uneven batch through"
    return list(ids.reshape(-1, world_size, microbatch)[:, rank])


def _feistel(seed: int, epochs: U64, values: U64, half_bits: np.uint64) -> U64:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for number in range(ROUNDS):
        noise = keyed(seed, epochs, np.full_like(epochs, number), right)
        left, right = right, (left ^ noise) & mask
    return np.asarray((left << half_bits) | right)
