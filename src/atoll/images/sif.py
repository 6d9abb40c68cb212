"""What a SIF file says of itself, without a runtime to ask (sylabs/sif, pkg/sif/sif.go)."""

import json
import struct
from pathlib import Path
from typing import Any

# A launch line, the magic word, version, architecture, an id, two times, then numbers and places.
HEADER = struct.Struct("<32s10s3s3s16s8q")
MAGIC = b"SIF_MAGIC\0"
# Its kind, whether it is used, three numbers, then where it is and how long.
DESCRIPTOR, DESCRIPTOR_BYTES = struct.Struct("<i?iiiqq"), 585
GENERIC_JSON = 0x4006  # of which the runtimes write one: their inspect-metadata.json
MOST_DESCRIPTORS, MOST_BYTES = 1024, 1 << 20


def labels(image: Path) -> dict[str, str]:
    """The labels that the runtime wrote into an image; none where it wrote none that we know."""
    try:
        return {str(name): str(text) for name, text in _attributes(image)["labels"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return {}  # the job looks inside


def _attributes(image: Path) -> Any:
    with open(image, "rb") as file:
        words = HEADER.unpack(file.read(HEADER.size))
        if words[1] != MAGIC:
            raise ValueError("no SIF file")
        descriptors, place = words[8], words[9]
        for number in range(min(descriptors, MOST_DESCRIPTORS)):
            file.seek(place + number * DESCRIPTOR_BYTES)
            kind, used, *_, offset, size = DESCRIPTOR.unpack(file.read(DESCRIPTOR.size))
            if used and kind == GENERIC_JSON and 0 < size <= MOST_BYTES:
                file.seek(offset)
                return json.loads(file.read(size))["data"]["attributes"]
    raise ValueError("no labels")
