"""Everything that takes part in training, put together once and checked before the first step."""

import dataclasses
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from atoll import run_dir
from atoll.data.harness_tasks import HarnessTasks, tasks_of
from atoll.data.loader import refuse_early_end
from atoll.data.samples import Samples, samples_of
from atoll.data.shards import TokenManifest
from atoll.data.tokenize import open_prepared
from atoll.data.waits import wait_for_plan, waits_for_job
from atoll.data.windows import Windows
from atoll.errors import UserError
from atoll.health.heartbeat import Heartbeat, unwatched
from atoll.models.adapter import adapt, adapted_reader, check_device, fill_int8
from atoll.models.build import replaced_head, weights_for
from atoll.models.causal_lm import in_one_call
from atoll.models.compiled import compile_blocks
from atoll.models.mup import widths_of
from atoll.models.nf4 import fill_packed
from atoll.models.parts import blocks_of
from atoll.models.self_check import self_check
from atoll.models.weights import fill, fill_buffers, materialize
from atoll.plan.growing_positions import check_growing_positions
from atoll.plan.shapes import Shape, check_architecture, shape_of
from atoll.plan.traffic import Sent, bytes_sent
from atoll.settings import Run
from atoll.sharding.context_parallel import split_tokens
from atoll.sharding.deepspeed import initialize
from atoll.sharding.expert import check_experts, split_experts
from atoll.sharding.layouts import AFTER_WEIGHTS, BEFORE_WEIGHTS, ShardingContext, apply_layouts
from atoll.sharding.mesh import Meshes, make_meshes
from atoll.sharding.pipeline import split_layers
from atoll.sharding.process_group import World, run_on_all_ranks, run_on_first_rank, say
from atoll.sharding.step_plan import StepPlan
from atoll.sharding.tensor import split_matrices
from atoll.train.optimizer import NamedOptimizer, make_optimizer
from atoll.train.parameter_groups import freeze
from atoll.train.precision import compute_dtype
from atoll.train.tasks import TASKS
from atoll.train.write_gguf import check_writable


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that takes part in training, put together once."""

    run: Run
    run_folder: Path
    world: World
    config: Any
    model: Any  # the task's, as sharded; its parameters carry the names
    wrapped: nn.Module  # as called; the same, or inside DDP
    plan: StepPlan
    optimizer: NamedOptimizer
    training: Samples | Windows
    validation: Samples
    total_steps: int
    communication_bytes: Sent  # expected, sent by one rank in a step
    shape: Shape
    heartbeat: Heartbeat
    scored_tasks: HarnessTasks | None = None  # of evaluation.tasks

    @property
    def pipeline_group(self) -> Any:
        """The ranks that hold the other layers; None where each has all."""
        return None if self.model.stages is None else self.model.stages.group

    @property
    def tokenizer(self) -> Path:
        return run_dir.prepared(self.run) / "tokenizer"


def assemble(
    run: Run, run_folder: Path, world: World, heartbeat: Heartbeat | None = None
) -> TrainState:
    """Data, model and optimizer; a user's mistake ends here, before the first step."""
    heartbeat = heartbeat or unwatched(world.rank)
    manifest, training, validation = open_text(run, run_folder, world, heartbeat)
    prepared = run_dir.prepared(run)
    steps = total_steps(run, training)
    run_on_all_ranks(world, lambda: refuse_early_end(training, run, steps))
    tasks = run_on_all_ranks(world, lambda: tasks_of(run.evaluation, run_dir.bundled_tasks(run)))
    task = TASKS[run.task.name]
    config = run_on_all_ranks(world, lambda: task.config(run, manifest.vocabulary))
    if run.export.gguf_format is not None:
        run_on_all_ranks(world, lambda: check_writable(config.to_dict(), prepared / "tokenizer"))
    if verdict := run_on_all_ranks(world, lambda: self_check(config)):
        say(world, verdict)
    if replaced := run_on_first_rank(world, lambda: _replaced_head(run, config)):
        say(world, f"{replaced}: its head begins anew")
    dtype, reason = run_on_all_ranks(world, lambda: compute_dtype(run.precision, world.device))
    say(world, f"compute dtype {reason}")
    empty = task.model(config, run, manifest.vocabulary)
    widths = run_on_all_ranks(world, lambda: widths_of(run.model.mup, empty.hf, empty.parts))
    model, wrapped = build_sharded(run, config, empty, world, dtype)
    optimizer = run_on_all_ranks(world, lambda: make_optimizer(run.optimizer, model, widths))
    if run.sharding.step_engine == "deepspeed":
        wrapped = run_on_all_ranks(
            world, lambda: initialize(run, model, optimizer.inner, dtype, world.device)
        )
    plan = StepPlan(
        compute_dtype=dtype,
        autocast=dtype != torch.float32 and not isinstance(model, FSDPModule),
        sync_every_microbatch=run.sharding.sync_every_microbatch,
        keep_gathered=run.sharding.reshard_after_forward is False,
        exchange=run.sharding.exchange,
        ranks=world.size,
    )
    labels = 0 if run.data.classes is None else config.num_labels
    shape = dataclasses.replace(shape_of(config.to_dict()), labels=labels)
    return TrainState(
        run=run,
        run_folder=run_folder,
        world=world,
        config=config,
        model=model,
        wrapped=wrapped,
        plan=plan,
        optimizer=optimizer,
        training=training,
        validation=validation,
        total_steps=steps,
        communication_bytes=bytes_sent(as_computed(run, dtype), shape),
        shape=shape,
        heartbeat=heartbeat,
        scored_tasks=tasks,
    )


