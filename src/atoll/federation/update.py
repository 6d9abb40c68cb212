"""An update: what one facility's training changed, in files that a manifest vouches for.

UPDATE/
  delta-00001-of-00002.safetensors …   encoded deltas to the round's global model
  manifest.json                        what they are, written last
  manifest.json.sig                    ssh-keygen's signature of it
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from atoll.errors import UserError
from atoll.federation.error_feedback import encoded_layout
from atoll.federation.tensors import Layout, TensorReader
from atoll.settings.exchange import FORMAT_VERSION, UpdateManifest, manifest_file, read_manifest

__all__ = ["FORMAT_VERSION", "Update", "UpdateManifest", "manifest_file", "read_manifest"]


@dataclass(frozen=True)
class Update:
    """An update whose files were verified, and who sent it."""

    manifest: UpdateManifest
    folder: Path
    rounds_late: int = 0

    @property
    def facility(self) -> str:
        return self.manifest.facility

    def tensors(self, most: int | None = None) -> TensorReader:
        return TensorReader(self.folder, self.manifest.files, most)


def refuse_wrong_tensors(reader: TensorReader, manifest: UpdateManifest, layout: Layout) -> None:
    """The tensors of the global model, each once, in the encoding that the manifest names.

    In no more files than the model has: all files of all updates are open at once.
    """
    encoded = encoded_layout(layout, manifest.encoding)
    if len(manifest.files) > len(encoded):
        raise UserError(
            f"the update of {manifest.facility} has {len(manifest.files):,} files, the global "
            f"model has what is asked in {len(encoded):,}",
            "train the model of this round",
        )
    expected = {
        name: (dtype, prod(shape))
        for tensors in encoded.values()
        for name, (dtype, shape) in tensors.items()
    }
    found = {name: (entry.dtype, entry.numel) for name, entry in reader.entries.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise UserError(
                f"the update of {manifest.facility} has {name} as {_shown(found.get(name))}, the "
                f"global model asks for {_shown(expected.get(name))}",
                "train the model of this round",
            )


def _shown(tensor: Any) -> str:
    return "nothing" if tensor is None else f"{tensor[1]:,} x {tensor[0]}".replace("torch.", "")
