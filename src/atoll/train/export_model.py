"""The trained model as a Hugging Face folder, written by all ranks."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from atoll import run_dir
from atoll.data.shards import made_again
from atoll.models import export
from atoll.models.adapter import gathered_adapter, merged, write_adapter
from atoll.models.classifier import new_head
from atoll.models.source import source_folder
from atoll.models.stored_names import as_stored, names_as_stored, stored_dtype
from atoll.models.weights import stored_buffers
from atoll.monitor.provenance import made_of
from atoll.proof.of_run import prove_run
from atoll.run_dir import sha256_of
from atoll.sharding.process_group import gathered, gathered_by_first, run_on_all_ranks, say
from atoll.train.assemble import TrainState
from atoll.train.optimizer import averaged
from atoll.train.state_dict import parameters_of
from atoll.train.write_gguf import write_gguf


def export_model(train_state: TrainState) -> None:
    """Write the Hugging Face folder: weights by all ranks, the rest by one, then one rename.

    And before it that of the weights' average, where there is one.
    """
    with train_state.heartbeat.at("export"):
        if train_state.optimizer.averages:
            with averaged(train_state.optimizer):
                _export(train_state, run_dir.averaged_export(train_state.run_folder))
        _export(train_state, run_dir.export(train_state.run_folder))


def _export(train_state: TrainState, final: Path) -> None:
    write_export(train_state, final, train_state.run.export.gguf_format, proven=True)
    say(train_state.world, f"exported to {final}")


def write_export(
    train_state: TrainState, final: Path, gguf: str | None = None, proven: bool = False
) -> None:
    """The model as it is now, with a proof of what made it, where it is to stay.

    gguf: the format of a file for llama.cpp beside it.
    """
    world, run = train_state.world, train_state.run
    if run.model.lora is not None and not run.export.merged:
        _write_adapter_alone(train_state, final, proven)
        return
    dtype = getattr(torch, run.export.dtype)
    hf, head = train_state.model.hf, new_head(train_state.config)
    parameters, adapter = _weights(train_state, head)
    limit, axes = int(run.export.max_file_gib * 2**30), run.axes
    # the ranks of a pipeline's stage write the files of its layers
    ranks, stage = axes.world // axes.pipeline, axes.stage(world.rank)
    dtype_of = functools.partial(stored_dtype, hf, dtype=dtype)
    sizes_of_stages = _sizes(train_state, parameters, dtype_of)
    plans = [export.plan_files(of_stage, limit, ranks) for of_stage in sizes_of_stages]
    numbered = export.Numbered(sum(map(len, plans[:stage])), sum(map(len, plans)))
    own = [names_as_stored(hf, {n: parameters[n].shape for n in names}) for names in plans[stage]]
    every = gathered(world, own if world.rank % ranks == 0 else None)[::ranks]
    files = [names for of_stage in every for names in of_stage]
    first = world.rank == 0
    partial = export.partial_folder(final)
    run_on_all_ranks(world, lambda: export.start(final) if first else None)
    place, stored = (world.rank % ranks, ranks), functools.partial(as_stored, hf)
    written = run_on_all_ranks(
        world,
        lambda: export.write_weights(
            partial, parameters, dtype_of, plans[stage], numbered, *place, stored
        ),
    )

    digests = gathered_by_first(world, written)

    def rest() -> None:
        _refuse_other_tokenizer(train_state)
        if adapter:
            write_adapter(partial / "adapter", train_state.run.model, adapter, head)
        total = sum(sum(of_stage.values()) for of_stage in sizes_of_stages)
        export.write_rest(
            partial,
            train_state.config,
            type(hf).__name__,
            dtype,
            files,
            total,
            train_state.tokenizer,
            source_folder(train_state.run.model),
            export.end_ids(train_state.run, train_state.tokenizer),
        )
        if gguf is not None:
            write_gguf(partial, gguf, train_state.run.name)
        if proven:
            _prove(train_state, final, partial, digests)
        export.publish(partial, final)

    run_on_all_ranks(world, lambda: rest() if first else None)


def _refuse_other_tokenizer(train_state: TrainState) -> None:
    """Raise `UserError` where another run has made the text's tokenizer anew meanwhile."""
    made_with = train_state.validation.sources[0].manifest.tokenizer_sha256
    if sha256_of(train_state.tokenizer / "tokenizer.json") != made_with:
        raise made_again(run_dir.prepared(train_state.run))


def _write_adapter_alone(train_state: TrainState, final: Path, proven: bool) -> None:
    """The adapter's folder below the export's, with its tokenizer: nothing of what stays."""
    world, head = train_state.world, new_head(train_state.config)
    adapter = gathered_adapter(parameters_of(train_state), head)  # by all ranks

    def write() -> None:
        _refuse_other_tokenizer(train_state)
        partial = export.start(final)
        write_adapter(partial / "adapter", train_state.run.model, adapter, head)
        export.write_tokenizer(partial / "adapter", train_state.tokenizer)
        if proven:
            _prove(train_state, final, partial, [])
        export.publish(partial, final)

    run_on_all_ranks(world, lambda: write() if world.rank == 0 else None)


def _prove(
    train_state: TrainState, final: Path, partial: Path, digests: list[dict[str, dict[str, Any]]]
) -> None:
    """digests: of each rank's files of weights."""
    run = train_state.run
    known = {name: facts for of_rank in digests for name, facts in of_rank.items()}
    is_average = final == run_dir.averaged_export(train_state.run_folder)
    prove_run(partial, run, train_state.run_folder, made_of(run), known, is_average)


def _sizes(
    train_state: TrainState,
    parameters: dict[str, Any],
    dtype_of: Callable[[str], torch.dtype],
) -> list[dict[str, int]]:
    """The bytes of each parameter's file, by pipeline stage."""
    world, axes = train_state.world, train_state.run.axes
    sizes = {name: p.numel() * dtype_of(name).itemsize for name, p in parameters.items()}
    ranks = axes.world // axes.pipeline
    return gathered(world, sizes if world.rank % ranks == 0 else None)[::ranks]


def _weights(
    train_state: TrainState, head: str | None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What the whole model's files hold, and those of its adapter, if it has one."""
    plain, lora = parameters_of(train_state), train_state.run.model.lora
    hf = train_state.model.hf
    buffers = stored_buffers(hf)
    if lora is None:
        return {**plain, **buffers}, {}
    adapter = gathered_adapter(plain, head)
    return {**merged(hf, lora, plain), **buffers}, adapter
