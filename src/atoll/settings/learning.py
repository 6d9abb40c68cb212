"""What is learned, and how: the settings that no machine has a say in."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from atoll.errors import UserError
from atoll.settings.fields import (
    Count,
    CountOrZero,
    Fraction,
    Positive,
    Settings,
    Word,
    none_is_zero,
)


class Lora(Settings):
    """Low-rank adapters that learn while the model's own weights stay (Hu et al. 2021)."""

    rank: Count = 16  # columns of the two matrices beside each layer
    alpha: Positive = 32.0  # what they add is scaled by alpha / rank
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0  # of what goes into an adapter
    # ends of the names of linear layers; all-linear: all but the head, experts and routers
    targets: list[str] | Literal["all-linear"] = "all-linear"
    # A stays as it was drawn and B learns alone (FFA-LoRA, Sun et al. 2024): the mean of several
    # adapters is then the mean of what they make of the model
    freeze_a: bool = False
    start: Path | None = None  # a folder with adapter_model.safetensors that training begins with


# families that have a matrix for the queries alone, and no norm behind it
QUERY_FAMILIES = ("llama", "mistral", "mixtral", "opt", "qwen2", "smollm3")
# and others in which no number but the weights depends on the width
OTHER_FAMILIES = ("gpt2", "gpt_neox", "granite", "olmo2", "olmoe", "phi3", "qwen3", "qwen3_moe")
MUP_FAMILIES = (*QUERY_FAMILIES, *OTHER_FAMILIES)


class RopeScaling(Settings):
    """Rotary positions stretched, so that a model takes longer samples than it was made for."""

    # linear: all positions alike; yarn: low frequencies alone (Peng et al. 2023)
    kind: Literal["linear", "yarn"]
    factor: Annotated[float, Field(gt=1.0)]  # how many times longer samples may be


class Mup(Settings):
    """Maximal update parametrization: the learning rate of a narrow model holds on a wide one.

    Yang et al. 2022, Tensor Programs V. All widths of the blocks are to grow with the hidden size.
    """

    base_width: Count | None = None  # hidden size where the rate was found; null: as transformers
    base_head_width: Count | None = None  # of that model's heads; null: the same, in smaller number


class Model(Settings):
    """A Hugging Face model: a folder, a hub name, or a configuration to initialise at random."""

    name: Word  # its own, and that of its YAML
    source: str | None = None  # a folder or hub name; null: random weights
    revision: str | None = None  # a branch, tag or commit of the hub name
    # of transformers: overrides those of the source, or says it all with model_type
    config: dict[str, Any] = {}
    rope_scaling: RopeScaling | None = None
    mup: Mup = Mup()
    lora: Lora | None = None
    quantisation: Literal["none", "int8", "nf4"] = "none"  # of weights that stay

    @model_validator(mode="after")
    def _quantised_weights_stay(self) -> "Model":
        if self.quantisation != "none" and self.lora is None:
            raise ValueError(
                f"model.quantisation={self.quantisation}: quantised weights cannot learn",
                "set model.lora.rank=16, or model.quantisation=none",
            )
        return self

    @model_validator(mode="after")
    def _mup_has_its_family(self) -> "Model":
        mup, family = self.mup, self.config.get("model_type")
        if mup.base_width is None:
            if mup.base_head_width is not None:
                raise ValueError(
                    f"model.mup.base_head_width={mup.base_head_width} without a base_width",
                    "set model.mup.base_width too",
                )
            return self
        if self.source is not None or self.lora is not None:
            what = "model.lora" if self.source is None else f"model.source={self.source}"
            raise ValueError(
                f"model.mup.base_width={mup.base_width} with {what}: muP is for weights that begin "
                "at random",
                "model.mup.base_width=null",
            )
        known = MUP_FAMILIES if mup.base_head_width is None else QUERY_FAMILIES
        if family not in known:
            name = "base_width" if family not in MUP_FAMILIES else "base_head_width"
            raise ValueError(
                f"model.mup.{name} with a model of type {family}: its width would have to be "
                "scaled in other ways as well",
                f"one of {', '.join(sorted(known))}, or model.mup.{name}=null",
            )
        return self

    @model_validator(mode="after")
    def _has_an_origin(self) -> "Model":
        if self.source is None and "model_type" not in self.config:
            raise ValueError("give model.source (folder or hub name) or model.config.model_type")
        return self


class Tokenizer(Settings):
    """A tokenizer by path or hub name; unset: the model's own, else one made from the data."""

    path: str | None
    kind: Literal["bpe", "wordpiece", "characters"] = "bpe"  # of one that is made
    vocabulary_tokens: Annotated[int, Field(ge=258)]  # of one that is made
    training_documents: Count  # at most, that one is made from
    add_tokens: list[str] = []  # beside those it has; the model's embeddings grow with them
    # a jinja template's text (compose reads a file's, or knows chatml); unset: the tokenizer's own
    chat_template: str | None = None


