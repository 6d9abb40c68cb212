"""litgpt as a peer: its model and its loss, in the loop of its own pretraining.

`.build/peers` (`make bench-trainer_against_hf` fills it) has litgpt and lightning, which would ask
for other versions of what is installed here; it is looked into last.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

PEERS = Path(__file__).resolve().parents[1] / ".build" / "peers"


def litgpt(run_folder: Path, placement: Any) -> int:
    """A command: litgpt's `fit` without its logs, validation and checkpoints, with Fabric's DDP."""
    sys.path.append(str(PEERS))
    import torch
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy
    from litgpt.utils import chunked_cross_entropy

    from atoll.settings import load_run
    from atoll.train.precision import compute_dtype

    run = load_run(run_folder / "run.yaml")
    dtype, _ = compute_dtype(run.precision, torch.device("cpu"))
    environment = TorchElasticEnvironment()
    fabric = Fabric(
        accelerator="cpu",
        devices=placement.world_size,
        strategy=DDPStrategy(cluster_environment=environment, process_group_backend="gloo"),
        precision="bf16-mixed" if dtype == torch.bfloat16 else "32-true",
    )
    fabric.launch()
    model = fabric.setup(litgpt_model(run.model.config, run.data.sequence_tokens))
    adamw = torch.optim.AdamW(model.parameters(), run.optimizer.learning_rate, fused=True)
    optimizer = fabric.setup_optimizers(adamw)
    ends = []
    for tokens_BT, labels_BT in batches(run, placement):
        loss = chunked_cross_entropy(model(tokens_BT), labels_BT)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    if placement.rank == 0:
        write_measured(run, run_folder, ends)
    return 0


def litgpt_model(config: dict[str, Any], sequence_tokens: int) -> Any:
    """The Llama of these sizes as litgpt writes it, with weights as it draws them."""
    from litgpt.config import Config
    from litgpt.model import GPT

    model = GPT(
        Config(
            name="llama",
            block_size=sequence_tokens,
            n_layer=config["num_hidden_layers"],
            n_embd=config["hidden_size"],
            n_head=config["num_attention_heads"],
            n_query_groups=config["num_key_value_heads"],
            intermediate_size=config["intermediate_size"],
            padded_vocab_size=config["vocab_size"],
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
        )
    )
    model.apply(model._init_weights)
    if config.get("tie_word_embeddings"):
        model.lm_head.weight = model.transformer.wte.weight
    return model


def batches(run: Any, placement: Any) -> Any:
    """A rank's microbatches of full samples, with the labels one token ahead."""
    import numpy as np
    import torch

    from atoll.data.order import sample_ids
    from atoll.data.samples import open_samples
    from atoll.run_dir import prepared

    samples = open_samples(run.data, prepared(run), "train")
    training = run.training
    wanted = training.steps * training.global_batch_samples
    ids = sample_ids(run.seed, len(samples), 0, wanted)
    rows = torch.stack([samples.batch(np.array([number])).tokens_BT[0] for number in ids])
    for tokens_BT in rows[placement.rank :: placement.world_size].split(
        training.microbatch_samples
    ):
        yield tokens_BT, torch.nn.functional.pad(tokens_BT[:, 1:], (0, 1), value=-100)


def write_measured(run: Any, run_folder: Path, ends: list[float]) -> None:
    from trainer_against_hf import SKIPPED_STEPS

    tokens = run.training.global_batch_samples * run.data.sequence_tokens
    seconds = ends[-1] - ends[SKIPPED_STEPS - 1]
    rate = tokens * (len(ends) - SKIPPED_STEPS) / seconds
    memory_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    measured = {"rate": rate, "memory_gib": memory_gib}
    (run_folder / "measured.json").write_text(json.dumps(measured))
