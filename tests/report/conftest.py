"""The folder that tests of reports work in."""

from composing import here

__all__ = ["here"]
