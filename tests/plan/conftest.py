"""The configuration tree and an empty folder, as fixtures."""

from composing import composed, here, tree

__all__ = ["composed", "here", "tree"]
