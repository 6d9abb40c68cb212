"""The testbed as a fixture."""

from testbed_site import site

__all__ = ["site"]