def check_positions(positions: int, sequence_tokens: int) -> None:
    """Refuse samples that are longer than what the model was made for.

    Raises `UserError`.
    """
    if sequence_tokens > positions:
        raise UserError(
            f"data.sequence_tokens ({sequence_tokens}) is more than the model's "
            f"max_position_embeddings ({positions})",
            f"set data.sequence_tokens={positions} or less, or scale rotary positions: "
            "model.rope_scaling.kind=yarn model.rope_scaling.factor=NUMBER",
        )


def check_stored_weights(source: str, quantised: Any) -> None:
    """Refuse weights that are codes of few bits: read as numbers, without scales, they are noise.

    quantised: the `quantization_config` of the source's config.json. Raises `UserError`.
    """
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise UserError(
            f"the weights of {source} are quantised ({method or 'it does not say how'}), and only "
            "whole ones are read",
            "begin from the same model in bf16; model.quantisation quantises it for adapters",
        )


class Task(Settings):
    """What is learned."""

    # the next token, a label, or which of two answers is better
    name: Literal["causal_lm", "classification", "preference"]
    # of preference: DPO (Rafailov et al. 2023), or SimPO without a reference (Meng et al. 2024)
    loss: Literal["dpo", "simpo"] = "dpo"
    beta: Positive = 0.1  # how much a difference of log-probabilities counts
    margin: Annotated[float, Field(ge=0.0)] = 0.0  # of simpo: by how much the better is to lead


class ParameterGroup(Settings):
    """Parameters that learn otherwise than the rest; the first group that names one has it."""

    names: str  # as in the Hugging Face model; * stands for any part
    learning_rate_factor: Positive = 1.0  # times the learning rate of the rest
    weight_decay: Annotated[float, Field(ge=0.0)] | None = None  # null: as the rest
    frozen: bool = False  # it stays as it was


