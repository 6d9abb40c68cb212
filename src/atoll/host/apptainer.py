"""How a command enters the container."""

from collections.abc import Sequence

from atoll.settings import Image


def container_prefix(image: Image, binds: Sequence[str]) -> list[str]:
    """What stands before a command so that it runs in the image; nothing without an image."""
    if image.file is None:
        return []
    mounts = [word for bind in binds for word in ("--bind", bind)]
    return ["apptainer", "-q", "exec", *image.run_flags, *mounts, str(image.file)]
