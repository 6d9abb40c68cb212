"""How a command enters the container."""

from atoll.config.binds import binds
from atoll.settings import Run


def container_prefix(run: Run) -> list[str]:
    """What stands before a command so that it runs in the image; nothing without an image."""
    image = run.image
    if image.file is None:
        return []
    mounts = [word for bind in binds(run) for word in ("--bind", bind)]
    return [run.facility.container, "-q", "exec", *image.run_flags, *mounts, str(image.file)]
