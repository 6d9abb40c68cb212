"""Where each value of a run came from, and the YAML that says so beside it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

COMMENT_COLUMN = 48
SETTINGS_DEFAULT = "default in settings"
DERIVED = "derived from the configuration"


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted name with its value; an empty group is a leaf too."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{name}.")
        else:
            yield name, value


def origins(layers: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, str]:
    """Dotted name -> source, from (source, values) layers of which the last one wins."""
    return {name: source for source, values in layers for name, _ in leaves(values)}


def changed(layers: Iterable[tuple[str, Mapping[str, Any]]], source: str) -> dict[str, Any]:
    """Dotted name -> value of what `source` sets to something else than the others do."""
    own: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for layer, values in layers:
        (own if layer == source else others).update(leaves(values))
    return {name: value for name, value in own.items() if others.get(name, ...) != value}


def annotated(values: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """YAML with, beside each leaf, the source of its value."""
    return "".join(f"{line}\n" for line in _lines(values, sources, prefix="", indent=""))


def _lines(
    values: Mapping[str, Any], sources: Mapping[str, str], prefix: str, indent: str
) -> Iterator[str]:
    for key, value in values.items():
        name, label = f"{prefix}{key}", f"{indent}{_inline(str(key))}:"
        if isinstance(value, Mapping) and value:
            yield label
            yield from _lines(value, sources, f"{name}.", f"{indent}  ")
        else:
            source = sources.get(name, SETTINGS_DEFAULT)
            yield f"{label} {_inline(value)}".ljust(COMMENT_COLUMN) + f"  # {source}"


def _inline(value: Any) -> str:
    """A value as YAML on one line, whatever it holds."""
    if isinstance(value, Mapping):
        pairs = [f"{_quoted(str(key))}: {_inline_item(item)}" for key, item in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_inline_item(item) for item in value) + "]"
    if isinstance(value, str) and not value.isprintable():
        return _quoted(value)
    return _dumped(value)


def _inline_item(value: Any) -> str:
    plain = isinstance(value, str) and value.replace("_", "").replace("-", "").isalnum()
    return _quoted(value) if isinstance(value, str) and not plain else _inline(value)


def _quoted(text: str) -> str:
    return _dumped(text, default_style='"')


def _dumped(value: Any, **style: Any) -> str:
    text = yaml.safe_dump(value, width=float("inf"), allow_unicode=True, **style)
    return str(text).removesuffix("\n").removesuffix("\n...")
