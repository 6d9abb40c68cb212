"""The files of an update against its manifest: without torch, which takes a second to import."""

import os
from pathlib import Path

from atoll import run_dir
from atoll.errors import UserError, printable
from atoll.settings.exchange import (
    FileFacts,
    UpdateManifest,
    manifest_file,
    read_manifest,
    signature_file,
)


def read_verified(folder: Path) -> UpdateManifest:
    """The manifest of an update whose files are as it says."""
    manifest = read_manifest(folder)
    refuse_wrong_files(folder, manifest)
    return manifest


def refuse_wrong_files(folder: Path, manifest: UpdateManifest) -> None:
    """Every file as the manifest says, and no other file beside them."""
    files = manifest.all_files
    known = {*files, manifest_file(folder).name, signature_file(folder).name}
    with os.scandir(folder) as beside:  # there may be millions: the first is enough
        for file in beside:
            if file.name not in known or not file.is_file(follow_symlinks=False):
                raise UserError(
                    f"{printable(file.path)} is not in the manifest, or no plain file",
                    "an update is JSON and safetensors: do not use what comes from there",
                )
    for name, facts in files.items():
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


def facts_of(path: Path) -> FileFacts:
    return FileFacts(bytes=path.stat().st_size, sha256=run_dir.sha256_of(path))


def reason_of(error: Exception) -> str:
    """Why an update is left out, in one line."""
    found = error.found if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return printable(found, 500)
