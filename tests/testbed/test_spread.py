"""Each strategy through the batch file, in the container, on two nodes of a real Slurm."""

import json

import pytest

UNTIED = "model.config.tie_word_embeddings=false"
TWO_NODES = ("nodes=2", "launcher=static_node", "training.steps=3", "precision=fp32", UNTIED)
STRATEGIES = {
    "full_shard": [],
    "shard_grad_op": [],
    "hybrid_shard_zero2": [],
    "gather_scatter": [],
    "all_reduce": [],
    "full_shard_offload": [],
    "context": [],
    "tensor": [],
    "pipeline": [],
    "pipeline_interleaved": [],
    "deepspeed_zero1": [],
    "deepspeed_zero2": [],
    "deepspeed_zero3": [],
    "deepspeed_zero3_offload": [],
    "hybrid_shard": ["sharding.tensor=2"],
}


@pytest.fixture(scope="module")
def losses(site, request):
    """Strategy -> its losses; all are queued at once, and the cluster takes them in turn."""
    mine = [item for item in request.session.items if item.path == request.path]
    selected = {item.callspec.params["name"] for item in mine}
    lines = {"ddp": []} | {name: STRATEGIES[name] for name in STRATEGIES if name in selected}
    for name, more in lines.items():
        site.submit(f"spread-{name}", *TWO_NODES, f"sharding={name}", *more)

    def of(name: str) -> list[float]:
        folder = site.finished(f"spread-{name}", 900)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return [r["loss"] for r in records if r["event"] == "train"]

    return of


@pytest.mark.matrix(always=lambda name: name == "full_shard")
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_same_losses(name, losses):
    assert len(losses("ddp")) == 3
    assert losses(name) == pytest.approx(losses("ddp"), abs=1e-4)
