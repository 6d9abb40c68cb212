"""The models, settings and tokens that gpu_training.py gives to every side alike."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TOKENIZER = b"{}"  # never read: the tokens are random


@dataclass(frozen=True)
class Case:
    """One model and one batch: a step is one microbatch of so many whole samples."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tokens: int
    microbatch: int
    warmup_steps: int
    timed_steps: int
    loss_chunk_tokens: int  # of our chunked loss

    @property
    def steps(self) -> int:
        return self.warmup_steps + self.timed_steps

    @property
    def config(self) -> dict[str, Any]:
        """As Hugging Face writes it. Head and embedding are two: torchtitan ties neither."""
        return {
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.tokens,
            "tie_word_embeddings": False,
            "use_cache": False,
        }

    def with_microbatch(self, samples: int) -> "Case":
        """The same model and as few steps as show whether so many samples fit."""
        return replace(self, microbatch=samples, warmup_steps=1, timed_steps=2)


# The vocabulary of 8b8 is not Llama 3.1's 128,256: over 8 layers its head would be a quarter of
# the arithmetic; with 32,000 it is 7 %, as over the 32 layers of the whole model.
CASES = {
    "1b": Case("1b", 16, 2048, 8192, 32, 8, 128256, 4096, 2, 10, 25, 2048),
    "124m": Case("124m", 12, 768, 2048, 12, 12, 50304, 1024, 32, 10, 25, 4096),
    "8b8": Case("8b8", 8, 4096, 14336, 32, 8, 32000, 4096, 2, 5, 15, 4096),
}
DRY_CASES = {"tiny": Case("tiny", 2, 64, 128, 4, 2, 256, 64, 2, 1, 2, 64)}


def written(case: Case, folder: Path, on_gpu: bool, compiled: bool) -> None:
    """A run folder as `atoll submit` writes it, and its tokens in our prepared format."""
    import yaml
    from one_run import with_defaults

    from atoll import run_dir
    from atoll.settings import checked, dumped

    run = checked(with_defaults(settings(case, folder, on_gpu, compiled)))
    write_tokens(run, case)
    run_dir.write_whole(run_dir.settings_file(folder), yaml.safe_dump(dumped(run)))


def settings(case: Case, folder: Path, on_gpu: bool, compiled: bool) -> dict[str, Any]:
    device = "cuda" if on_gpu else "cpu"
    return {
        "name": folder.name,
        "ranks_per_node": 1,
        "folders": {"runs": folder.parent, "prepared": folder / "prepared"},
        "facility": {"name": "x", "scheduler": "none", "node": {"devices": 1, "device": device}},
        "image": {"name": "none"},
        "launcher": {"name": "static"},
        "sharding": {"name": "single", "layouts": []},
        "model": {"name": case.name, "config": case.config},
        "tokenizer": {},
        "data": {
            "name": "random",
            "source": "files",
            "validation": {"fraction": 0.5},
            "packing": "concat",
            "sequence_tokens": case.tokens,
        },
        "task": {"name": "causal_lm"},
        "optimizer": {"name": "adamw", "learning_rate": 3e-4, "decay": "constant"},
        "precision": {"compute": "bf16" if on_gpu else "auto"},
        "training": {
            # more than are timed, so that the checkpoint and the export of the last are not made
            "steps": 100 * case.steps,
            "global_batch_samples": case.microbatch,
            "microbatch_samples": case.microbatch,
            "log_every_steps": 5 if case.warmup_steps % 5 == 0 else 1,
            "compile": compiled,
            "loss_chunk_tokens": case.loss_chunk_tokens,
        },
        "checkpoint": {"every_steps": 0},
        # a whole microbatch: after a smaller one compiled blocks would take their size as variable
        "evaluation": {"max_samples": case.microbatch},
        "export": {},
        "monitor": {"communication": True, "energy": True, "progress": True},
        "generation": {},
    }


def write_tokens(run: Any, case: Case) -> None:
    """Random documents of exactly one sample each, so that no side has anything to mask."""
    from atoll import run_dir
    from atoll.data import shards

    folder = run_dir.prepared(run)
    run_dir.write_whole(shards.tokenizer_folder(folder) / "tokenizer.json", TOKENIZER)
    plan = shards.TokenPlan(
        format_version=shards.FORMAT_VERSION,
        settings_digest=run_dir.prepared_digest(run),
        input_fingerprints={},
        tokenizer_fingerprint="random",
        tokenizer_sha256=hashlib.sha256(TOKENIZER).hexdigest(),
        vocabulary_tokens=case.vocabulary,
        begin_id=None,
        end_id=None,
        pad_id=0,
        dtype="uint32",
    )
    train = write_shard(folder, "train", case, case.microbatch * case.steps)
    validation = write_shard(folder, "validation", case, case.microbatch)
    manifest = shards.TokenManifest(**plan.model_dump(), train=[train], validation=[validation])
    manifest.write(shards.manifest_file(folder))


def write_shard(folder: Path, split: Any, case: Case, samples: int) -> Any:
    import numpy as np

    from atoll.data.shard_writer import ShardWriter, TokenBlock

    random = np.random.default_rng(len(split))
    tokens = random.integers(0, case.vocabulary, samples * case.tokens, dtype=np.uint32)
    with ShardWriter(folder, split, 0, "uint32") as writer:
        writer.add(TokenBlock(tokens.tobytes(), np.full(samples, case.tokens, np.int64), 0))
        return writer.finish()
