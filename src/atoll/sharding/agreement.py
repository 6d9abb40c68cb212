"""What ranks agree on over a tree: objects of all, of the first, the highest number, an error.

Objects travel pickled, between the ranks of one run alone.
"""

import pickle
import queue
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from atoll.sharding.tree import Buffer, Tree

LENGTH = struct.Struct("!Q")
NUMBER = struct.Struct("!q")


def gathered(tree: Tree, value: Any) -> list[Any]:
    """The value of every rank, in order of rank, on every rank."""
    return _split(tree.reduced(_framed(value), b"".join))


def gathered_by_first(tree: Tree, value: Any) -> list[Any] | None:
    """The value of every rank, in order of rank, on rank 0; None on the others."""
    whole = tree.merged_by_first(_framed(value), b"".join)
    return None if whole is None else _split(whole)


def of_first(tree: Tree, value: Any) -> Any:
    """Rank 0's value, on every rank."""
    return pickle.loads(tree.from_first(pickle.dumps(value) if tree.rank == 0 else b""))


def merged(tree: Tree, value: Any, merge: Callable[[list[Any]], Any]) -> Any:
    """The values of all ranks merged, subtree by subtree, on every rank."""

    def merged_bytes(parts: list[Buffer]) -> Buffer:
        if len(parts) == 1:
            return parts[0]
        return pickle.dumps(merge([pickle.loads(part) for part in parts]))

    return pickle.loads(tree.reduced(pickle.dumps(value), merged_bytes))


def highest(tree: Tree, number: int) -> int:
    """The highest number of all ranks."""
    whole = tree.reduced(NUMBER.pack(number), lambda parts: max(parts, key=NUMBER.unpack))
    return int(NUMBER.unpack(whole)[0])


def barrier(tree: Tree) -> None:
    """Wait until every rank is here."""
    tree.reduced(b"", b"".join)


class Failures(NamedTuple):
    """The first of what some ranks have, in order of rank, and how many have any."""

    rank: int
    what: Any
    ranks: int


def first_failure(tree: Tree, what: Any) -> Failures | None:
    """The first rank's that is not None, on every rank; None where all are."""
    own = None if what is None else Failures(tree.rank, what, 1)

    def merge(parts: list[Failures | None]) -> Failures | None:
        failures = [part for part in parts if part is not None]
        if not failures:
            return None
        return failures[0]._replace(ranks=sum(part.ranks for part in failures))

    return merged(tree, own, merge)  # type: ignore[no-any-return]


Entry = tuple[Callable[[], Any], Future[Any]]


class Background:
    """Calls of a tree by a thread of its own, one after the other; the caller goes on meanwhile."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.calls: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="agreement", daemon=True).start()

    def start(self, call: Callable[[], Any]) -> Future[Any]:
        """The call's result, or what it raised, once it is there."""
        future: Future[Any] = Future()
        self.calls.put((call, future))
        return future

    def close(self) -> None:
        """Leave the tree, which ends a call under way, and the thread."""
        self.tree.close()
        self.calls.put(None)

    def _work(self) -> None:
        while (entry := self.calls.get()) is not None:
            call, future = entry
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)


def _framed(value: Any) -> bytes:
    blob = pickle.dumps(value)
    return LENGTH.pack(len(blob)) + blob


def _split(whole: Buffer) -> list[Any]:
    values, position = [], 0
    while position < len(whole):
        (size,) = LENGTH.unpack_from(whole, position)
        position += LENGTH.size
        values.append(pickle.loads(memoryview(whole)[position : position + size]))
        position += size
    return values
