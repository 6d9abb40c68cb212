"""Ranks as a binomial tree of TCP connections: log2(N) deep, and at most so many for a rank.

The parent of a rank is its number without the lowest bit, so that each subtree is a stretch of
ranks, as those of a node are. What goes up is merged on its way; what comes down is the same for
all. Of the standard library alone: thousands of bare processes may join on one machine.
"""

import hmac
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

MESSAGE, GONE = 0, 1
HEADER = struct.Struct("!BQQ")  # kind, number of the call, bytes that follow
HELLO = struct.Struct("!32sBI")  # the secret of this start, which tree, rank
HELLO_SECONDS, FAREWELL_SECONDS = 10.0, 1.0
# a node that lost its power says nothing: its peers ask after it, and give it up in two minutes
KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}

COPIED_BYTES = 65536  # less than this is sent in one packet with its header

Buffer = bytes | bytearray
Merge = Callable[[list[Buffer]], Buffer]


class LostRank(RuntimeError):
    """A rank left, or has not answered in time; all others hear of it within a second."""


class Store(Protocol):
    """What ranks tell each other their addresses by; torch's TCPStore is one."""

    def set(self, key: str, value: str) -> Any:
        """Keep a value."""

    def get(self, key: str) -> bytes:
        """A value, waited for until it is there."""


@dataclass(frozen=True)
class Peer:
    """A neighbour in the tree."""

    rank: int
    connection: socket.socket


def parent_of(rank: int) -> int:
    """The neighbour towards rank 0; of rank 0 itself, rank 0."""
    return rank & (rank - 1)


def children_of(rank: int, size: int) -> list[int]:
    """The neighbours away from rank 0, in order of rank: the smallest subtree first."""
    children, step = [], 1
    while rank + step < size and (rank == 0 or step < rank & -rank):
        children.append(rank + step)
        step *= 2
    return children


def patience(rank: int, peer: int) -> float:
    """By how much longer than the time-out a rank waits: who is next to a silent one says so first.

    Each level of a subtree gives the one below it time to; the way back down comes last of all.
    """
    levels = (peer & -peer).bit_length() - 1
    return 1 + 0.2 * levels if peer > rank else 4.0


class Tree:
    """One rank's place in a tree. All ranks make the same calls in the same order, one at a time.

    Every call raises `LostRank`, on all ranks, once one of them has left.
    """

    def __init__(self, rank: int, size: int, parent: Peer | None, children: list[Peer]) -> None:
        self.rank, self.size = rank, size
        self.parent, self.children = parent, children
        self.calls = 0
        self.lost: str | None = None

    def reduced(self, value: Buffer, merge: Merge) -> Buffer:
        """The values of all ranks merged, on every rank.

        merge: gets a rank's own value and those of its subtrees, in order of rank.
        """
        whole = self.merged_by_first(value, merge)
        return self.from_first(b"" if whole is None else whole)

    def merged_by_first(self, value: Buffer, merge: Merge) -> Buffer | None:
        """The values of all ranks merged, on rank 0; None on the others."""
        with self._call():
            merged = merge([value, *(self._receive(child) for child in self.children)])
            if self.parent is None:
                return merged
            self._send(self.parent, merged)
        return None

    def from_first(self, value: Buffer) -> Buffer:
        """Rank 0's value, on every rank."""
        with self._call():
            if self.parent is not None:
                value = self._receive(self.parent)
            for child in reversed(self.children):  # the largest subtree has the longest way
                self._send(child, value)
        return value

    def close(self) -> None:
        """Leave; who waits for this rank, and a thread of its own that does, hear of it at once."""
        for peer in self._peers():
            with suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)
            peer.connection.close()

    def _peers(self) -> list[Peer]:
        return [*([] if self.parent is None else [self.parent]), *self.children]

    @contextmanager
    def _call(self) -> Iterator[None]:
        if self.lost is not None:
            raise LostRank(self.lost)
        self.calls += 1
        try:
            yield
        except BaseException as error:
            own = f"Connection closed by rank {self.rank} of {self.size}: {error}"
            self.lost = str(error) if isinstance(error, LostRank) else own
            self._say_goodbye()
            raise

    def _say_goodbye(self) -> None:
        reason = str(self.lost).encode()
        for peer in self._peers():
            with suppress(OSError):
                peer.connection.settimeout(FAREWELL_SECONDS)
                peer.connection.sendall(HEADER.pack(GONE, self.calls, len(reason)) + reason)
        self.close()

    def _send(self, peer: Peer, value: Buffer) -> None:
        try:
            header = HEADER.pack(MESSAGE, self.calls, len(value))
            if len(value) < COPIED_BYTES:
                peer.connection.sendall(header + value)
            else:
                peer.connection.sendall(header)
                peer.connection.sendall(value)
        except OSError as error:
            self._is_lost(peer, error)

    def _receive(self, peer: Peer) -> Buffer:
        try:
            kind, call, size = HEADER.unpack(_exactly(peer.connection, HEADER.size))
            value = _exactly(peer.connection, size)
        except OSError as error:
            self._is_lost(peer, error)
        if kind == GONE:
            raise LostRank(value.decode())
        assert call == self.calls, f"call {self.calls} here is call {call} of rank {peer.rank}"
        return value

    def _is_lost(self, peer: Peer, error: OSError) -> NoReturn:
        what = "Connection closed by"
        if isinstance(error, TimeoutError):
            what = f"Timed out after {peer.connection.gettimeout():g} s, waiting for"
        who = f"rank {peer.rank} of {self.size} (says rank {self.rank})"
        raise LostRank(f"{what} {who}") from error


