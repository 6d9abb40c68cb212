"""What a coordinator and a facility say to each other: typed, and bounded before it is read."""

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from atoll.errors import UserError, printable
from atoll.settings.fields import Count, Word

Codec = Literal["fp32", "bf16", "int8", "int4", "int2", "sparse", "topk"]
SPARSE_CODECS = ("sparse", "topk")  # most values of an update are zeros
# of a facility's optimizer, between its rounds
InnerState = Literal["kept", "reset"]
FragmentPattern = Literal["strided", "sequential"]
FORMAT_VERSION: Literal[1] = 1
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
# what is longer is not read: a manifest of as many files as may be has less than 0.8 MB
MAX_MANIFEST_BYTES = 1 << 20
MAX_SIGNATURE_BYTES = 1 << 14
MAX_ANSWER_BYTES = 1 << 18
MAX_FILES = 4096
WEIGHTS = ".safetensors"
# configuration and tokenizer of a model: nothing else of its folder is copied, sent or taken
BESIDE_WEIGHTS = (".json", ".model", ".txt", ".jinja")
RUN = "provenance.json"  # the statement of the run behind an update, beside its manifest
STAYS = "stays"  # in a safetensors file's metadata: names of tensors that do not learn
SHOWN = 500  # characters of what others say
# what becomes of a job's time: the columns of the goodput
GOODPUT_COLUMNS = (
    "queue",
    "start",
    "input",
    "compute",
    "communication",
    "checkpoint",
    "evaluation",
    "stalled",
    "lost",
    "idle",
)
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Short = Annotated[str, Field(max_length=500)]
Number = Annotated[int, Field(ge=1, le=2**53)]
Loss = Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False)]  # nats a token
Time = Annotated[float, Field(ge=0.0, le=1e11, allow_inf_nan=False)]  # seconds since 1970
NodeSeconds = Annotated[float, Field(ge=0.0, le=1e12, allow_inf_nan=False)]
Known = Annotated[int, Field(ge=0, le=2**53)] | None  # None: nobody knows
Second = Annotated[int, Field(ge=0, le=10**11)] | None  # since 1970
Round = Annotated[int, Field(ge=1, le=10**6)]


class SiteRequest(BaseModel):
    """What the coordinator wants of a facility in a round."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    campaign: Word
    round: Round
    facility: Word
    base: Sha256  # of the global model that the round begins from
    global_round: Annotated[int, Field(ge=0, le=10**6)]  # the round whose model that is
    fragments: Annotated[int, Field(ge=1, le=1000)] = 1  # of the model: one of them is sent
    fragment: Annotated[int, Field(ge=0, le=999)] = 0
    fragment_pattern: FragmentPattern = "strided"
    merge_alpha: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    frozen: Sha256 | None = None  # of adapters: the weights that they are for
    codec: Codec
    inner_state: InnerState = "kept"
    attempts: Annotated[int, Field(ge=1, le=10**6)]
    keep_checkpoints: Annotated[int, Field(ge=1, le=10**6)] = 2
    # of the campaign's, on the machine of this one, itself too: they share its cores
    facilities_here: Annotated[int, Field(ge=1, le=1000)] = 1
    signing_key: Annotated[str, Field(max_length=4096)] | None
    overrides: Annotated[
        list[Annotated[str, Field(max_length=10_000)]], Field(max_length=1000)
    ]  # of its run

    @model_validator(mode="after")
    def _sends_a_fragment_that_is_there(self) -> "SiteRequest":
        if self.fragment >= self.fragments:
            raise ValueError(f"fragment {self.fragment} of {self.fragments}")
        return self


class JobRecord(BaseModel):
    """One start of a facility's job, as its scheduler's accounting has it."""

    model_config = ConfigDict(frozen=True, strict=True)

    job: Short
    cluster: Short
    partition: Short
    state: Short
    exit_code: Short
    nodes: Known
    elapsed_seconds: Known
    submitted: Second
    started: Second
    ended: Second
    energy_joules: Known


class Answer(BaseModel):
    """What `atoll site` prints; words that are not known here are not kept."""

    model_config = ConfigDict(frozen=True, strict=True)

    state: Literal[
        "needs", "received", "queued", "running", "retry", "unknown", "ready", "refused", "failed"
    ]
    why: str = ""
    have: Annotated[int, Field(ge=-1, le=10**6)] | None = None  # the newest global model there
    losses: Annotated[list[Loss], Field(max_length=10_000)] = []
    submitted: Time | None = None
    started: Time | None = None
    ended: Time | None = None
    # what became of its jobs' time, by the columns of the goodput
    node_seconds: Annotated[dict[Short, NodeSeconds], Field(max_length=20)] = {}
    # until its scheduler would start one more such job
    expected_wait_seconds: NodeSeconds | None = None
    jobs: Annotated[list[JobRecord], Field(max_length=100)] = []

    @model_validator(mode="after")
    def _says_what_it_needs(self) -> "Answer":
        if self.state == "needs" and self.have is None:
            raise ValueError("needs a model, and does not say which it has")
        return self


class FileFacts(BaseModel):
    """The size and digest of one file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    bytes: Annotated[int, Field(ge=0, le=2**53)]
    sha256: Sha256


