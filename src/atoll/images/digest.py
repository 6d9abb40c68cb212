"""The sha256 of an image file, taken once: it has gigabytes, and every run names it."""

import json
from contextlib import suppress
from pathlib import Path

from atoll import run_dir


def image_digest(image: Path) -> str:
    """The sha256, as kept beside the file while its size and time stay; else it is taken now."""
    file = image.resolve()
    kept, now = file.with_name(f"{file.name}.sha256.json"), file.stat()
    facts = {"bytes": now.st_size, "modified_ns": now.st_mtime_ns}
    # not there yet, or of another kind
    with suppress(OSError, ValueError, AttributeError, TypeError):
        known = json.loads(kept.read_bytes())
        sha256 = known.pop("sha256", None)
        if known == facts and isinstance(sha256, str):
            return sha256
    sha256 = run_dir.sha256_of(file)
    with suppress(OSError):  # the folder is somebody else's: it is taken again the next time
        run_dir.write_whole(kept, json.dumps(facts | {"sha256": sha256}))
    return sha256


def keep_image(image: Path, run_folder: Path) -> None:
    """Write what a run's image is, as it is submitted: a job inside does not see the file."""
    record = {"file": image.resolve().name, "sha256": image_digest(image)}
    run_dir.write_whole(run_dir.image_file(run_folder), json.dumps(record) + "\n")
