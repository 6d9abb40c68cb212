"""Every setting of a run, typed, with its unit in its name.

The values live in `hydra_conf/`; here is what they may be. A run is read back from its
`run.yaml` by `load_run`, without Hydra, on every rank.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from atoll.errors import UserError

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=120)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
VariableText = Annotated[str, Field(coerce_numbers_to_str=True)]
# One file may be written without its brackets: data.files=a.txt
FileNames = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIALS?)(_|$)", re.IGNORECASE
)


class Settings(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Node(Settings):
    """The hardware of one node; an unknown value stays unset."""

    devices: Count
    device: str
    device_memory_gib: Positive | None = None
    cores: Count | None = None
    memory_gib: Positive | None = None
    peak_tflops: Positive | None = Field(
        None, description="dense bf16 peak of one device; unset: measured where there is no device"
    )


class Limits(Settings):
    """What a facility allows in one job."""

    min_nodes: Count = 1
    max_nodes: Count | None = None
    max_walltime_minutes: Count | None = None
    needs_account: bool = False


class Facility(Settings):
    """One supercomputer or machine: facts only, no code."""

    name: Word
    scheduler: Literal["none", "slurm"]
    account: str | None = None
    walltime_minutes: Count | None = None
    submit: dict[str, str | int | bool | None] = {}
    node: Node
    step: list[str] = []
    environment: dict[VariableName, VariableText] = {}
    binds: list[str] = []
    limits: Limits = Limits()
    driver: str | None = None
    address_suffix: str = ""
    port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    checked_on: str | None = None
    source: str | None = None

    @field_validator("environment")
    @classmethod
    def _holds_no_secret(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            if SECRET_NAME.search(name):
                raise ValueError(
                    f"facility.environment.{name} looks like a secret, and run folders keep none",
                    f"export {name} in the shell that submits: jobs inherit it",
                )
        return environment


class Image(Settings):
    """The container that runs the ranks; without a file they run from the clone's environment."""

    name: Word
    file: Path | None = None
    args_file: str | None = None
    run_flags: list[str] = []


class Launcher(Settings):
    """How ranks come to life: one task per device, or one per node that forks its ranks."""

    name: Literal["static", "static_node"]


class Sharding(Settings):
    """How the model is spread: layouts applied in order, and the engine that takes a step."""

    name: Word
    layouts: list[str]
    engine: Literal["plain"] = "plain"
    shard: Literal["none", "node", "all"] | Count = "none"
    reshard_after_forward: bool = True
    sync_every_microbatch: bool = False


class Model(Settings):
    """A Hugging Face model: a folder, a hub name, or a configuration to initialise at random."""

    name: Word
    source: str | None = None
    revision: str | None = None
    config: dict[str, Any] = {}

    @model_validator(mode="after")
    def _has_an_origin(self) -> "Model":
        if self.source is None and "model_type" not in self.config:
            raise ValueError("give model.source (folder or hub name) or model.config.model_type")
        return self


class Tokenizer(Settings):
    """A tokenizer by path or hub name; unset: the model's own, else one trained on the data."""

    path: str | None = None
    vocabulary_tokens: Annotated[int, Field(ge=258)] = 8192
    training_documents: Count = 20_000


class Validation(Settings):
    """The held-out text: a fraction of the documents, other files, or a split of the hub."""

    fraction: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    files: FileNames = []
    split: str | None = None

    @model_validator(mode="after")
    def _one_way(self) -> "Validation":
        ways = [self.fraction is not None, bool(self.files), self.split is not None]
        if sum(ways) != 1:
            raise ValueError("choose one of data.validation.fraction, .files, .split")
        return self


class Data(Settings):
    """Where the text comes from, how it becomes documents, and how documents become batches."""

    name: Word
    source: Literal["python_stdlib", "files", "hub"]
    files: FileNames = []
    hub: str | None = None
    hub_config: str | None = None
    hub_split: str = "train"
    text_field: str = "text"
    document: Literal["file", "paragraph", "line"] = "file"
    template: str = "{text}"
    max_documents: Count | None = None
    validation: Validation
    batching: Literal["packing", "padding"] = "packing"
    packing: Literal["best_fit", "concat"] = "best_fit"
    sequence_tokens: Annotated[int, Field(ge=2)] = 512
    documents_per_shard: Count = 5_000
    workers: Count | None = None

    @model_validator(mode="after")
    def _template_holds_text(self) -> "Data":
        if "{text}" not in self.template:
            raise ValueError(f"data.template holds no {{text}}: {self.template!r}")
        return self


class Task(Settings):
    """What is learned."""

    name: Literal["causal_lm"]


class Optimizer(Settings):
    """The optimizer, its schedule and its clipping."""

    name: Literal["adamw", "adamw_8bit"]
    learning_rate: Positive
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    epsilon: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    clip_norm: Positive | None = 1.0
    warmup_steps: CountOrZero = 0
    decay: Literal["cosine", "constant"] = "cosine"
    final_fraction: Fraction = 0.1
    scale_with_ranks: Literal["none", "sqrt", "linear"] = "none"


class Precision(Settings):
    """The number format of the arithmetic; weights and optimizer stay fp32."""

    compute: Literal["auto", "bf16", "fp32"]


class Training(Settings):
    """The length of the run and the shape of a step."""

    steps: Count | None = None
    epochs: Positive | None = None
    global_batch_samples: Count
    microbatch_samples: Count
    log_every_steps: Count = 10
    compile: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    loss_chunk_tokens: Count = 512
    timeout_minutes: Positive = 30.0

    @model_validator(mode="after")
    def _one_length(self) -> "Training":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("choose one of training.steps and training.epochs, the other null")
        return self