class UpdateManifest(BaseModel):
    """What an update says of itself, and is held to."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format_version: Literal[1]
    campaign: Word
    round: Count
    facility: Word
    base: Sha256  # of the global model that training began from
    tokens: Number
    steps: Number
    loss: Annotated[float, Field(allow_inf_nan=False)]
    image: Short
    configuration: Short
    data: Short
    encoding: Codec
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    provenance: FileFacts | None = None  # of its run, beside it: what the run was made of
    files: dict[str, FileFacts]

    @model_validator(mode="after")
    def _has_a_short_provenance(self) -> "UpdateManifest":
        if self.provenance is not None and self.provenance.bytes > MAX_MANIFEST_BYTES:
            raise ValueError(f"a provenance of {self.provenance.bytes:,} bytes")
        return self

    @property
    def all_files(self) -> dict[str, FileFacts]:
        """Those with its tensors, and the statement of its run."""
        return self.files if self.provenance is None else {**self.files, RUN: self.provenance}


Said = TypeVar("Said", bound=BaseModel)


def read_answer(text: str, facility: str) -> dict[str, Any]:
    """The answer of a facility, of its lines the only one.

    Raises `UserError` for anything but the JSON that is expected, a greeting before it included.
    """
    try:
        answer = _typed(Answer, text.encode(errors="replace"), MAX_ANSWER_BYTES)
    except ValueError as error:
        raise UserError(
            f"{facility} gave no answer of `atoll site`: {_why(error)}; it printed "
            f"{printable(text.strip(), 80) or 'nothing'}",
            "its login shell must print nothing of itself (.bashrc), and Atoll there be this one",
        ) from None
    ends = [*answer.losses[:1], *answer.losses[1:][-1:]]  # before and after: a journal stays short
    kept: dict[str, Any] = {"why": printable(answer.why, SHOWN), "losses": ends}
    if answer.node_seconds:
        known = {n: value for n, value in answer.node_seconds.items() if n in GOODPUT_COLUMNS}
        kept |= {"node_seconds": known}  # other names each time would fill the journal
    facts = answer.model_dump(exclude_unset=True)
    return facts | {name: value for name, value in kept.items() if name in facts}


def read_request(text: str) -> SiteRequest:
    """What a coordinator asks; `UserError` for what is of another kind, or has no end."""
    try:
        return _typed(SiteRequest, text.encode(errors="replace"), MAX_MANIFEST_BYTES)
    except ValueError as error:
        raise UserError(
            f"the request is none: {_why(error)}", "the coordinator's Atoll must be this one"
        ) from None


def read_manifest(folder: Path) -> UpdateManifest:
    """The manifest of an update, whose files have not been looked at.

    Raises `UserError` for anything but the JSON that is expected.
    """
    path = manifest_file(folder)
    content = read_plain(path, MAX_MANIFEST_BYTES)
    try:
        manifest = _typed(UpdateManifest, content, MAX_MANIFEST_BYTES)
    except ValueError as error:
        raise UserError(f"{path} is no manifest: {_why(error)}", "send it again") from None
    for name in manifest.files:
        refuse_name(name, FILE_NAME, f"{path} names the file")
    return manifest


def read_plain(path: Path, most_bytes: int) -> bytes:
    """A plain file that is no longer than it may be: no link is followed, no pipe waited for."""
    with _opened_plain(path, most_bytes) as (file, _):
        return os.pread(file, most_bytes, 0)


def tail_of_plain(path: Path, most_bytes: int) -> bytes:
    """The last bytes of a plain file of any length, opened in the same way."""
    with _opened_plain(path) as (file, size):
        return os.pread(file, most_bytes, max(0, size - most_bytes))


@contextmanager
def _opened_plain(path: Path, most_bytes: float = math.inf) -> Iterator[tuple[int, int]]:
    """Its descriptor, and its size."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", "send the update again") from None
    try:
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > most_bytes:
            raise UserError(
                f"{path} is no plain file, or too large ({facts.st_size:,} bytes)",
                "do not use what comes from there",
            )
        yield file, facts.st_size
    finally:
        os.close(file)


def refuse_name(name: str, pattern: re.Pattern[str], where: str) -> None:
    if not pattern.fullmatch(name):
        raise UserError(f"{where} {name[:80]!r}", "do not use what comes from there")


def manifest_file(folder: Path) -> Path:
    return folder / "manifest.json"


def signature_file(folder: Path) -> Path:
    return folder / "manifest.json.sig"


def provenance_file(folder: Path) -> Path:
    """The statement of the run behind an update."""
    return folder / RUN


def _typed(kind: type[Said], content: bytes, most_bytes: int) -> Said:
    """`ValueError` for all that is not of this kind."""
    if len(content) > most_bytes:
        raise ValueError(f"{len(content):,} bytes, {most_bytes:,} may be")
    try:
        values = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError(f"a JSON {type(values).__name__}, not an object")
    files = values.get("files", {})
    if len(values) > 100 or (isinstance(files, dict) and len(files) > MAX_FILES):
        raise ValueError(f"more names than may be ({MAX_FILES:,} files)")
    return kind.model_validate(values)


def _why(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return printable(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", SHOWN)
    return printable(str(error).splitlines()[0] if str(error) else type(error).__name__, SHOWN)
