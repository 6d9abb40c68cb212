"""Where a run takes place: the facility, its nodes and limits, the image, the launcher."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from atoll.settings.fields import (
    Count,
    CountOrZero,
    Fraction,
    Positive,
    Settings,
    VariableName,
    VariableText,
    Word,
)

# MYTOKEN, TOKEN2, APPKEY, AWS_ACCESS_KEYID, GITHUB_PAT, GHPAT, PGPASSFILE, MYSQL_PWD; but neither
# NCCL_IB_PKEY, MONKEY, NCCL_IB_BYPASS, COMPASS, FI_CXI_COMPAT, PATH nor APPTAINER_PWD
SECRET_NAME = re.compile(
    r"SECRET|CREDENTIAL|PASSWO?R?D|PASSPHRASE|(PRIVATE|API|ACCESS)_?KEY|(^|_)CREDS\d*(_|$)"
    r"|(TOKEN|(?<!_P)(?<!^P)(?<!MON)(?<!DON)KEY|(?<!BY)(?<!COM)PASS)(S|ID|FILE|VALUE)*\d*(_|$)"
    r"|(^|_|MY|GH|GIT|HUB|LAB|AZURE)PATS?\d*(_|$)|(SQL|DB|PG)_?PWD\d*$",
    re.IGNORECASE,
)
GIVEN = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=")  # NAME=VALUE, as --export and --env take it
SSH_OPTION = re.compile(r"^(-o\s*)?[A-Za-z]\w*(\s*=\s*|\s+)")  # its own name, as UpdateHostKeys
IN_THE_SHELL = (
    "export {name} in the shell that submits: jobs of Slurm inherit it, those of PBS with "
    "facility.submit.v={name}"
)
SubmitFlag = str | int | bool | list[str | int] | None
Capability = Annotated[str, Field(pattern=r"^(\d+\.\d|gfx[0-9a-f]+)$", coerce_numbers_to_str=True)]
Port = Annotated[int, Field(ge=1024, le=65535)]


def refuse_secrets(
    setting: str, values: Iterable[Any], kept: str = "run folders", hint: str = IN_THE_SHELL
) -> None:
    """Raise `ValueError` where flags give a variable that looks like a secret."""
    for value in values:
        for word in value if isinstance(value, list) else [value]:
            for name in GIVEN.findall(str(word)):
                refuse_secret_name(f"{setting} gives {name}, which", name, kept, hint)


def refuse_secret_name(
    what: str, name: str, kept: str = "run folders", hint: str = IN_THE_SHELL
) -> None:
    """Raise `ValueError` where a variable has a name that looks like a secret."""
    if SECRET_NAME.search(name):
        raise ValueError(
            f"{what} looks like a secret, and {kept} keep none", hint.format(name=name)
        )


def option_values(words: Iterable[str]) -> list[str]:
    """ssh's options without their own names, which are no variables."""
    return [SSH_OPTION.sub("", word) for word in words]


class Node(Settings):
    """The hardware of one node; an unknown value stays unset."""

    devices: Count  # accelerators of a node, or ranks where there are none
    device: Literal["cpu", "cuda", "rocm", "xpu"]  # what they are
    # of the processors: images are built for one
    architecture: Literal["x86_64", "aarch64"] = "x86_64"
    compute_capability: Capability | None = Field(
        None, description="of one device: NVIDIA's as 8.0, AMD's as gfx90a"
    )
    device_memory_gib: Positive | None = None  # of one device; ranks on processors share memory_gib
    cores: Count | None = None  # of the node, divided among its ranks
    memory_gib: Positive | None = None  # of the node
    peak_tflops: Positive | None = Field(
        None, description="dense bf16 peak of one device; unset: measured where there is no device"
    )
    device_memory_gb_s: Positive | None = Field(
        None, description="GB/s of one device's memory, as its data sheet states"
    )
    link_gbps: Positive | None = Field(
        None, description="Gbit/s of one device to others of its node, in one direction"
    )
    link_latency_us: Positive | None = Field(
        None, description="microseconds of one message to another device of the node; unset: none"
    )
    file_write_gb_s: Positive | None = Field(
        None, description="GB/s that one node writes to files; unset: as `doctor --job` measured"
    )
    device_watts: Positive | None = Field(
        None, description="the most one device draws, to estimate energy where none is measured"
    )


class Network(Settings):
    """What carries messages between nodes, and what of the host NCCL or RCCL needs for it."""

    fabric: Literal["ethernet", "infiniband", "slingshot"] | None = None  # the kind of the network
    gbps: Positive | None = Field(
        default=None,
        description="Gbit/s of one node to others, in one direction, all its cards together",
    )
    latency_us: Positive | None = Field(
        default=None, description="microseconds of one message to another node; unset: none"
    )
    plugin: Path | None = Field(
        default=None,
        description="the host's plugin (libnccl-net.so) where the image has none for it",
    )
    libraries: list[str] = Field(
        default=[], max_length=4, description="folders of libraries that the plugin needs"
    )


