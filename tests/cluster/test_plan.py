"""`atoll plan` and `atoll report`: what they print."""

import json
import re

import pytest
import yaml

from atoll import run_dir
from atoll.cluster import plan
from atoll.cluster.before_queue import prediction_of
from atoll.config import compose as compose_room
from atoll.errors import UserError
from atoll.report import command as report
from atoll.settings import dumped


def test_the_table_the_choice_and_the_line(capsys, here):
    line = ["model=llama2_7b", "facility=karolina", "data.sequence_tokens=4096"]
    assert plan.main([*line, "sharding=auto"]) == 0
    text = capsys.readouterr().out
    assert "6,738.4 M parameters, 32 layers" in text
    assert "8 cuda devices, memory of each 40 GiB" in text
    rows = {row.split("  ")[0]: row for row in text.splitlines()}
    assert rows["sharding=ddp"].endswith("no")
    [chosen] = [row for row in text.splitlines() if row.startswith("chosen: ")]
    last = text.splitlines()[-1]
    assert last.startswith("sbatch/train.sbatch model=llama2_7b facility=karolina")
    assert last.split("4096 ")[1] in chosen


MADE_UP = "name: made_up\nlayouts: []\nexchange: one_by_one\n"


def test_what_a_strategy_without_a_formula_sends_is_unknown(capsys, tree, monkeypatch):
    (tree / "sharding" / "made_up.yaml").write_text(MADE_UP)
    monkeypatch.setattr(compose_room, "config_tree", lambda: tree)
    monkeypatch.setattr(plan, "config_tree", lambda: tree)
    assert plan.main(["facility=karolina", "model=llama2_7b", "sharding=made_up"]) == 0
    [row, _] = [r for r in capsys.readouterr().out.splitlines() if r.startswith("sharding=made_up")]
    assert row.split()[-2:] == ["unknown", "no"]


def test_what_a_layout_of_ones_own_keeps_is_unknown(capsys, tree, monkeypatch):
    (tree / "sharding" / "made_up.yaml").write_text("name: made_up\nlayouts: [stripes]\n")
    for module in (compose_room, plan):
        monkeypatch.setattr(module, "config_tree", lambda: tree)
    words = ["facility=karolina", "model=llama2_7b"]
    run = compose_room.compose([*words, "sharding=made_up"]).run
    prediction = prediction_of(run)
    assert prediction.memory_gib is prediction.step_seconds is None
    assert "sharding=made_up keeps" in prediction.why_no_time


def test_why_nothing_is_known_of_adapters_beside_other_layers(capsys, here):
    words = ["facility=karolina", "model=llama2_7b", "+model.lora={targets: [other]}"]
    assert plan.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    [chosen, time] = [line for line in lines if line.startswith(("chosen: ", "time: "))]
    assert "because model.lora.targets names other" in chosen and "device_memory" not in chosen
    assert time.startswith("time: unknown, model.lora.targets names other")


def test_a_program_reads_all_of_what_is_chosen(capsys, here):
    line = ["model=llama2_7b", "facility=leonardo", "nodes=4", "precision=bf16"]
    assert plan.main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chosen_option"]["overrides"] == found["chosen"]
    assert found["chosen_option"]["step_seconds"]["total"] > 0
    assert found["chosen_option"]["memory_bytes"]["peak"] > 0


def test_a_model_of_unknown_shape(here, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(here))
    with pytest.raises(UserError, match="the shape of a/b is not known here"):
        plan.main(["facility=laptop", "model=from_path", "model.source=a/b"])