def _exactly(connection: socket.socket, size: int) -> Buffer:
    value, filled = bytearray(size), 0
    while filled < size:
        count = connection.recv_into(memoryview(value)[filled:])
        if count == 0:
            raise ConnectionResetError("the connection was closed")
        filled += count
    return value


def join(
    store: Store, rank: int, size: int, first_host: str, timeout_seconds: float, count: int
) -> list[Tree]:
    """`count` trees of the same ranks, which may be used by as many threads of each.

    first_host: an address of rank 0 that every rank can reach. Raises `LostRank` where a
    neighbour does not come in time.
    """
    children = children_of(rank, size)
    trees = [Tree(rank, size, None, []) for _ in range(count)]
    try:
        with _listener(len(children) * count) as listener:
            if rank == 0:
                store.set("tree/secret", secrets.token_hex(16))
            if children:
                port = listener.getsockname()[1]
                store.set(f"tree/{rank}", f"{own_host(first_host)} {port}")
            secret = store.get("tree/secret")
            if rank > 0:
                _connect(store, secret, trees, timeout_seconds)
            _accept(listener, secret, trees, children, timeout_seconds)
    except OSError as error:
        raise LostRank(f"rank {rank} cannot reach its neighbours: {error}") from error
    return trees


def own_host(first_host: str) -> str:
    """This machine's address on the network that leads to rank 0.

    On rank 0's own machine that may be a loopback address, which is of no use to others: there it
    is the name that the others reach rank 0 by.
    """
    kind, *_, address = socket.getaddrinfo(first_host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        host = str(probe.getsockname()[0])
    return first_host if host.startswith("127.") or host == "::1" else host


def _connect(store: Store, secret: bytes, trees: Sequence[Tree], timeout_seconds: float) -> None:
    rank, parent = trees[0].rank, parent_of(trees[0].rank)
    host, port = store.get(f"tree/{parent}").decode().split()
    for number, tree in enumerate(trees):
        connection = socket.create_connection((host, int(port)), timeout_seconds)
        connection.sendall(HELLO.pack(secret, number, rank))
        tree.parent = Peer(parent, _ready(connection, timeout_seconds * patience(rank, parent)))


def _listener(backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # a kernel without IPv6
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
    return socket.create_server(("", 0), backlog=backlog)


def _accept(
    listener: socket.socket,
    secret: bytes,
    trees: Sequence[Tree],
    children: list[int],
    timeout_seconds: float,
) -> None:
    """Take the connections of all children; who does not know the secret is not one of them."""
    awaited = {(number, child) for number in range(len(trees)) for child in children}
    listener.settimeout(timeout_seconds)
    while awaited:
        connection = _ready(listener.accept()[0], HELLO_SECONDS)
        try:
            theirs, number, child = HELLO.unpack(_exactly(connection, HELLO.size))
        except OSError:
            theirs, number, child = b"", 0, 0
        if not hmac.compare_digest(theirs, secret) or (number, child) not in awaited:
            connection.close()
            continue
        awaited.remove((number, child))
        connection.settimeout(timeout_seconds * patience(trees[number].rank, child))
        trees[number].children.append(Peer(child, connection))
    for tree in trees:
        tree.children.sort(key=lambda peer: peer.rank)


def _ready(connection: socket.socket, timeout_seconds: float) -> socket.socket:
    connection.settimeout(timeout_seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
