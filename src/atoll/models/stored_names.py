"""What files call a model's tensors, where transformers makes others of them as it loads.

Files have a matrix for each expert, models one tensor for all of a block: what transformers says
of it (its conversion mapping) is done here for one parameter at a time, and undone in an export.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Origin:
    """The stored tensors that some parameters are made of, and by what."""

    target: str
    stored: tuple[tuple[str, str], ...]  # (name, the pattern that it fits)
    converter: Any  # None: there is one, only called otherwise


def origins(hf: Any, stored_names: Iterable[str]) -> dict[str, Origin]:
    """Parameter -> what it is made of, of files with these tensors; empty for most families."""
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    conversions = _conversions(hf)
    if not conversions:
        return {}
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    stored: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name in sorted(stored_names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters)
        stored[target].append((name, pattern or ""))
    made: dict[str, Origin] = {}
    for target, parts in stored.items():
        converter = by_pattern.get(parts[0][1])
        first, *others = [target] if converter is None else converter.target_patterns
        names = [target, *(target.replace(first, other, 1) for other in others)]
        made |= dict.fromkeys(names, Origin(target, tuple(parts), converter))
    return made


def maker(hf: Any, read: Callable[[str], Tensor]) -> Callable[[Origin, str], Tensor]:
    """What makes a parameter of its origin; what came of the last origin is kept."""

    @lru_cache(maxsize=1)
    def all_of(origin: Origin) -> dict[str, Tensor]:
        if origin.converter is None:
            return {origin.target: read(origin.stored[0][0])}
        converter = copy.deepcopy(origin.converter)
        for name, pattern in origin.stored:
            converter.add_tensor(origin.target, name, pattern, read(name))
        made = converter.convert(origin.target, model=hf, config=hf.config)
        return {n: t[0] if isinstance(t, list) else t for n, t in made.items()}

    return lambda origin, name: all_of(origin)[name]


def as_stored(hf: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters as files have them: by the names, and in the pieces, of the family's own."""
    if not _conversions(hf):
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    stored: dict[str, Tensor] = revert_weight_conversion(hf, tensors)
    return {name: tensor.contiguous() for name, tensor in stored.items()}


def names_as_stored(hf: Any, shapes: dict[str, Any]) -> list[str]:
    """What `as_stored` would call parameters of these shapes."""
    return list(as_stored(hf, {n: torch.empty(s, device="meta") for n, s in shapes.items()}))


def stored_dtype(hf: Any, name: str, dtype: torch.dtype) -> torch.dtype:
    """Of a parameter in files of this type: some families load a few in fp32 whatever is asked.

    Rounded before, they would be other numbers there.
    """
    kept = getattr(hf, "_keep_in_fp32_modules_strict", None) or ()
    # in the patterns of transformers
    is_kept = any(re.search(part.replace("*", ".*"), name) for part in kept)
    return torch.float32 if is_kept else dtype


def _conversions(hf: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    every = get_model_conversion_mapping(hf, add_legacy=False)
    return [conversion for conversion in every if not isinstance(conversion, PrefixChange)]
