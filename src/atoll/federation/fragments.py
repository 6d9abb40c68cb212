"""Fragments of a model: the tensors that travel in one round, of which the others go on training.

Streaming DiLoCo (Douillard et al. 2025). Whole layers, dealt out in turn or in stretches; what is
in no layer (embeddings, head, last norm) goes with the fragment that has the fewest values.
"""

import re
from collections.abc import Callable, Sequence
from math import prod

from atoll.errors import UserError
from atoll.federation.tensors import Layout
from atoll.settings.federation import refuse_too_many_fragments

LAYER = re.compile(r"(?:^|\.)(\d+)\.")

# pattern -> (layer, layers, fragments) -> its fragment
PATTERNS: dict[str, Callable[[int, int, int], int]] = {
    "strided": lambda layer, layers, count: layer % count,
    "sequential": lambda layer, layers, count: layer * count // layers,
}


def fragments_of(layout: Layout, count: int, pattern: str = "strided") -> list[Layout]:
    """The tensors of each fragment, all of them once; files as before.

    Raises `UserError` where the model has fewer layers than fragments.
    """
    if count == 1:
        return [layout]
    sizes = {name: prod(shape) for file in layout.values() for name, shape in file.items()}
    layer_of = {name: key for name in sizes if (key := _layer(name)) is not None}
    layers = sorted(set(layer_of.values()))
    refuse_too_many_fragments(count, len(layers))
    number = {key: PATTERNS[pattern](n, len(layers), count) for n, key in enumerate(layers)}
    fragment = {name: number[key] for name, key in layer_of.items()}
    values = [sum(sizes[name] for name, at in fragment.items() if at == n) for n in range(count)]
    for name in sorted(sizes.keys() - layer_of.keys(), key=lambda name: (-sizes[name], name)):
        fragment[name] = values.index(min(values))
        values[fragment[name]] += sizes[name]
    return [_part(layout, {name for name, at in fragment.items() if at == n}) for n in range(count)]


def refuse_no_fragment(numbers: Sequence[int], count: int) -> None:
    wrong = [number for number in numbers if not 0 <= number < count]
    if wrong:
        raise UserError(f"fragment {wrong[0]} of {count}", f"choose from 0 to {count - 1}")


def joined(layout: Layout, parts: list[Layout]) -> Layout:
    """The tensors of some fragments, in the model's order."""
    return _part(layout, {name for part in parts for file in part.values() for name in file})


def _layer(name: str) -> tuple[str, int] | None:
    """The stack that a tensor's layer is of, and its place there."""
    match = LAYER.search(name)
    return None if match is None else (name[: match.start()], int(match[1]))


def _part(layout: Layout, names: set[str]) -> Layout:
    parts = {
        file: {name: shape for name, shape in tensors.items() if name in names}
        for file, tensors in layout.items()
    }
    return {file: tensors for file, tensors in parts.items() if tensors}
