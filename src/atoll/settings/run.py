"""Everything that one run needs to know, and what must agree in it."""

from pydantic import Field, model_validator

from atoll.settings.axes import Axes, axes_of
from atoll.settings.data import Data
from atoll.settings.fields import (
    Count,
    CountOrZero,
    LoggerNames,
    OverrideNames,
    Positive,
    Settings,
    Word,
)
from atoll.settings.learning import (
    Checkpoint,
    Evaluation,
    Export,
    Generation,
    Guard,
    Model,
    Optimizer,
    Precision,
    Task,
    Tokenizer,
    Training,
)
from atoll.settings.machine import Facility, Folders, Image, Launcher, Restart, Watch
from atoll.settings.sharding import Sharding


class Monitor(Settings):
    """What watches a run beside metrics.jsonl and its loggers; nothing of it changes a loss."""

    communication: bool  # profile one step: bytes and seconds of its collectives
    energy: bool  # joules of devices and processors
    progress: bool  # a progress bar, or plain lines


class Confirm(Settings):
    """When `atoll submit` asks a person first."""

    node_hours: Positive | None = Field(
        default=None, description="from so many on, submit asks before it queues a run; null: never"
    )


class Run(Settings):
    """Everything one run needs to know."""

    name: Word
    seed: CountOrZero  # of random weights, of the order of samples, and of what is held out
    deterministic: bool  # kernels that give the same bits again, where torch has them; slower
    nodes: Count  # that train
    spare_nodes: CountOrZero = 0  # that the job asks for as well, to take the place of others
    ranks_per_node: Count  # one for each device
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
    guard: Guard = Guard()
    restart: Restart = Restart()
    watch: Watch = Watch()
    preflight: bool | None = Field(
        default=None, description="try nodes before step 1; unset: where there is a scheduler"
    )
    evaluation: Evaluation
    export: Export
    generation: Generation
    monitor: Monitor
    confirm: Confirm = Confirm()
    override: OverrideNames = []  # checks that are left out
    loggers: LoggerNames  # where figures go beside metrics.jsonl, in the run's folder

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def order_seed(self) -> int:
        """Of the order in which training samples are taken."""
        own = self.training.data_seed
        return self.seed if own is None else own

    @property
    def tries_nodes(self) -> bool:
        by_itself = self.facility.scheduler != "none" and self.world_size > 1
        return by_itself if self.preflight is None else self.preflight

    @property
    def job_nodes(self) -> int:
        """The nodes that its job asks for."""
        return self.nodes + self.spare_nodes

    @model_validator(mode="after")
    def _task_has_its_data(self) -> "Run":
        labelled, task = self.data.classes is not None, self.task.name
        if labelled != (task == "classification"):
            has = "has rows with labels" if labelled else "has no data.classes"
            raise ValueError(
                f"task={task}, but data={self.data.name} {has}",
                "task=classification" if labelled else "choose data with classes: data=glue_rte",
            )
        if (self.data.format == "preference") != (task == "preference"):
            raise ValueError(
                f"task={task}, but data={self.data.name} has data.format={self.data.format}",
                "data=preference_files goes with task=preference, and with no other",
            )
        if task == "preference" and self.sharding.step_engine == "deepspeed":
            raise ValueError(
                f"task=preference with sharding={self.sharding.name}: DeepSpeed's engine gives no "
                "log-probabilities",
                "choose ddp or full_shard",
            )
        wide = self.sharding.axes_used
        if task != "causal_lm" and wide:
            raise ValueError(
                f"task={task} with {wide}: its ranks share no sample and no layer",
                "choose ddp, full_shard, all_reduce or gather_scatter",
            )
        return self

    @model_validator(mode="after")
    def _windows_are_read_by_steps(self) -> "Run":
        every, epochs = self.evaluation.every_epochs, self.training.epochs
        if self.data.window_shards is None or (epochs is None and not every):
            return self
        what = f"training.epochs={epochs:g}" if epochs else f"evaluation.every_epochs={every}"
        raise ValueError(
            f"{what} with data.window_shards={self.data.window_shards}: how long an epoch is, is "
            "not known when training begins",
            "training.steps=NUMBER training.epochs=null" if epochs else "evaluation.every_steps",
        )

    @model_validator(mode="after")
    def _epochs_are_of_one_source(self) -> "Run":
        every, epochs = self.evaluation.every_epochs, self.training.epochs
        if self.data.sources and (epochs is not None or every):
            what = f"training.epochs={epochs:g}" if epochs else f"evaluation.every_epochs={every}"
            raise ValueError(
                f"{what} with {len(self.data.sources)} data.sources: each has epochs of its own",
                "training.steps=NUMBER training.epochs=null; `metrics.jsonl` tells the epochs of "
                "each, data.sources' max_epochs bounds them"
                if epochs
                else "evaluation.every_steps=NUMBER",
            )
        return self

    @model_validator(mode="after")
    def _adapters_are_whole(self) -> "Run":
        if self.model.lora is None:
            return self
        axes = self.sharding.axes_used
        divided = axes or self.sharding.engine != "plain"
        if divided or (self.model.quantisation == "int8" and "fsdp" in self.sharding.layouts):
            what = f"model.quantisation={self.model.quantisation}" if not divided else "model.lora"
            raise ValueError(
                f"{what} with {axes or f'sharding={self.sharding.name}'}: its weights are not "
                "divided so",
                "choose ddp or single, or full_shard" + (" alone" if divided else " with nf4"),
            )
        return self

    @model_validator(mode="after")
    def _exchanges_are_not_compiled(self) -> "Run":
        expert, context = self.sharding.expert, self.sharding.context
        if self.training.compile and (expert > 1 or context > 1):
            axis = f"expert={expert}" if expert > 1 else f"context={context}"
            why = (
                "how many tokens a rank sends and receives changes with each batch"
                if expert > 1
                else "torch compiles no block in which ranks exchange heads for tokens"
            )
            raise ValueError(
                f"training.compile=true with sharding.{axis}: {why}", "training.compile=false"
            )
        return self

    @model_validator(mode="after")
    def _goes_beyond_its_origin(self) -> "Run":
        step, steps = self.checkpoint.initial_step, self.training.steps
        if step and steps is not None and steps <= step:
            raise ValueError(
                f"training.steps={steps}, and checkpoint.initial_load_path is of step {step}",
                f"training.steps={step + (self.optimizer.cooldown_steps or 100)}: steps are "
                "counted from where that run began",
            )
        return self

    @model_validator(mode="after")
    def _groups_have_their_engine(self) -> "Run":
        groups, divided = self.optimizer.groups, self.axes.data < self.axes.world
        frozen = any(group.frozen for group in groups)
        if groups and (self.sharding.engine != "plain" or (frozen and divided)):
            what = "optimizer.groups with frozen=true" if frozen else "optimizer.groups"
            raise ValueError(
                f"{what} with sharding={self.sharding.name}: it cannot carry them",
                "choose ddp, full_shard or hybrid_shard, or optimizer.groups=[]",
            )
        return self

    @model_validator(mode="after")
    def _mup_has_its_task_and_engine(self) -> "Run":
        unfit = {
            f"task={self.task.name}": self.task.name != "causal_lm",
            f"sharding={self.sharding.name}": self.sharding.engine == "deepspeed",
            f"optimizer.proximal={self.optimizer.proximal:g}": self.optimizer.proximal > 0,
        }
        wrong = [name for name, present in unfit.items() if present]
        if self.model.mup.base_width is not None and wrong:
            raise ValueError(
                f"model.mup.base_width={self.model.mup.base_width} with {wrong[0]}: it cannot give "
                "each parameter steps of its own",
                "model.mup.base_width=null, or task=causal_lm, full_shard, optimizer.proximal=0",
            )
        return self

    @model_validator(mode="after")
    def _muon_has_whole_gradients(self) -> "Run":
        unfit = self.sharding.engine != "plain" or self.sharding.offload
        if self.optimizer.name == "muon" and (unfit or self.model.lora is not None):
            what = "model.lora" if not unfit else f"sharding={self.sharding.name}"
            raise ValueError(
                f"optimizer=muon with {what}: it gathers each matrix of a block on its device",
                "optimizer=adamw, or choose full_shard, ddp or tensor ranks, without adapters",
            )
        return self

    @model_validator(mode="after")
    def _eight_bits_have_their_engine(self) -> "Run":
        if self.optimizer.name == "adamw_8bit" and self.sharding.engine == "deepspeed":
            raise ValueError(
                f"optimizer=adamw_8bit with sharding={self.sharding.name}: DeepSpeed keeps the "
                "optimizer's state",
                "choose full_shard, ddp or single, or optimizer=adamw",
            )
        return self

    @model_validator(mode="after")
    def _average_has_its_engine(self) -> "Run":
        if self.optimizer.ema_decay is not None and self.sharding.engine != "plain":
            raise ValueError(
                f"optimizer.ema_decay={self.optimizer.ema_decay:g} with sharding="
                f"{self.sharding.name}: {self.sharding.engine} keeps the weights",
                "choose full_shard, or optimizer.ema_decay=null",
            )
        return self

    @model_validator(mode="after")
    def _proximal_has_its_engine(self) -> "Run":
        if self.optimizer.proximal and self.sharding.engine != "plain":
            raise ValueError(
                f"optimizer.proximal={self.optimizer.proximal:g} with sharding="
                f"{self.sharding.name}: {self.sharding.engine} takes the steps",
                "choose full_shard, or optimizer.proximal=0",
            )
        return self

    @model_validator(mode="after")
    def _z_loss_has_its_task(self) -> "Run":
        if self.training.z_loss and self.task.name != "causal_lm":
            raise ValueError(
                f"training.z_loss={self.training.z_loss:g} with task={self.task.name}",
                "task=causal_lm, or training.z_loss=0",
            )
        return self

    @model_validator(mode="after")
    def _tasks_are_for_decoders(self) -> "Run":
        if self.evaluation.tasks and self.data.classes is not None:
            raise ValueError(
                f"evaluation.tasks={self.evaluation.tasks} with task={self.task.name}: "
                "the harness's tasks are for models that continue text",
                "task=causal_lm, or evaluation.tasks=[]",
            )
        return self

    @model_validator(mode="after")
    def _new_tokens_learn(self) -> "Run":
        if self.model.lora is not None and self.tokenizer.add_tokens:
            raise ValueError(
                "model.lora leaves embeddings as they are: of tokenizer.add_tokens, the new tokens "
                "would never learn",
                "model.lora=null, or tokenizer.add_tokens=[]",
            )
        return self

    @model_validator(mode="after")
    def _conversations_have_a_template(self) -> "Run":
        tokenizer = self.tokenizer
        given = tokenizer.path or self.model.source or tokenizer.chat_template
        if self.data.holds_conversations and not given:
            raise ValueError(
                f"data.format={self.data.format}, and a tokenizer that is made here has no "
                "chat template",
                "tokenizer.chat_template=chatml tokenizer.add_tokens=['<|im_start|>','<|im_end|>']",
            )
        return self

    @model_validator(mode="after")
    def _launcher_has_its_scheduler(self) -> "Run":
        scheduler, launcher = self.facility.scheduler, self.launcher.name
        if (scheduler == "pbs") and launcher != "mpiexec":
            raise ValueError(
                f"launcher={launcher} starts tasks with srun, and {self.facility.name} has PBS",
                "launcher=mpiexec",
            )
        if scheduler == "none" and launcher == "mpiexec":
            raise ValueError(
                f"launcher=mpiexec needs a scheduler, and {self.facility.name} has none",
                "launcher=static_node",
            )
        if launcher == "ssh" and (scheduler != "none" or self.facility.hosts_file is None):
            raise ValueError(
                f"launcher=ssh starts ranks on the machines of a file, and {self.facility.name} "
                "has none",
                "facility.hosts_file=FILE, with facility.scheduler=none",
            )
        if self.spare_nodes and (scheduler != "slurm" or launcher == "mpiexec"):
            raise ValueError(
                f"spare_nodes={self.spare_nodes}: a spare takes a node's place by srun alone, and "
                f"{self.facility.name} has scheduler={scheduler}, launcher={launcher}",
                "leave spare_nodes out" if scheduler != "slurm" else "launcher=static",
            )
        return self

    @property
    def axes(self) -> Axes:
        return axes_of(self)

    @property
    def microbatches(self) -> int:
        """Passes of each rank in a step."""
        per_pass = self.axes.data * self.training.microbatch_samples
        return self.training.global_batch_samples // per_pass

    @model_validator(mode="after")
    def _batch_follows_the_ranks(self) -> "Run":
        training, ranks = self.training, self.axes.data
        whole, share = training.global_batch_samples, training.device_batch_samples
        if whole == 0 and share is None:
            raise ValueError(
                "a step has no samples: training.global_batch_samples and device_batch_samples "
                "are both null",
                "training.global_batch_samples=512, or training.device_batch_samples=4",
            )
        if share is None or whole == share * ranks:
            return self
        if whole:
            raise ValueError(
                f"training.global_batch_samples ({whole}) is not training.device_batch_samples x "
                f"ranks ({share} x {ranks} = {share * ranks})",
                "set one of them, the other to null",
            )
        changed = training.model_copy(update={"global_batch_samples": share * ranks})
        return self.model_copy(update={"training": changed})

    @model_validator(mode="after")
    def _batch_divides(self) -> "Run":
        data, microbatch = self.axes.data, self.training.microbatch_samples
        per_pass = data * microbatch
        if self.training.global_batch_samples % per_pass:
            raise ValueError(
                f"training.global_batch_samples ({self.training.global_batch_samples}) must be "
                f"divisible by ranks x training.microbatch_samples "
                f"({data} x {microbatch} = {per_pass})",
                self._nearest_batch(per_pass),
            )
        return self

    def _nearest_batch(self, per_pass: int) -> str:
        """Smaller microbatches for the same step where there are any, or another step."""
        whole, ranks = self.training.global_batch_samples, self.axes.data
        if whole % ranks == 0:
            share = whole // ranks
            fits = max(n for n in range(1, per_pass // ranks + 1) if share % n == 0)
            return f"training.microbatch_samples={fits}, with the same samples in a step"
        nearest = max(1, round(whole / per_pass)) * per_pass
        return f"training.global_batch_samples={nearest}, the nearest that fits"

    @model_validator(mode="after")
    def _tokens_divide(self) -> "Run":
        tokens, parts = self.data.sequence_tokens, self.axes.tokens
        if tokens % parts:
            raise ValueError(
                f"data.sequence_tokens ({tokens}) must be divisible by sharding.context x tensor "
                f"({self.sharding.context} x {self.sharding.tensor} = {parts})"
            )
        return self

    @model_validator(mode="after")
    def _pipeline_is_fed(self) -> "Run":
        stages, interleaved = self.sharding.pipeline, self.sharding.stages_per_rank > 1
        if interleaved and self.microbatches % stages:
            raise ValueError(
                f"the microbatches of a rank ({self.microbatches}) must be divisible by "
                f"sharding.pipeline ({stages}) when each rank has several stages"
            )
        return self

    @model_validator(mode="after")
    def _sharding_fits(self) -> "Run":
        sharding, axes = self.sharding, self.axes
        narrow = sharding.reshard_after_forward
        if not isinstance(narrow, bool) and (axes.shard * axes.context) % narrow:
            raise ValueError(
                f"the shard group ({axes.shard * axes.context} ranks) must be divisible by "
                f"sharding.reshard_after_forward ({narrow})"
            )
        if not sharding.spreads and self.world_size > 1:
            raise ValueError(
                f"sharding={sharding.name} is one process, but this run has "
                f"{self.world_size} ranks: set ranks_per_node=1, or choose ddp or full_shard"
            )
        return self