def _replaced_head(run: Run, config: Any) -> str | None:
    """Raises `UserError` where nothing would be learned: a head at random tells nothing."""
    replaced = replaced_head(run.model, config)
    if replaced is not None and run.training.steps == 0 and not run.export.untrained:
        raise UserError(
            replaced,
            "name the labels it was trained on, data.classes.labels=[…], or train: "
            "training.steps=NUMBER",
        )
    return replaced


def open_text(
    run: Run, run_folder: Path, world: World, heartbeat: Heartbeat
) -> tuple[TokenManifest, Samples | Windows, Samples]:
    """The tokens of a run, its training samples and those it holds out.

    In windows: as soon as the first is there, while the job prepares the others.
    """
    rank, world_size = world.rank, world.size
    if run.data.window_shards is None:
        manifest = run_on_all_ranks(
            world, lambda: open_prepared(run, verify=True, rank=rank, world_size=world_size)
        )
        training = run_on_all_ranks(world, lambda: samples_of(run, "train"))
        if run.data.batching == "padding" and (cut := training.cut_tokens):
            longest = f"data.sequence_tokens={run.data.sequence_tokens}"
            say(world, f"{cut:,} tokens of documents longer than {longest} are left out (padding)")
        return manifest, training, run_on_all_ranks(world, lambda: samples_of(run, "validation"))
    wait = waits_for_job(run_folder, heartbeat.waits_for_input, lambda line: say(world, line))
    run_on_all_ranks(world, lambda: wait_for_plan(run_folder, wait))
    windows = run_on_all_ranks(world, lambda: Windows(run, wait, rank, world_size))
    return windows.manifest, windows, run_on_all_ranks(world, windows.validation)


def as_computed(run: Run, dtype: torch.dtype) -> Run:
    """The run with the arithmetic that this device turned out to have."""
    compute = "fp32" if dtype == torch.float32 else "bf16"
    precision = run.precision.model_copy(update={"compute": compute})
    return run.model_copy(update={"precision": precision})


def build_sharded(
    run: Run, config: Any, model: Any, world: World, dtype: torch.dtype
) -> tuple[Any, nn.Module]:
    """Meta, sharded, given memory, filled slice by slice, then wrapped."""
    run_on_all_ranks(world, lambda: check_device(run.model.quantisation, world.device))
    run_on_all_ranks(world, lambda: adapt(model.hf, run.model, dtype))
    run_on_all_ranks(world, lambda: freeze(run.optimizer, model))
    if run.training.compile:
        run_on_all_ranks(world, lambda: check_compiler(world))
        one_graph = in_one_call(model.hf.config, world.device, dtype, training=True)
        compile_blocks(blocks_of(model.hf, model.parts), one_graph)
    meshes = run_on_all_ranks(world, lambda: make_meshes(run, world.device, world.rank))
    context = ShardingContext(run.sharding, dtype, world.device)
    run_on_all_ranks(world, lambda: divide(run, model, meshes))
    apply_layouts(BEFORE_WEIGHTS, model, meshes, context)
    shapes = {name: tuple(p.shape) for name, p in model.hf.named_parameters()}

    def fill_all() -> None:
        with weights_for(run.model, config, run.seed) as read:
            read = adapted_reader(read, run.seed, shapes, run.model.lora)
            fill_int8(model.hf, read, world.device)
            waits_at = torch.device("cpu") if run.sharding.offload else world.device
            materialize(model, waits_at, of_buffers=world.device)
            fill(model.hf, read, fill_packed(model.hf, read, world.device))
            fill_buffers(model.hf)

    run_on_all_ranks(world, fill_all)
    return model, apply_layouts(AFTER_WEIGHTS, model, meshes, context)


def divide(run: Run, model: Any, meshes: Meshes | None) -> None:
    """Give this rank its layers, its part of their matrices and its part of the tokens."""
    if meshes is not None:
        config = model.hf.config.to_dict()
        check_architecture(shape_of(config), run.sharding)
        check_growing_positions(config, run)
        if run.sharding.expert > 1:
            check_experts(model.hf, blocks_of(model.hf, model.parts))
        split_layers(model, meshes, run.sharding.stages_per_rank)
        split_matrices(model, meshes)
        split_experts(model, meshes)
        split_tokens(model, meshes)


def check_compiler(world: World) -> None:
    """torch.compile writes C++ for a processor; without a compiler it fails far from here."""
    compiler = os.environ.get("CXX", "g++")
    if world.device.type == "cpu" and shutil.which(compiler) is None:
        raise UserError(
            f"training.compile=true needs a C++ compiler on a CPU, and there is no {compiler}",
            "install one (apt install g++), or set training.compile=false",
        )


def total_steps(run: Run, samples: Samples | Windows) -> int:
    """Optimizer steps of the run, from training.steps or training.epochs."""
    if run.training.steps is not None:
        return run.training.steps
    assert run.training.epochs is not None and isinstance(samples, Samples)
    return max(1, math.ceil(run.training.epochs * len(samples) / run.training.global_batch_samples))
