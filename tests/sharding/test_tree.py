"""A tree of ranks, as threads of this process: what they agree on, and a rank that leaves."""

import math
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from atoll.sharding import agreement
from atoll.sharding.tree import HELLO, LostRank, Tree, children_of, join, own_host, parent_of

SIZES = (2, 3, 4, 7, 8, 13, 33)


class Shelf:
    """A store between threads."""

    def __init__(self) -> None:
        self.values: dict[str, Future[bytes]] = {}
        self.lock = threading.Lock()

    def _slot(self, key: str) -> Future[bytes]:
        with self.lock:
            return self.values.setdefault(key, Future())

    def set(self, key: str, value: str) -> None:
        self._slot(key).set_result(value.encode())

    def get(self, key: str) -> bytes:
        return self._slot(key).result(timeout=10)


def on_ranks(size: int, work: Callable[[Tree], Any], timeout_seconds: float = 10) -> list[Any]:
    """What `work` returns on each rank, or the error that it raised."""
    store = Shelf()

    def run(rank: int) -> Any:
        [tree] = join(store, rank, size, "127.0.0.1", timeout_seconds, count=1)
        try:
            return work(tree)
        except Exception as error:
            return error
        finally:
            tree.close()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


@pytest.mark.parametrize("size", [*SIZES, 10_000])
def test_every_rank_has_few_neighbours_and_a_short_way_to_the_first(size: int) -> None:
    most = math.ceil(math.log2(size))
    parents = {child: rank for rank in range(size) for child in children_of(rank, size)}
    assert parents == {rank: parent_of(rank) for rank in range(1, size)}
    assert max(len(children_of(rank, size)) + (rank > 0) for rank in range(size)) <= most
    assert max(bin(rank).count("1") for rank in range(size)) <= most


def of_all(tree: Tree) -> Any:
    code = 200 if tree.rank == tree.size // 2 else 0
    failure = (f"of {tree.rank}", "hint") if tree.rank % 3 == 2 else None
    agreement.barrier(tree)
    return (
        agreement.gathered(tree, {"rank": tree.rank, "text": "x" * tree.rank * 1000}),
        agreement.gathered_by_first(tree, tree.rank),
        agreement.of_first(tree, f"rank {tree.rank}"),
        agreement.highest(tree, code),
        agreement.highest(tree, -tree.rank),
        agreement.first_failure(tree, failure),
        agreement.first_failure(tree, None),
        agreement.merged(tree, {tree.rank % 2: tree.rank}, lambda parts: {**parts[0], **parts[-1]}),
    )


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_hear_the_same_in_order_of_rank(size: int) -> None:
    answers = on_ranks(size, of_all)
    objects = [{"rank": rank, "text": "x" * rank * 1000} for rank in range(size)]
    failing = [rank for rank in range(size) if rank % 3 == 2]
    for rank, answer in enumerate(answers):
        assert answer[0] == objects
        assert answer[1] == (list(range(size)) if rank == 0 else None)
        assert answer[2:5] == ("rank 0", 200, 0)
        failure = answer[5]
        if failing:
            assert failure == (2, ("of 2", "hint"), len(failing))
        else:
            assert failure is None
        assert answer[6] is None
        assert answer[7] == answers[0][7]


@pytest.mark.parametrize("lost", [1, 4, 5, 7])
def test_a_rank_that_leaves_is_named_to_all_within_a_second(lost: int) -> None:
    def work(tree: Tree) -> Any:
        agreement.barrier(tree)
        if tree.rank == lost:
            return None
        before = time.monotonic()
        with pytest.raises(LostRank) as error:
            agreement.gathered(tree, tree.rank)
        with pytest.raises(LostRank):  # nor does it come back
            agreement.barrier(tree)
        return str(error.value), time.monotonic() - before

    answers = [answer for answer in on_ranks(8, work) if answer is not None]
    assert len(answers) == 7
    assert {text.partition(" (says")[0] for text, _ in answers} == {
        f"Connection closed by rank {lost} of 8"
    }
    assert max(seconds for _, seconds in answers) < 1


def test_a_rank_that_is_silent_is_an_error_in_time() -> None:
    over = threading.Event()

    def work(tree: Tree) -> Any:
        if tree.rank == 3:
            over.wait(10)
            return None
        try:
            with pytest.raises(LostRank) as error:
                agreement.barrier(tree)
        finally:
            if tree.rank == 0:
                over.set()
        return str(error.value)

    answers = on_ranks(4, work, timeout_seconds=1)
    assert answers[:3] == ["Timed out after 1 s, waiting for rank 3 of 4 (says rank 2)"] * 3


def test_a_rank_that_fails_in_a_call_takes_the_others_with_it() -> None:
    def work(tree: Tree) -> Any:
        return agreement.gathered(tree, (lambda: 0) if tree.rank == 2 else 1)

    def closing(tree: Tree) -> Any:
        try:
            return work(tree)
        except AttributeError:  # it cannot be pickled
            tree.close()
            raise

    answers = on_ranks(4, closing)
    assert isinstance(answers[2], AttributeError)
    assert all(isinstance(answers[rank], LostRank) for rank in (0, 1, 3))


def test_a_thread_of_its_own_waits_beside_the_loop_and_ends() -> None:
    def work(tree: Tree) -> Any:
        background = agreement.Background(tree)
        calls = [
            background.start(lambda n=n: agreement.highest(tree, n * tree.rank)) for n in (1, 2)
        ]
        numbers = [call.result(timeout=10) for call in calls]
        background.close()
        return numbers

    before = threading.active_count()
    assert on_ranks(4, work) == [[3, 6]] * 4
    end = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_who_does_not_know_the_secret_is_not_let_in() -> None:
    store, answers = Shelf(), []

    def first() -> None:
        [tree] = join(store, 0, 2, "127.0.0.1", 10, count=1)
        answers.append(agreement.gathered(tree, 0))

    thread = threading.Thread(target=first)
    thread.start()
    host, port = store.get("tree/0").decode().split()
    with socket.create_connection((host, int(port)), 10) as stranger:
        stranger.sendall(HELLO.pack(b"0" * 32, 0, 1))
        assert stranger.recv(1) == b""
    [tree] = join(store, 1, 2, "127.0.0.1", 10, count=1)
    assert agreement.gathered(tree, 1) == [0, 1]
    thread.join(10)
    assert answers == [[0, 1]]


def test_the_first_machine_is_known_to_others_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_host("127.0.0.1") == "127.0.0.1"
    here = (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 1))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [here])
    assert own_host("n0001") == "n0001"
