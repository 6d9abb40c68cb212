"""Host lists: every list that Slurm can write expands to the hosts it was made of."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UserError
from atoll.launch.hostlist import MAX_HOSTS, expand_hosts, expand_task_counts

LETTERS = "abcxyzABC"


@pytest.mark.parametrize(
    ("host_list", "hosts"),
    [
        ("login3", ["login3"]),
        ("a[1-2],b3", ["a1", "a2", "b3"]),
        ("g[1-2]n[3-4]", ["g1n3", "g1n4", "g2n3", "g2n4"]),
        (
            "g[1-2]n[3-4]p[5-6]",  # as scontrol show hostnames of 22.05 says
            [f"g{g}n{n}p{p}" for n in (3, 4) for g in (1, 2) for p in (5, 6)],
        ),
        (
            "a[1-2]b[1-2]c[1-2]d[1-2]",
            [f"a{a}b{b}c{c}d{d}" for c in (1, 2) for b in (1, 2) for a in (1, 2) for d in (1, 2)],
        ),
        ("n[008-010]", ["n008", "n009", "n010"]),
        ("n[8-10]", ["n8", "n9", "n10"]),
        ("a[1,3-5,7]", ["a1", "a3", "a4", "a5", "a7"]),
        ("n[1-2]-ib.cluster", ["n1-ib.cluster", "n2-ib.cluster"]),
        ("r[1,2]c[01-02]s[5]", ["r1c01s5", "r1c02s5", "r2c01s5", "r2c02s5"]),
        ("nid[001000-001002],nid001005", ["nid001000", "nid001001", "nid001002", "nid001005"]),
    ],
)
def test_what_slurm_writes(host_list: str, hosts: list[str]) -> None:
    assert expand_hosts(host_list) == hosts


@pytest.mark.parametrize(
    "host_list",
    [
        "",
        ",",
        "a,",
        ",a",
        "a,,b",
        "a[1-2",
        "a1-2]",
        "a[]",
        "a[1,]",
        "a[1-]",
        "a[-2]",
        "a[2-1]",
        "a[1-2-3]",
        "a[b]",
        "a[[1]]",
        "a b",
        " a",
        "a\n",
        "a[1 - 2]",
        "a[\u0661]",
        f"a[0-{MAX_HOSTS}]",
        "a[0-9999]b[0-9999]",
        "a[0-40000],b[0-40000]",
        "a[" + "1" * 5000 + "]",
    ],
)
def test_anything_else_is_refused_with_a_mend(host_list: str) -> None:
    with pytest.raises(UserError) as refused:
        expand_hosts(host_list)
    assert refused.value.found.startswith("host list ") and refused.value.hint


@given(st.text(alphabet="ab1029[],-. \n", max_size=30))
def test_any_text_expands_to_plain_names_or_is_refused(text: str) -> None:
    try:
        hosts = expand_hosts(text)
    except UserError:
        return
    assert hosts
    assert all(host and not set(host) & set("[], \n") for host in hosts)


@st.composite
def brackets(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A bracket and the numbers it stands for."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        first, count = draw(st.integers(0, 1200)), draw(st.integers(1, 4))
        width = draw(st.integers(1, 5))
        names = [str(number).zfill(width) for number in range(first, first + count)]
        texts.append(names[0] if count == 1 else f"{names[0]}-{names[-1]}")
        # The first number's own digits may be more than the padding asked for.
        numbers += [name.zfill(len(names[0])) for name in names]
    return f"[{','.join(texts)}]", numbers


@st.composite
def host_items(draw: st.DrawFn) -> tuple[str, list[str]]:
    """One item of a list, with up to two brackets and a suffix, and its hosts."""
    literal = st.text(alphabet=LETTERS + "-.", min_size=1, max_size=4)
    parts = [(prefix := draw(literal), [prefix])]
    for _ in range(draw(st.integers(0, 2))):
        parts += [draw(brackets()), (suffix := draw(literal), [suffix])]
    if len(parts) > 1 and draw(st.booleans()):
        parts.pop()
    text = "".join(text for text, _ in parts)
    return text, ["".join(names) for names in itertools.product(*(names for _, names in parts))]


@given(st.lists(host_items(), min_size=1, max_size=4))
def test_items_products_and_padding_expand_in_order(items: list[tuple[str, list[str]]]) -> None:
    host_list = ",".join(text for text, _ in items)
    assert expand_hosts(host_list) == [host for _, hosts in items for host in hosts]


def compress(prefix: str, numbers: list[int], width: int) -> str:
    """Write sorted numbers as Slurm does: consecutive ones as a range."""
    ranges = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        ends = dict.fromkeys([members[0], members[-1]])
        ranges.append("-".join(f"{number:0{width}d}" for number in ends))
    return f"{prefix}[{','.join(ranges)}]"


@given(
    st.text(alphabet=LETTERS, min_size=1, max_size=5),
    st.sets(st.integers(0, 9999), min_size=1, max_size=60),
    st.integers(4, 7),
)
def test_compressed_hosts_come_back(prefix: str, numbers: set[int], width: int) -> None:
    hosts = [f"{prefix}{number:0{width}d}" for number in sorted(numbers)]
    assert expand_hosts(compress(prefix, sorted(numbers), width)) == hosts


@given(st.lists(st.tuples(st.integers(1, 128), st.integers(1, 9)), min_size=1, max_size=5))
def test_task_counts_come_back(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else str(tasks) for tasks, nodes in runs)
    counts = expand_task_counts(text)
    assert counts == [tasks for tasks, nodes in runs for _ in range(nodes)]
    assert sum(counts) == sum(math.prod(run) for run in runs)


@pytest.mark.parametrize(
    "text", ["", "4(x3", "4x3", "0", "4(x0)", "4,", "-1", "4 (x2)", "4(x99999)"]
)
def test_other_task_counts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="tasks per node"):
        expand_task_counts(text)
