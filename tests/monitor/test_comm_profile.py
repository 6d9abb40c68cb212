"""Bytes on the wire against those expected from shapes and mesh."""

from pathlib import Path
from typing import Any

import pytest
import small_run
import torch
import torch.distributed as dist
from rank_pool import RankPool

from atoll.monitor import comm_profile
from atoll.settings import Run, Sharding
from atoll.sharding.exchange import EXCHANGES, all_reduce
from atoll.sharding.process_group import World

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": 2000,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
RANKS = 4
MOST_ATTEMPTS = 5
AXES = ("tensor", "context", "pipeline")


def prepared(folder: Path, strategy: str, **more: Any) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    small_run.write_text(folder)
    run = small_run.settings(
        folder,
        2,
        nodes=2,
        facility__scheduler="slurm",
        **{"sharding": small_run.sharding(strategy)} | more,
        model__config=CONFIG,
        training__steps=3,
        training__microbatch_samples=1,
    )
    small_run.ready(run)
    return run


def communication(ranks: RankPool, run: Run) -> dict[str, Any]:
    ranks.run(small_run.train_here, run)
    [record] = small_run.records(run.folders.runs / run.name, "communication")
    return record


def undisturbed(
    ranks: RankPool, folder: Path, strategy: str, near: float = 0.05, **more: Any
) -> dict[str, Any]:
    """What tests beside this one send only adds to the interfaces: too much is measured again."""
    for attempt in range(MOST_ATTEMPTS):
        record = communication(ranks, prepared(folder / str(attempt), strategy, **more))
        if sent_bytes(record) <= sum(record["expected_bytes"].values()) * (1 + near):
            break
    return record


def sent_bytes(record: dict[str, Any]) -> float:
    """One machine plays both nodes of two ranks, so its interfaces carry what both send."""
    return record["wire_bytes"] * 2 / RANKS


FULL, LORA = small_run.sharding("full_shard"), {"model__lora": {"rank": 32, "alpha": 32}}
SENT: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, {})
        for name in ("ddp", "all_reduce", "gather_scatter", "full_shard", "hybrid_shard")
    },
    **{name: (name, {}) for name in ("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")},
    **{axis: ("full_shard", {"sharding": FULL | {axis: 2}}) for axis in AXES},
    "ddp, adapters": ("ddp", LORA),
    "full_shard, adapters": ("full_shard", LORA),
    "full_shard, muon": ("full_shard", {"optimizer__name": "muon"}),
}
# DeepSpeed's third stage gathers a little more of a model as small as this
NEAR = {"deepspeed_zero3": 0.08}


@pytest.mark.matrix
@pytest.mark.parametrize("case", SENT)
def test_as_many_bytes_as_expected(ranks: RankPool, tmp_path: Path, case: str) -> None:
    strategy, more = SENT[case]
    near = NEAR.get(case, 0.05)
    record = undisturbed(ranks, tmp_path, strategy, near, **more)
    expected = sum(record["expected_bytes"].values())
    assert sent_bytes(record) == pytest.approx(expected, rel=near)
    assert record["seconds"] > 0


def test_calls_are_told_with_shape_and_dtype(ranks: RankPool, tmp_path: Path) -> None:
    record = communication(ranks, prepared(tmp_path, "all_reduce"))
    matrices = [c for c in record["collectives"] if c["shape"] == [2000, 128]]
    [both] = matrices  # the embedding and the head
    assert (both["collective"], both["dtype"], both["calls"]) == ("gloo:all_reduce", "float", 2)
    assert both["bytes"] == 2 * 4 * 2000 * 128


def recorded(world: World) -> list[str]:
    """Of a step with many operations and one collective."""
    comm_profile.start_profiler()
    for _ in range(100):
        torch.ones(2).add_(1)
    dist.all_reduce(torch.ones(2))
    return [event.name() for event in comm_profile.stop_profiler()]


def test_no_operation_but_a_collective_is_recorded(ranks: RankPool) -> None:
    assert ranks.run(recorded) == [["gloo:all_reduce"]] * RANKS


def train_with_own_exchange(world: World, run: Run) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EXCHANGES, "of_my_own", all_reduce)
        small_run.train_here(world, run)


def test_an_exchange_without_a_formula_trains_and_is_watched(
    ranks: RankPool, tmp_path: Path
) -> None:
    own = {"name": "of_my_own", "layouts": [], "exchange": "of_my_own"}
    run = prepared(tmp_path, "all_reduce")
    run = run.model_copy(update={"sharding": Sharding(**own)})
    ranks.run(train_with_own_exchange, run)
    folder = run.folders.runs / run.name
    [record] = small_run.records(folder, "communication")
    assert record["expected_bytes"] == {"gradients": None} and record["wire_bytes"] > 0
    lines = small_run.records(folder, "train")
    assert [line["communication_bytes"] for line in lines] == [None] * 3


def test_a_wider_batch_sends_no_more_gradients(ranks: RankPool, tmp_path: Path) -> None:
    narrow, wide = (
        undisturbed(ranks, tmp_path / str(samples), "ddp", training__global_batch_samples=samples)
        for samples in (4, 16)
    )
    assert narrow["expected_bytes"] == wide["expected_bytes"]
    assert narrow["wire_bytes"] == pytest.approx(wide["wire_bytes"], rel=0.05)


def test_a_counter_that_is_no_number_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As iWARP's devices have it."""
    monkeypatch.setattr(comm_profile, "INFINIBAND", tmp_path)
    monkeypatch.setattr(comm_profile, "NET", tmp_path / "none")
    for port, content in enumerate(("7\n", "N/A (no PMA)\n")):
        file = tmp_path / "card" / "ports" / str(port) / "counters" / "port_xmit_data"
        file.parent.mkdir(parents=True)
        file.write_text(content)
    assert comm_profile.wire_bytes() == 7 * comm_profile.INFINIBAND_UNIT