class Optimizer(Settings):
    """The optimizer, its schedule and its clipping."""

    # AdamW, with moments of 8 bits (bitsandbytes), or Muon for the blocks' matrices (Jordan 2024)
    name: Literal["adamw", "adamw_8bit", "muon"]
    learning_rate: Positive  # the peak of the schedule
    betas: tuple[Fraction, Fraction]  # decay of the mean gradient and of its square
    epsilon: Positive  # added to the root in the denominator
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95  # of muon
    weight_decay: Annotated[float, Field(ge=0.0)]  # of matrices; norms and biases have none
    clip_norm: Positive | None  # largest norm of all gradients together; null: they are not clipped
    warmup_steps: CountOrZero  # in which the rate rises from 0 to the peak
    # how the rate falls from the peak
    decay: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
    cooldown_steps: Count | None = None  # of wsd, at the end; null: a fifth of all steps
    final_fraction: Fraction  # of the peak, at the end of the decay
    # the rate grows with the number of data-parallel ranks, or with its root
    scale_with_ranks: Literal["none", "sqrt", "linear"]
    groups: list[ParameterGroup] = []  # parameters that learn otherwise, by name
    # of an average of the weights over the steps, exported beside them; null: none
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    # of a term that pulls towards the weights the run began with (FedProx, Li et al. 2020)
    proximal: Annotated[float, Field(ge=0.0)] = 0.0

    @model_validator(mode="after")
    def _cooldown_has_a_decay(self) -> "Optimizer":
        if self.cooldown_steps is not None and self.decay != "wsd":
            raise ValueError(
                f"optimizer.cooldown_steps={self.cooldown_steps} with decay={self.decay}",
                "optimizer.decay=wsd holds the peak, then cools down",
            )
        return self

    def cooldown(self, total_steps: int) -> int:
        """The steps at the end in which wsd comes down from the peak."""
        return self.cooldown_steps or max(1, total_steps // 5)


class Precision(Settings):
    """The number format of the arithmetic; weights and optimizer stay fp32."""

    compute: Literal["auto", "bf16", "fp32"]  # auto: bf16 where the device has it


class Training(Settings):
    """The length of the run and the shape of a step."""

    steps: CountOrZero | None  # 0: evaluate only
    epochs: Positive | None  # passes over the training text; instead of steps
    # of a step; 0 or null: as many as device_batch_samples gives
    global_batch_samples: Annotated[CountOrZero, none_is_zero]
    device_batch_samples: Count | None = None  # of a step, for each rank with samples of its own
    microbatch_samples: Count  # of one forward and backward pass of a rank
    log_every_steps: Count  # between two lines of metrics
    compile: bool  # torch.compile of each block; on a GPU of the loss too
    # what the backward pass computes again: nothing, all but attention's results, or whole blocks
    activation_checkpointing: Literal["none", "selective", "full"]
    loss_chunk_tokens: Count = 512  # whose logits are there at once
    # of causal_lm: times the squared log of the normaliser, in the gradients (PaLM takes 1e-4)
    z_loss: Annotated[float, Field(ge=0.0)] = 0.0
    data_seed: CountOrZero | None = None  # of the order of samples; null: the run's seed
    consumed_samples: CountOrZero = 0  # of the endless order: taken by earlier rounds
    consumed_steps: CountOrZero = 0  # of the schedule: taken by earlier rounds
    schedule_steps: Count | None = None  # that the schedule spans; null: those and this run's
    schedule_stride: Positive = 1.0  # steps of the schedule that one step of this run takes
    timeout_minutes: Positive  # that a collective may take

    def place_in_schedule(self, step: int, total_steps: int) -> tuple[int, int]:
        """Where a step of a run of so many stands in the schedule, and how long that is."""
        span = self.schedule_steps or self.consumed_steps + total_steps
        return self.consumed_steps + max(1, round(step * self.schedule_stride)), span

    @model_validator(mode="after")
    def _one_length(self) -> "Training":
        if (self.steps is None) == (self.epochs is None):
            steps, epochs = self.steps or 1000, self.epochs or 1
            given = "both are" if self.steps is not None else "neither is"
            raise ValueError(
                f"one of training.steps and training.epochs says when training ends, and {given} "
                "set",
                f"training.steps={steps} training.epochs=null, or training.steps=null "
                f"training.epochs={epochs:g}",
            )
        return self


class Checkpoint(Settings):
    """When the state is saved, and how many states are kept."""

    # 0: only at the end; auto: by Young and Daly, from what a save and a step turn out to take
    every_steps: CountOrZero | Literal["auto"]
    keep: Count  # the newest so many
    asynchronous: bool  # written beside the next steps
    # a checkpoint of another run, which this one goes on from as if it were its own: with another
    # schedule or length, as the cooldown of a run that holds its peak
    initial_load_path: Path | None = None
    # a checkpoint of another run, whose moments this one begins with: its weights are its own
    optimizer_load_path: Path | None = None

    @model_validator(mode="after")
    def _are_checkpoints(self) -> "Checkpoint":
        for name in ("initial_load_path", "optimizer_load_path"):
            path = getattr(self, name)
            if path is not None and not re.fullmatch(r"step-\d{8}", path.name):
                raise ValueError(
                    f"checkpoint.{name}={path} is no checkpoint",
                    "give the folder of one: runs/NAME/checkpoints/step-00000500",
                )
        return self

    @model_validator(mode="after")
    def _has_one_origin(self) -> "Checkpoint":
        if self.initial_load_path is not None and self.optimizer_load_path is not None:
            raise ValueError(
                f"checkpoint.optimizer_load_path={self.optimizer_load_path}, and "
                f"initial_load_path={self.initial_load_path}, which has moments too",
                "set one of them to null",
            )
        return self

    @property
    def initial_step(self) -> int:
        """The step that the run goes on from; 0: it begins by itself."""
        return 0 if self.initial_load_path is None else int(self.initial_load_path.name[5:])


class Guard(Settings):
    """What is done about a loss that is no number, a spike, and a device that computes wrongly."""

    skip_batches: CountOrZero = 3  # of the last window_steps, before the state is rolled back
    roll_backs: CountOrZero = 2  # to one checkpoint, before the run is stopped
    # of the loss or the gradient's norm over the median of the last steps; null: no spike is seen
    spike_sigma: Positive | None = None
    window_steps: Annotated[int, Field(ge=8)] = 128  # that the median and its spread are taken of
    # one microbatch is computed twice, and what must agree is compared; 0: never
    replay_every_steps: CountOrZero = 500


class Evaluation(Settings):
    """On the held-out text: before, after, and every so many steps or epochs (0: not between)."""

    every_steps: CountOrZero
    every_epochs: CountOrZero = 0  # 0: not by epochs
    max_samples: Count | None  # drawn from the held-out ones by the seed; null: all
    tasks: list[str] = []  # of EleutherAI's lm-evaluation-harness
    tasks_folder: str | None = None  # with task YAMLs of one's own, in the harness's format
    fewshot: CountOrZero | None = None  # examples before each question; null: as the task says
    task_samples: Count | None = None  # of each task; null: all


class Export(Settings):
    """The Hugging Face model written at the end."""

    dtype: Literal["bfloat16", "float16", "float32"]  # of the weights in the files
    max_file_gib: Positive  # of one file
    untrained: bool = False  # also of a run of no steps: a model to begin a campaign with
    # a file for llama.cpp beside it; true: in the format of `dtype`
    gguf: Literal[True, False, "f32", "f16", "bf16", "q8_0"] = False
    merged: bool = True  # of adapters: also the whole model, with them added to its weights

    @property
    def gguf_format(self) -> str | None:
        of_dtype = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[self.dtype]
        if isinstance(self.gguf, str):
            return self.gguf
        return of_dtype if self.gguf else None


class Generation(Settings):
    """The sentence sampled from the export."""

    prompt: str | None  # null: the run ends without a sample
    before: bool = False  # also of the model as it was before the training, to see the difference
    max_new_tokens: Count = 48  # at most
    temperature: Positive = 0.8  # lower: nearer to the likeliest token
    # of the probability, from which tokens are drawn (Holtzman et al. 2019)
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.95
