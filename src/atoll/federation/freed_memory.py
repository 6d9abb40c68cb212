"""What a stretch frees is kept for the next one: new memory is a page fault for every 4 KiB."""

import ctypes

# mallopt(3): the largest block that is not the system's again at once, and how much may lie free
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_BLOCK_BYTES = 32 << 20  # the most that glibc takes
FREE_BYTES = 256 << 20


def keep_freed_memory() -> bool:
    """Tell this process's malloc so; False where it is not glibc's and has no such word."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(
        mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK_BYTES) and mallopt(M_TRIM_THRESHOLD, FREE_BYTES)
    )
