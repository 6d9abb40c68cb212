"""Imports of libraries that take seconds."""

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Import without collecting what stays anyway, and set it aside from later collections.

    With torch and transformers collecting takes a third of the time. Ranks forked afterwards go on
    sharing those pages.
    """
    was_enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:  # else what is garbage by now would stay as well
            gc.freeze()
        if was_enabled:
            gc.enable()


def imported(name: str) -> ModuleType:
    """A module, imported without collecting garbage meanwhile."""
    with paused_garbage_collection():
        return importlib.import_module(name)
