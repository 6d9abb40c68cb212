"""The jobs that Atoll is known by fit the machines that they are for, at every size."""

import pytest
import yaml
from composing import ROOT

from atoll.cluster.submit_checks import check
from atoll.config.compose import known_shape
from atoll.plan.choose import fits
from atoll.plan.memory import memory_of

FLAGSHIPS = {"llama2_7b_it": "leonardo", "llama2_7b_cs": "karolina"}
DEVICE_BATCH = 4  # samples, in the original's scripts


@pytest.mark.parametrize("nodes", [1, 2, 8, 128])
@pytest.mark.parametrize("name", FLAGSHIPS)
def test_a_tenth_of_the_memory_is_left(name, nodes, composed):
    run = composed(f"experiment={name}", f"facility={FLAGSHIPS[name]}", f"nodes={nodes}").run
    memory = memory_of(run, known_shape(run))
    assert memory.peak_gib < 0.9 * run.facility.node.device_memory_gib
    assert fits(run, memory)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("name", FLAGSHIPS)
def test_the_batch_grows_with_the_nodes(name, nodes, composed):
    run = composed(f"experiment={name}", f"facility={FLAGSHIPS[name]}", f"nodes={nodes}").run
    assert run.training.device_batch_samples == DEVICE_BATCH
    assert run.training.global_batch_samples == DEVICE_BATCH * run.world_size
    assert run.microbatches == 1, "the original adds up no gradients"
    assert run.axes.shard == run.ranks_per_node, "shards stay within a node"


def test_a_campaign_s_batch_fits_too(composed):
    campaign = yaml.safe_load((ROOT / "hydra_conf/federation/leonardo_karolina.yaml").read_text())
    batch = f"training.global_batch_samples={campaign['batch_samples']}"
    for site in campaign["sites"]:
        words = [*campaign["train"], *site["overrides"], batch]
        run = composed(*words, "training.device_batch_samples=null", "folders.bundle=null").run
        memory = memory_of(run, known_shape(run))
        assert run.microbatches > 1
        assert memory.peak_gib < 0.9 * run.facility.node.device_memory_gib


@pytest.mark.parametrize(
    ("name", "queue"),
    [
        ("llama2_7b_it", "facility.submit.qos=boost_qos_bprod"),
        ("llama2_7b_cs", "facility.submit.partition=qgpu_big"),
    ],
)
def test_128_nodes_may_be_submitted(name, queue, composed):
    line = (f"experiment={name}", f"facility={FLAGSHIPS[name]}", "nodes=128", queue)
    run = composed(*line, "facility.account=x").run
    check(run, False, {})
    assert run.training.global_batch_samples == DEVICE_BATCH * 128 * run.ranks_per_node
