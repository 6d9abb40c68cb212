"""One turn of one peer of gpu_training.py, in a process of its own.

    python benchmarks/gpu_sides.py SIDE RUN_FOLDER

It trains the model of the run folder on the run's own samples and leaves outcome.json there. What
a peer's own code says of training on one device is followed; where it leaves a choice, the faster
one is taken.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from gpu_turn import Clock, Turn, looped, moved, samples_of
from litgpt_side import litgpt_model
from torch import Tensor, nn

GEMM_SIZE = 8192
# appended, so that nothing of the machine's own is hidden from the other sides
PEERS = Path(__file__).resolve().parents[1] / ".build" / "gpu" / "peers"


def main() -> int:
    side, folder = sys.argv[1], Path(sys.argv[2])
    if side in ("torchtitan", "litgpt"):
        sys.path.append(str(PEERS))
    try:
        outcome = card() if side == "card" else trained(side, folder)
    except ImportError as error:
        outcome = {"failed": f"does not import: {str(error).splitlines()[0]}"}
    except torch.OutOfMemoryError:
        outcome = {"failed": "out of memory"}
    (folder / "outcome.json").write_text(json.dumps(outcome))
    return 0


def card() -> dict[str, Any]:
    """What multiplies here: its data sheet's peak, and what a large matrix product reaches."""
    from atoll.monitor.mfu import peak_tflops
    from atoll.settings import Node

    on_gpu = torch.cuda.is_available()
    device, dtype = (("cuda", torch.bfloat16), ("cpu", torch.float32))[not on_gpu]
    node = Node(devices=1, device=device)  # type: ignore[arg-type]
    peak, source = peak_tflops(node, torch.device(device), dtype)
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    size = GEMM_SIZE if on_gpu else 512
    gemm = product_tflops(size, torch.device(device), dtype)
    return {"name": name, "peak_tflops": peak, "peak_source": source, "gemm_tflops": gemm}


def product_tflops(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for number in range(30):
        started = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 10:
            seconds.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(seconds) / 1e12


def trained(side: str, folder: Path) -> dict[str, Any]:
    from atoll.monitor.metrics import memory_gib
    from atoll.settings import load_run
    from atoll.train.precision import compute_dtype

    run = load_run(folder / "run.yaml")
    counted = json.loads((folder / "steps.json").read_text())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, _ = compute_dtype(run.precision, device)
    turn = Turn(run, folder, *counted, device, dtype)
    rate = SIDES[side](turn)
    return {"tokens_per_second": rate, "memory_gib": memory_gib(device)}


def hf_plain(turn: Turn) -> float:
    """The Hugging Face Trainer as it comes, told to use bf16."""
    return hf_trained(turn, "sdpa", {})


def hf_best(turn: Turn) -> float:
    """Its fast settings. Blocks are compiled each for itself, which accelerate calls regional:
    whole, the model builds a mask and flash attention is out of reach (hf_whole shows it)."""
    os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    return hf_whole(turn)


def hf_whole(turn: Turn) -> float:
    # what tf32=True stands for, in the one way that torch's compiler and transformers agree on
    torch.set_float32_matmul_precision("high")
    settings: dict[str, Any] = {
        "optim": "adamw_torch_fused",
        "torch_compile": turn.compiled,
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,  # else every step waits for its loss
        "dataloader_num_workers": 2 if turn.device.type == "cuda" else 0,
    }
    flash = turn.device.type == "cuda" and find_spec("flash_attn") is not None
    return hf_trained(turn, "flash_attention_2" if flash else "sdpa", settings)


def hf_trained(turn: Turn, attention: str, settings: dict[str, Any]) -> float:
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    with turn.device:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**turn.config), attn_implementation=attention, dtype=torch.float32
        )
    arguments = TrainingArguments(
        output_dir=str(turn.folder / "peer"),
        max_steps=turn.warmup_steps + turn.timed_steps,
        per_device_train_batch_size=turn.run.training.microbatch_samples,
        learning_rate=turn.run.optimizer.learning_rate,
        bf16=turn.dtype == torch.bfloat16,
        use_cpu=turn.device.type == "cpu",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    clock = Clock(turn)
    rows: Any = [{"input_ids": tokens, "labels": tokens} for tokens in samples_of(turn)]
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback_of(clock)]).train()
    return clock.rate()