class Modules(Settings):
    """What a job does with the facility's module command first, in this order."""

    use: list[str] = Field(default=[], description="folders of module files to look in as well")
    load: list[str] = []  # modules to load, with their versions


class Queue(Settings):
    """What one partition, QoS or queue allows in one job."""

    min_nodes: Count = 1  # the fewest of a job
    max_nodes: Count | None = None  # the most of a job; null: not stated
    max_walltime_minutes: Count | None = None  # the longest job; null: not stated
    # the longest job by its size: up to so many nodes, so many minutes
    walltime_minutes_up_to_nodes: dict[Count, Count] = {}


class Limits(Queue):
    """What a facility allows in one job, and what each of its queues allows, by name."""

    needs_account: bool = False  # jobs without one are refused
    queues: dict[str, Queue] = {}  # name of a partition, QoS or queue -> its own limits


class Budget(Settings):
    """How the facility tells what an account has left."""

    command: list[str] = Field(
        default=[],
        description="its words, {account} among them where it takes one; none: nothing is asked",
    )
    pattern: str | None = Field(
        default=None,
        description="what it prints for {account}: with one group, the hours left; or with two, "
        "?P<used> and ?P<granted>",
    )
    per_node_hour: Positive = Field(
        default=1.0, description="its hours in an hour of one node: 4 of a node's four GPUs"
    )

    @field_validator("command")
    @classmethod
    def _words_give_no_secret(cls, words: list[str]) -> list[str]:
        refuse_secrets("facility.budget.command", words)
        return words

    @field_validator("pattern")
    @classmethod
    def _has_its_groups(cls, pattern: str | None) -> str | None:
        try:
            compiled = re.compile((pattern or "()").replace("{account}", "a"))
        except re.error as error:
            found = f"facility.budget.pattern is no regular expression: {error}"
            raise ValueError(found, r"as 'left: (\d+)'") from None
        named = set(compiled.groupindex)
        if compiled.groups != 1 and not (compiled.groups == 2 and named == {"used", "granted"}):
            raise ValueError(
                f"facility.budget.pattern has {compiled.groups} groups",
                r"one, as in 'left: (\d+)', or '(?P<used>\d+)/(?P<granted>\d+)'",
            )
        return pattern


class Facility(Settings):
    """One supercomputer or machine: facts only, no code."""

    name: Word  # its own, and that of its YAML
    scheduler: Literal["none", "slurm", "pbs"]  # that takes jobs; none: ranks start here, at once
    unsupported: str | None = Field(None, description="why runs are refused here")
    # that jobs are charged to; with a scheduler `atoll submit` asks for it where it is needed
    account: str | None = None
    walltime_minutes: Count | None = None  # of a job; a longer run goes on in the next one
    # flags of sbatch or qsub, without their dashes; null leaves one out
    submit: dict[str, SubmitFlag] = {}
    node: Node
    step: list[str] = Field([], description="flags of the step, as they are")
    task_binding: list[str] = Field([], description="those that hold for one task per device only")
    modules: Modules = Modules()
    container: Literal["apptainer", "singularity"] = "apptainer"  # the program that runs the image
    # variables of the ranks, also inside the image
    environment: dict[VariableName, VariableText] = {}
    task_folders: dict[VariableName, str] = Field(
        {}, description="variable -> the folder in which each task makes one of its own"
    )
    binds: list[str] = []  # folders of the host that the image sees, as apptainer writes them
    node_folder: Path | None = Field(
        None, description="on each node's own disk; there when a job begins, bound as it is"
    )
    network: Network = Network()
    limits: Limits = Limits()
    budget: Budget = Budget()
    requeue: bool = Field(True, description="may a job put itself back in the queue")
    node_network: bool | None = Field(None, description="do compute nodes reach the internet")
    # version of the GPU driver on its nodes, to refuse an image that needs a newer one
    driver: str | None = None
    hosts_file: Path | None = Field(
        default=None, description="machines without a scheduler, one a line, reached by ssh"
    )
    ssh_options: list[str] = []  # of launcher=ssh, as ssh takes them
    address_suffix: str = ""  # added to the name of a node where that reaches a faster network
    node_names: str | None = Field(
        None, description="two of its nodes as its scheduler writes them, as nid[001-002]"
    )
    port: Port | None = None  # that the first rank listens on; null: one that follows from the job
    checked_on: str | None = None  # the date on which these facts were compared with their source
    source: str | None = None  # where these facts stand

    @field_validator("submit", "step", "task_binding", "ssh_options")
    @classmethod
    def _flags_give_no_secret(cls, flags: Any, field: ValidationInfo) -> Any:
        values = flags.values() if isinstance(flags, dict) else flags
        values = option_values(flags) if field.field_name == "ssh_options" else values
        refuse_secrets(f"facility.{field.field_name}", values)
        return flags

    @field_validator("environment", "task_folders")
    @classmethod
    def _holds_no_secret(cls, variables: dict[str, str], field: ValidationInfo) -> dict[str, str]:
        for name, value in variables.items():
            setting = f"facility.{field.field_name}.{name}"
            refuse_secret_name(setting, name)
            refuse_secrets(setting, [value])
        return variables