class Checkpoint(Settings):
    """When the state is saved, and how many states are kept."""

    every_steps: CountOrZero = 0
    keep: Count = 2
    asynchronous: bool = True


class Evaluation(Settings):
    """Perplexity on held-out text: before, after, and every so many steps (0: not between)."""

    every_steps: CountOrZero = 0
    max_samples: Count | None = None


class Export(Settings):
    """The Hugging Face model written at the end."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    max_file_gib: Positive = 4.0


class Generation(Settings):
    """The sentence sampled from the export."""

    prompt: str = "def "
    max_new_tokens: Count = 48
    temperature: Positive = 0.8
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.95


class Folders(Settings):
    """Where runs and prepared data live; relative ones start where the command was typed."""

    runs: Path = Path("runs")
    prepared: Path = Path("prepared")


class Federation(Settings):
    """The part this run plays in a campaign; `none`: it trains alone."""

    name: Literal["none"] = "none"


class Run(Settings):
    """Everything one run needs to know."""

    name: Word
    seed: CountOrZero = 0
    deterministic: bool = False
    nodes: Count = 1
    ranks_per_node: Count
    folders: Folders
    facility: Facility
    image: Image
    launcher: Launcher
    sharding: Sharding
    model: Model
    tokenizer: Tokenizer
    data: Data
    task: Task
    optimizer: Optimizer
    precision: Precision
    training: Training
    checkpoint: Checkpoint
    evaluation: Evaluation
    export: Export
    generation: Generation
    federation: Federation = Federation()

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @model_validator(mode="after")
    def _batch_divides(self) -> "Run":
        per_pass = self.world_size * self.training.microbatch_samples
        if self.training.global_batch_samples % per_pass:
            raise ValueError(
                f"training.global_batch_samples ({self.training.global_batch_samples}) must be "
                f"divisible by ranks x training.microbatch_samples "
                f"({self.world_size} x {self.training.microbatch_samples} = {per_pass})"
            )
        return self

    @model_validator(mode="after")
    def _sharding_fits(self) -> "Run":
        shard = self.sharding.shard
        if isinstance(shard, int) and self.world_size % shard:
            raise ValueError(
                f"world size ({self.world_size}) must be divisible by sharding.shard ({shard})"
            )
        if not self.sharding.layouts and self.world_size > 1:
            raise ValueError(
                f"sharding={self.sharding.name} is one process, but this run has "
                f"{self.world_size} ranks: set ranks_per_node=1, or choose ddp or full_shard"
            )
        return self


def checked(values: Mapping[str, Any]) -> Run:
    """Turn plain values into a `Run`.

    Raises `UserError` naming the first setting that is unknown, missing or out of range.
    """
    try:
        return Run.model_validate(values)
    except ValidationError as error:
        raise _explained(error) from None


def dumped(run: Run) -> dict[str, Any]:
    """The run as plain JSON values, ready for YAML."""
    return run.model_dump(mode="json")


def load_run(path: Path) -> Run:
    """Read a `run.yaml` written by `atoll compose` or `atoll submit`."""
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"no run at {path.parent}: run.yaml is missing",
            "give the folder of a run; sbatch/train.sbatch makes one",
        ) from None
    return checked(values)


def setting_names(model: type[BaseModel] = Run, prefix: str = "") -> Iterator[str]:
    """Every dotted name a run knows, for "did you mean" and for documentation."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for inner in _models_in(field.annotation):
            yield from setting_names(inner, f"{prefix}{name}.")


def is_setting(name: str) -> bool:
    """Whether a run knows this dotted name; free-form groups know every name below them."""
    annotation: Any = Run
    for part in name.split("."):
        if get_origin(annotation) is dict:
            return True
        fields = [m.model_fields[part] for m in _models_in(annotation) if part in m.model_fields]
        if not fields:
            return False
        annotation = fields[0].annotation
    return True


def nearest_setting(name: str) -> str | None:
    """The known setting whose dotted name, or last word, is most like `name`."""
    known = list(setting_names())
    last_words: dict[str, str] = {}
    for full in known:
        last_words.setdefault(full.rsplit(".", 1)[-1], full)
    whole = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if whole:
        return whole[0]
    last = difflib.get_close_matches(name.rsplit(".", 1)[-1], last_words, n=1, cutoff=0.7)
    return last_words[last[0]] if last else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) in (Union, UnionType):
        return [m for part in get_args(annotation) for m in _models_in(part)]
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return [annotation] if is_model else []


def _explained(error: ValidationError) -> UserError:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    kind = first["type"]
    if kind == "extra_forbidden":
        near = nearest_setting(name)
        hint = f"did you mean {near}?" if near else "`atoll compose` lists every setting"
        return UserError(f"unknown setting: {name}", hint)
    if kind == "missing":
        return UserError(f"setting missing: {name}", f"set it: {name}=VALUE")
    if kind == "value_error":
        found, *mend = first["ctx"]["error"].args
        return UserError(found, *(mend or ["change one of the named settings so that they agree"]))
    found = f"{name} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return UserError(found, _mend(name, first))


def _mend(name: str, first: Any) -> str:
    if first["type"] == "string_type" and isinstance(first["input"], int | float):
        return f"quote it, so that it stays text: \"{name}='{first['input']}'\""
    choices = first.get("ctx", {}).get("expected")
    if not isinstance(choices, str):
        return f"give {name} another value"
    words = [word.strip("' ") for word in choices.replace(" or ", ", ").split(",")]
    near = difflib.get_close_matches(str(first["input"]), words, n=1)
    return f"did you mean {name}={near[0]}?" if near else f"choose {name} from: {', '.join(words)}"
