"""Slurm's compressed lists: host names (`g[1-2]n[01-10],login3`) and tasks per node (`4(x3),2`)."""

import itertools
import math
import re

from atoll.errors import UserError

# Slurm itself expands no range beyond this many hosts.
MAX_HOSTS = 65536

_PIECE = re.compile(r"(?P<name>[A-Za-z0-9._-]+)|\[(?P<ranges>[^\[\]]*)\]|(?P<comma>,)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hosts(host_list: str) -> list[str]:
    """Expand a Slurm host list, in Slurm's order: `g[1-2]n[3-4]` is g1n3 g1n4 g2n3 g2n4.

    A name is any sequence of literals and brackets, and several brackets multiply. The width of a
    range is that of its first number: `[08-10]` is 08 09 10. Raises UserError where the list is
    empty, unbalanced, reversed, or longer than MAX_HOSTS. Source: hostlist.c of Slurm.
    """
    hosts: list[str] = []
    parts: list[list[str]] = []
    position = 0
    while position < len(host_list):
        piece = _PIECE.match(host_list, position)
        if piece is None:
            raise _malformed(
                host_list, f"{host_list[position]!r} at character {position + 1} does not belong"
            )
        if piece.lastgroup == "comma":
            hosts += _product(parts, host_list)
            parts = []
        elif piece.lastgroup == "ranges":
            parts.append(_numbers(piece["ranges"], host_list))
        else:
            parts.append([piece["name"]])
        position = piece.end()
    hosts += _product(parts, host_list)
    if len(hosts) > MAX_HOSTS:
        raise _malformed(host_list, f"{len(hosts)} hosts, more than {MAX_HOSTS}")
    return hosts


def expand_task_counts(task_counts: str) -> list[int]:
    """Expand Slurm's tasks per node: `4(x3),2` is 4 4 4 2. Raises UserError where malformed."""
    counts: list[int] = []
    for item in task_counts.split(","):
        match = _TASKS.fullmatch(item)
        tasks, nodes = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if tasks == 0 or not 0 < nodes <= MAX_HOSTS:
            raise UserError(
                f"tasks per node {task_counts!r}: {item!r} is not a count",
                "expected what Slurm writes, such as 4 or 4(x3),2; start the step again with srun",
            )
        counts += [tasks] * nodes
    return counts


def _numbers(ranges: str, host_list: str) -> list[str]:
    numbers: list[str] = []
    for text in ranges.split(","):
        match = _RANGE.fullmatch(text)
        if match is None:
            raise _malformed(host_list, f"{text!r} in brackets is not a range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise _malformed(host_list, f"range {first}-{last} runs backwards")
        if last - first >= MAX_HOSTS:
            raise _malformed(host_list, f"range {first}-{last} has more than {MAX_HOSTS} hosts")
        width = len(match[1])
        numbers += [f"{number:0{width}d}" for number in range(first, last + 1)]
    return numbers


def _product(parts: list[list[str]], host_list: str) -> list[str]:
    if not parts:
        raise _malformed(host_list, "a host name is empty")
    if math.prod(len(part) for part in parts) > MAX_HOSTS:
        raise _malformed(host_list, f"the brackets multiply to more than {MAX_HOSTS} hosts")
    # Slurm turns the last bracket fastest, and of the others the first (measured on 22.05):
    # g[1-2]n[3-4]p[5-6] is g1n3p5 g1n3p6 g2n3p5 g2n3p6 g1n4p5 …
    brackets = [position for position, part in enumerate(parts) if len(part) > 1]
    turning = [*reversed(brackets[:-1]), *brackets[-1:]]
    hosts = []
    for names in itertools.product(*(parts[position] for position in turning)):
        chosen = dict(zip(turning, names, strict=True))
        hosts.append("".join(chosen.get(n, part[0]) for n, part in enumerate(parts)))
    return hosts


def _malformed(host_list: str, reason: str) -> UserError:
    shown = host_list if len(host_list) <= 80 else host_list[:77] + "..."
    return UserError(
        f"host list {shown!r}: {reason}",
        "expected what Slurm writes, such as n[001-010],login3; start the step again with srun",
    )