class Image(Settings):
    """The container that runs the ranks; `none`: they run from the clone's environment.

    `args_file` says what it is built from, `file` where it is; without a file it is the newest
    one that `atoll image` built from that args file, in `folders.images`.
    """

    name: Word  # its own, and that of its YAML
    args_file: str | None = None  # in containers/: what it is built from
    file: Path | None = None  # an image file to use as it is; null: the newest built one
    run_flags: list[str] = []  # of `apptainer exec`, as they are
    device: Literal["cpu", "cuda", "rocm"] = "cpu"  # whose libraries it brings
    capabilities: list[str] = Field(
        [], description="the devices it was built for, as 8.0, 12.0+PTX or gfx90a"
    )
    network_plugins: list[str] = Field(
        [], description="what NCCL_NET may name, beside NCCL's own: plugins the image brings"
    )
    needs: list[str] = Field(
        [], description="paths of its base that no bind may hide, beside those of every image"
    )
    bind_source: bool = Field(False, description="run the clone's code instead of the image's")
    verify_key: Path | None = Field(None, description="a public key the image must be signed with")

    @field_validator("run_flags")
    @classmethod
    def _flags_give_no_secret(cls, flags: list[str]) -> list[str]:
        refuse_secrets("image.run_flags", flags)
        return flags

    @model_validator(mode="after")
    def _signed_where_there_is_one(self) -> "Image":
        if self.verify_key and self.args_file is None and self.file is None:
            raise ValueError("image.verify_key without an image", "choose an image, as image=cpu")
        return self


class Launcher(Settings):
    """How ranks come to life: a task per device, or one per node that starts its ranks."""

    # static: a task per device; the others: a task per node, or one in all
    name: Literal["static", "static_node", "torchrun", "mpiexec", "ssh"]


class Restart(Settings):
    """How a run goes on by itself: after its wall time, and after a fault while steps advance."""

    # after faults and time limits; two faults in a row without progress end the run before that
    max_restarts: CountOrZero = 20
    exclude: bool = Field(
        default=True, description="leave out a node that the evidence of a fault speaks against"
    )
    notice_seconds: Count = Field(
        default=180, description="time to finish a step and write a checkpoint"
    )
    failures_per_node_day: Positive = Field(
        default=0.0038,
        description="for checkpoint.every_steps=auto; 419 in 54 days of 2,048 nodes, as of Llama 3",
    )


class Watch(Settings):
    """When ranks that do not move any more are ended, and which are called slow or unfit."""

    stall_seconds: Positive | None = Field(
        default=None, description="in a step; unset: 20 of the run's own median step, 180 at least"
    )
    slow_seconds: Positive = Field(
        default=1800.0,
        description="at the start, in the first steps, a checkpoint, an evaluation, the export",
    )
    straggler_ratio: float = Field(
        default=1.3, gt=1.0, description="of a rank's own work to the median of its peers: slow"
    )
    straggler_steps: CountOrZero = Field(
        default=20, description="in a row, until a slow rank is named; 0: none is"
    )
    straggler_seconds: float = Field(
        default=20.0, ge=0.0, description="at least, for processes of a node take turns"
    )
    preflight_share: Fraction | None = Field(
        default=None,
        description="of the median, below which a node is unfit; unset: 0.7, of processors 0.3",
    )


class Folders(Settings):
    """Where runs, prepared data and images live; relative ones start in the clone around."""

    runs: Path
    prepared: Path  # token shards, shared by all runs with the same text and tokenizer
    images: Path = Path("images")  # image files, as `atoll image build` makes them
    facilities: Path = Path("facilities")  # what `atoll doctor --job` measured
    bundle: Path | None = None  # of `atoll prepare`, where nodes have no network
    caches: dict[VariableName, Path] = Field(
        default={}, description="of the hub's libraries, as HF_HOME: unset, those of the shell"
    )

    @field_validator("caches")
    @classmethod
    def _are_no_secrets(cls, caches: dict[str, Path]) -> dict[str, Path]:
        for name in caches:
            refuse_secret_name(f"folders.caches.{name}", name)
        return caches
