"""Manifests signed and checked with ssh keys (ssh-keygen's manual, -Y sign and -Y verify)."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

from atoll import run_dir
from atoll.commands import Finished, run_command
from atoll.errors import UserError, printable
from atoll.settings.exchange import MAX_MANIFEST_BYTES, MAX_SIGNATURE_BYTES, SHOWN, read_plain

NAMESPACE = "atoll-update"
OF_MODELS = "atoll-provenance"  # of the statement beside a model
VERIFY_SECONDS = 60.0
OF_KEYS = (
    "a key without a passphrase signs (ssh-keygen -t ed25519 -N '' -f KEY), by OpenSSH 8.1 or "
    "newer (ssh -V)"
)
OLDER = "Unsupported operation"  # of an OpenSSH before 8.9, which cannot tell
PRINCIPALS = re.compile(r'\s*(?:"([^"]*)"|([^\s"#]\S*))')  # at the beginning of a line of signers


def sign(file: Path, key: Path, namespace: str = NAMESPACE) -> Path:
    """Sign a file with a private key; the signature stands beside it, whole or not at all."""
    signature = file.with_name(f"{file.name}.sig")
    argv = ["ssh-keygen", "-Y", "sign", "-q", "-f", str(key), "-n", namespace]
    done = run_command(argv, input_text=file.read_bytes().decode())
    if not done.returncode:
        run_dir.write_whole(signature, done.stdout)
    else:
        raise UserError(
            f"{file} cannot be signed with {key}: {done.last_line}",
            OF_KEYS,
        )
    return signature


def refuse_locked(key: Path) -> None:
    """Raise `UserError` unless a private key, or the agent for it, signs without a question."""
    argv = ["ssh-keygen", "-Y", "sign", "-q", "-P", "", "-f", str(key), "-n", NAMESPACE]
    done = run_command(argv, input_text="", timeout_seconds=VERIFY_SECONDS)
    if done.returncode:
        why = printable(done.last_line, SHOWN)
        raise UserError(f"nothing can be signed with {printable(str(key), 300)}: {why}", OF_KEYS)


def refuse_unknown(identity: str, allowed_signers: Path) -> None:
    """Raise `UserError` where a file of allowed signers has nobody of this name."""
    done = _matched(identity, allowed_signers)
    if done.returncode and OLDER not in done.stderr:
        raise UserError(
            f"{allowed_signers} does not know {identity}: {printable(done.last_line, SHOWN)}",
            f"add a line there: {identity} and its public key",
        )


def refuse_unsigned(
    file: Path,
    allowed_signers: Path,
    identity: str,
    namespace: str = NAMESPACE,
    most_bytes: int = MAX_MANIFEST_BYTES,
) -> None:
    """Raise `UserError` unless `identity`, as the file of allowed signers knows it, signed it."""
    signature = file.with_name(f"{file.name}.sig")
    content = read_plain(_followed(file, namespace), most_bytes)
    if not signature.is_file():
        raise UserError(f"{file} is not signed", f"{identity} signs with sites[…].signing_key")
    read_plain(_followed(signature, namespace), MAX_SIGNATURE_BYTES)
    by = ["verify", "-f", str(allowed_signers), "-I", identity]
    if why := _refused(by, signature, namespace, content):
        raise UserError(
            f"{file} is not signed by {identity}, as {allowed_signers} knows it: {why}",
            f"add the public key of {identity} there, or do not use what came",
        )


def refuse_changed_since_signed(file: Path, namespace: str, most_bytes: int) -> None:
    """Raise `UserError` unless the signature beside a file is of what it has, whoever's it is."""
    signature = file.with_name(f"{file.name}.sig")
    content = read_plain(_followed(file, namespace), most_bytes)
    read_plain(_followed(signature, namespace), MAX_SIGNATURE_BYTES)
    if why := _refused(["check-novalidate"], signature, namespace, content):
        raise UserError(
            f"{file} is not what {signature.name} signs: {why}",
            "it was changed after it was signed: get the original back",
        )


def is_known(identity: str, allowed_signers: Path) -> bool:
    """Whether a file of allowed signers has somebody of this name, also where OpenSSH is older."""
    if _matched(identity, allowed_signers).returncode == 0:
        return True
    try:
        with open(allowed_signers, errors="replace") as file:
            return any(_names(line, identity) for line in file)
    except OSError:
        return False


def _names(line: str, identity: str) -> bool:
    """Whether a line of allowed signers is of somebody: its patterns as ssh_config(5) has them."""
    field = PRINCIPALS.match(line)
    patterns = (field[1] or field[2] or "").split(",") if field else []
    matching = [
        pattern
        for pattern in patterns
        if fnmatchcase(identity, pattern.removeprefix("!").replace("[", "[[]"))
    ]
    return bool(matching) and not any(pattern.startswith("!") for pattern in matching)


def _followed(file: Path, namespace: str) -> Path:
    """A model's files are the reader's own, also as links (a hub's cache); an update's came."""
    return file.resolve() if namespace == OF_MODELS else file


def _matched(identity: str, allowed_signers: Path) -> Finished:
    argv = ["ssh-keygen", "-Y", "match-principals", "-f", str(allowed_signers), "-I", identity]
    return run_command(argv, timeout_seconds=VERIFY_SECONDS)


def _refused(how: list[str], signature: Path, namespace: str, content: bytes) -> str:
    """What ssh-keygen says against a signature of this content; empty: nothing."""
    argv = ["ssh-keygen", "-Y", how[0], "-q", *how[1:], "-n", namespace, "-s", str(signature)]
    text = content.decode(errors="replace")
    done = run_command(argv, input_text=text, timeout_seconds=VERIFY_SECONDS)
    return done.last_line or "no reason given" if done.returncode else ""