def callback_of(clock: Clock) -> Any:
    from transformers import TrainerCallback

    class Ticks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    return Ticks()


def torchtitan(turn: Turn) -> float:
    """torchtitan 0.2.2's own parts, put together as its Trainer does on one device: autocast,
    since it shards nothing there; each block and the loss compiled; no recomputation."""
    stand_in_for_datasets()
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as titan
    from torchtitan.models.llama3 import get_train_spec

    job, spec = JobConfig(), get_train_spec()
    alone = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    job.training.seq_len = turn.run.data.sequence_tokens
    job.training.mixed_precision_param = str(turn.dtype).removeprefix("torch.")  # type: ignore
    job.compile.enable = turn.compiled
    job.activation_checkpoint.mode = "none"
    job.optimizer.lr = turn.run.optimizer.learning_rate
    with torch.device("meta"):
        model = spec.model_cls(titan_arguments(turn))
    model = spec.parallelize_fn(model, alone, job)
    model.to_empty(device=turn.device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    optimizers = spec.build_optimizers_fn([model.train()], job.optimizer, alone)
    loss_sum = spec.build_loss_fn(job, parallel_dims=alone)
    context = titan.maybe_enable_amp(alone, job.training.mixed_precision_param, turn.device.type)

    def step(tokens_BT: Tensor, labels_BT: Tensor) -> None:
        targets = (labels_BT != -100).sum().to(turn.device, non_blocking=True)
        tokens_BT, labels_BT = moved(turn, tokens_BT, labels_BT)
        with context:
            loss = loss_sum(model(tokens_BT), labels_BT) / targets
        loss.backward()
        titan.clip_grad_norm_(list(model.parameters()), job.training.max_norm, foreach=True)
        optimizers.step()
        optimizers.zero_grad()

    return looped(turn, step)


def stand_in_for_datasets() -> None:
    """torchtitan imports datasets for texts that are not read here; any version or none will do."""
    for name in ("datasets", "datasets.distributed"):
        sys.modules[name] = MagicMock()


def titan_arguments(turn: Turn) -> Any:
    """Its Llama's sizes; the width of the MLP is asked for through its multiplier."""
    from torchtitan.models.llama3 import TransformerModelArgs

    config, tokens = turn.config, turn.run.data.sequence_tokens
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    return TransformerModelArgs(
        dim=hidden,
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        vocab_size=config["vocab_size"],
        multiple_of=64,
        ffn_dim_multiplier=wide / int(8 * hidden / 3),
        max_seq_len=tokens,
    )


def litgpt(turn: Turn) -> float:
    """litgpt's model, compiled whole with its loss, in a plain loop."""
    with turn.device:
        model = litgpt_model(turn.config, turn.run.data.sequence_tokens)
    return looped(turn, plain_step(turn, model))


def plain_step(turn: Turn, model: nn.Module) -> Callable[[Tensor, Tensor], None]:
    def loss_of(tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        logits = model(tokens_BT).flatten(0, 1).float()
        return F.cross_entropy(logits, labels_BT.flatten(), ignore_index=-100)

    called = torch.compile(loss_of) if turn.compiled else loss_of
    rate = turn.run.optimizer.learning_rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, fused=True)

    def step(tokens_BT: Tensor, labels_BT: Tensor) -> None:
        with turn.autocast():
            loss = called(*moved(turn, tokens_BT, labels_BT))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# side -> how it trains; gives tokens per second
SIDES: dict[str, Callable[[Turn], float]] = {
    "hf_plain": hf_plain,
    "hf_best": hf_best,
    "hf_whole": hf_whole,
    "torchtitan": torchtitan,
    "litgpt": litgpt,
}


if __name__ == "__main__":
    sys.exit(main())