@pytest.fixture
def runs(composed, here):
    """Two runs of one and two ranks, as they would have written themselves down."""
    for ranks, rate in ((2, 150.0), (1, 100.0)):
        sharding = "ddp" if ranks > 1 else "single"
        words = [f"ranks_per_node={ranks}", f"name=r{ranks}", f"sharding={sharding}"]
        run = composed("facility=laptop", *words).run
        folder = run_dir.folder(run)
        run_dir.write_whole(run_dir.settings_file(folder), yaml.safe_dump(dumped(run)))
        batch = run.training.global_batch_samples
        records = [{"event": "start", "ranks": ranks, "training_samples": 2 * batch}]
        for step in range(1, 5):
            slow = 0.1 if step == 1 else 1.0  # the first step warms up
            train = {"event": "train", "step": step, "loss": 5.0 - step, "step_seconds": 2 / slow}
            rates = {"tokens_per_second": rate * slow, "tokens": 200 * step}
            records.append(train | rates)
        used = {"device_joules": None, "device_source": None, "package_joules": 900.0}
        # started twice: what both used adds up
        used |= {"event": "energy", "package_source": "measured: RAPL"}
        records += [used | {"first_step": first, "step": first + 1} for first in (1, 3)]
        if ranks > 1:
            records.append(
                {
                    "event": "communication",
                    "step": 2,
                    "expected_bytes": {"gradients": 2**20},
                    "wire_bytes": 1.02 * 2**20,
                    "seconds": 1.0,
                    "collectives": [
                        {"collective": "gloo:all_reduce", "shape": [9], "dtype": "float"}
                    ],
                }
            )
        text = "".join(json.dumps(record) + "\n" for record in records)
        run_dir.metrics_file(folder).write_text(text)
    return ["r2", "r1"]


def test_what_was_expected_of_a_strategy_without_a_formula_is_unknown(runs, here, capsys):
    file = run_dir.metrics_file(here / "runs" / "r2")
    file.write_text(file.read_text().replace('{"gradients": 1048576}', '{"gradients": null}'))
    assert report.main(runs) == 0
    [row] = [r.split() for r in capsys.readouterr().out.splitlines() if "gloo:all_reduce" in r]
    assert row[:5] == ["r2", "64", "unknown", "1.02", "50%"]


def test_scaling_and_communication(runs, capsys):
    assert report.main(runs) == 0
    _, _, printed = capsys.readouterr().out.partition("\n\n")  # behind the results
    rows = [line.split() for line in printed.splitlines()]
    assert rows[2] == ["r1", "1", "2.000", "100", "1.00", "100%", "3.5000", "1.5000"]
    assert rows[3] == ["r2", "2", "2.000", "150", "1.50", "75%", "3.5000", "1.5000"]
    assert rows[7][:6] == ["r2", "64", "1.00", "1.02", "+2.0%", "50%"]
    assert rows[11] == ["r1", "packages", "0.0005", "2.25", "measured:", "RAPL"]


def test_a_run_without_steps(runs, here):
    run_dir.metrics_file(here / "runs" / "r1").unlink()
    with pytest.raises(UserError, match="run r1 has no steps to report"):
        report.main(["r1"])


def test_plan_says_how_often_to_save(here, capsys):
    words = ["facility=leonardo", "facility.account=p", "model=llama_tiny", "nodes=100"]
    words += ["training.global_batch_samples=400"]
    plan.main(words)
    assert "a failure each 63.2 h (0.0038 a node and day); checkpoint.every_steps=auto" in (
        capsys.readouterr().out
    )
    measured = {"facility": "leonardo", "measured_on": "2026-11-23", "file_write_gb_s": 0.001}
    run_dir.write_whole(here / "facilities" / "leonardo.json", json.dumps(measured))
    plan.main(words)
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("checkpoints:"))
    assert re.search(r"a save of [\d.]+ s, .* is best each [\d.]+ min", line)


LUMI = ["facility=lumi", "facility.account=p", "model=llama2_7b", "training.microbatch_samples=1"]


def test_scaling_over_nodes_and_its_knee(here, capsys):
    fast = ["facility.network.gbps=1e6", "facility.node.link_gbps=1e6", "data.sequence_tokens=4096"]
    words = [*LUMI, *fast, "training.global_batch_samples=64", "--simulate", "nodes=1,2,...,16"]
    assert plan.main([*words, "facility.node.file_write_gb_s=2"]) == 0
    weak, strong, last = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in weak.splitlines()[2:-1]] == ["1", "2", "4", "8", "16"]
    assert strong.splitlines()[-1] == "knee: 16 nodes, efficiency 50%, by batch too small"
    assert last.startswith("with failures: 0.0038 a node and day")
    assert plan.main([*words, "sharding=full_shard", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["knee"]["strong"] == 16
    assert {tuple(row["strategy"]) for row in found["weak"]} == {("sharding=full_shard",)}
    assert found["weak"][0]["useful"] is None


@pytest.mark.parametrize("words", ["16,64", "nodes=64,16", "nodes=16,...,64", "nodes=0", "nodes=a"])
def test_what_names_no_counts_is_refused(here, words):
    with pytest.raises(UserError, match="names no counts of nodes"):
        plan.main([*LUMI, "--simulate", words])
