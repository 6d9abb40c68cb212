"""Manifests signed and checked with ssh keys (ssh-keygen's manual, -Y sign and -Y verify)."""

from pathlib import Path

from atoll.commands import run_command
from atoll.errors import UserError
from atoll.settings.exchange import MAX_MANIFEST_BYTES, MAX_SIGNATURE_BYTES, read_plain

NAMESPACE = "atoll-update"
OF_MODELS = "atoll-provenance"  # of the statement beside a model
VERIFY_SECONDS = 60.0


def sign(file: Path, key: Path, namespace: str = NAMESPACE) -> Path:
    """Sign a file with a private key; the signature stands beside it."""
    signature = file.with_name(f"{file.name}.sig")
    signature.unlink(missing_ok=True)
    done = run_command(
        ["ssh-keygen", "-Y", "sign", "-q", "-f", str(key), "-n", namespace, str(file)]
    )
    if done.returncode or not signature.is_file():
        raise UserError(
            f"{file} cannot be signed with {key}: {done.last_line}",
            "make a key without a passphrase: ssh-keygen -t ed25519 -N '' -f KEY",
        )
    return signature


def refuse_unsigned(
    file: Path,
    allowed_signers: Path,
    identity: str,
    namespace: str = NAMESPACE,
    most_bytes: int = MAX_MANIFEST_BYTES,
) -> None:
    """Raise `UserError` unless `identity`, as the file of allowed signers knows it, signed it."""
    signature = file.with_name(f"{file.name}.sig")
    content = read_plain(file, most_bytes)
    if not signature.is_file():
        raise UserError(f"{file} is not signed", f"{identity} signs with sites[…].signing_key")
    read_plain(signature, MAX_SIGNATURE_BYTES)
    argv = ["ssh-keygen", "-Y", "verify", "-q", "-f", str(allowed_signers), "-I", identity]
    argv += ["-n", namespace, "-s", str(signature)]
    text = content.decode(errors="replace")
    done = run_command(argv, input_text=text, timeout_seconds=VERIFY_SECONDS)
    if done.returncode:
        raise UserError(
            f"{file} is not signed by {identity}, as {allowed_signers} knows it: {done.last_line}",
            f"add the public key of {identity} there, or do not use what came",
        )
