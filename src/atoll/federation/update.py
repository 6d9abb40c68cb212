"""An update: what one facility's training changed, in files that a manifest vouches for.

UPDATE/
  delta-00001-of-00002.safetensors …   encoded deltas to the round's global model
  manifest.json                        what they are, written last
  manifest.json.sig                    ssh-keygen's signature of it
"""

import json
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll import run_dir
from atoll.errors import UserError
from atoll.federation.codec import Codec
from atoll.federation.error_feedback import encoded_layout
from atoll.federation.tensors import FILE_NAME, Layout, TensorReader, refuse_name
from atoll.settings.fields import Count, CountOrZero, Word

FORMAT_VERSION: Literal[1] = 1
MAX_MANIFEST_BYTES = 4 << 20
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class FileFacts(BaseModel):
    """The size and digest of one file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    bytes: CountOrZero
    sha256: Sha256


class UpdateManifest(BaseModel):
    """What an update says of itself, and is held to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[1]
    campaign: Word
    round: Count
    facility: Word
    base: Sha256  # of the global model that training began from
    tokens: Count
    steps: Count
    loss: Annotated[float, Field(allow_inf_nan=False)]
    image: str
    configuration: str
    data: str
    encoding: Codec
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    files: dict[str, FileFacts]


def manifest_file(folder: Path) -> Path:
    return folder / "manifest.json"


def signature_file(folder: Path) -> Path:
    return folder / "manifest.json.sig"


def read_manifest(folder: Path) -> UpdateManifest:
    """The manifest of an update, whose files have not been looked at.

    Raises `UserError` for anything but the JSON that is expected.
    """
    path = manifest_file(folder)
    try:
        if path.is_symlink() or path.stat().st_size > MAX_MANIFEST_BYTES:
            raise UserError(f"{path} is a link or too large", "do not use what comes from there")
        manifest = UpdateManifest.model_validate(json.loads(path.read_bytes()))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", "send the update again") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no manifest: {_first(error)}", "send it again") from None
    for name in manifest.files:
        refuse_name(name, FILE_NAME, f"{path} names the file")
    return manifest


def refuse_wrong_files(folder: Path, manifest: UpdateManifest) -> None:
    """Every file as the manifest says, and no other file beside them."""
    known = {*manifest.files, manifest_file(folder).name, signature_file(folder).name}
    for path in sorted(folder.iterdir()):
        if path.name not in known or path.is_symlink() or not path.is_file():
            raise UserError(
                f"{path} is not in the manifest, or no plain file",
                "an update is JSON and safetensors: do not use what comes from there",
            )
    for name, facts in manifest.files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != facts.bytes:
            found = "is missing" if size is None else f"has {size:,} bytes, not {facts.bytes:,}"
            raise UserError(f"{path} {found}", "send it again: rsync goes on from there")
        found = run_dir.sha256_of(path)
        if found != facts.sha256:
            raise UserError(
                f"{path} has sha256 {found[:12]}, the manifest says {facts.sha256[:12]}",
                "send it again",
            )


def refuse_wrong_tensors(reader: TensorReader, manifest: UpdateManifest, layout: Layout) -> None:
    """The tensors of the global model, each once, in the encoding that the manifest names."""
    expected = {
        name: (dtype, prod(shape))
        for tensors in encoded_layout(layout, manifest.encoding).values()
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


def facts_of(path: Path) -> FileFacts:
    return FileFacts(bytes=path.stat().st_size, sha256=run_dir.sha256_of(path))


def _shown(tensor: Any) -> str:
    return "nothing" if tensor is None else f"{tensor[1]:,} x {tensor[0]}".replace("torch.", "")


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
