"""The locks: hashed, without torch and without any address, each a part of the next."""

import re
from pathlib import Path

import pytest

LOCKS = Path(__file__).parents[2] / "containers" / "locks"


def pins(name: str) -> set[str]:
    return set(re.findall(r"^([A-Za-z0-9._-]+==[^\s;]+)", (LOCKS / name).read_text(), re.M))


@pytest.mark.parametrize(
    "name", ["build.txt", "docs.txt", "host.txt", "train.txt", "image.txt", "dev.txt"]
)
def test_a_lock_pins_by_hash_and_names_no_address(name: str) -> None:
    text = (LOCKS / name).read_text()
    entries = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.M)[1:]
    assert len(entries) == len(pins(name)) > 0
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in text
    assert not re.search(r"^--", text, re.M)


@pytest.mark.parametrize("name", ["host.txt", "train.txt", "image.txt", "dev.txt"])
def test_torch_and_what_only_torch_needs_stay_out(name: str) -> None:
    names = {pin.partition("==")[0] for pin in pins(name)}
    assert not names & {"torch", "triton", "sympy", "networkx"}
    assert not any(one.startswith("nvidia-") for one in names)


def test_each_lock_is_a_part_of_the_next() -> None:
    assert pins("host.txt") < pins("train.txt") < pins("image.txt") < pins("dev.txt")
