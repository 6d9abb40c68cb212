"""What a facility's YAML becomes in the Slurm that stands for it."""

from pathlib import Path

import pytest

from atoll.config.compose import config_tree, groups
from atoll.rehearse.mirror import Mirror, accounting, mirror_of, settings_files
from atoll.rehearse.rehearsal import as_stated, whole_run

FACILITIES = sorted(set(groups(config_tree())["facility"]) - {"laptop"})


def mirror(*words: str) -> Mirror:
    run = whole_run(words)
    return mirror_of(run, as_stated(run.facility.name))


def slurm_conf(*words: str) -> list[str]:
    return settings_files(mirror(*words), Path("/stage"), "here")["slurm.conf"].splitlines()


def test_nodes_carry_the_facilitys_names_cores_memory_and_devices() -> None:
    lines = slurm_conf("facility=leonardo", "nodes=4")
    [first, second, others] = [line for line in lines if line.startswith("NodeName=")]
    assert first.startswith("NodeName=lrdn0001 ") and second.startswith("NodeName=lrdn0002 ")
    assert "CPUs=32 RealMemory=494592 Gres=gpu:4" in first
    assert others.startswith("NodeName=other[1-2] ") and others.endswith("State=DOWN")


def test_a_queue_is_a_partition_and_a_qos_with_its_limits() -> None:
    words = accounting(mirror("facility=leonardo"), "me")
    assert [
        "qos",
        "boost_qos_dbg",
        "MaxWall=30",
        "MaxTRESPerJob=node=2",
        "Flags=DenyOnLimit",
    ] in words
    lines = slurm_conf("facility=lumi")
    assert "PartitionName=dev-g Nodes=ALL State=UP MaxNodes=32 MaxTime=180" in lines
    assert (
        "PartitionName=standard-g Nodes=ALL State=UP Default=YES MaxNodes=1024 MaxTime=2880"
        in lines
    )


def test_constraints_and_types_of_devices_are_known() -> None:
    lines = slurm_conf("facility=iris", "facility.submit.gres='gpu:v100:4'")
    assert "Gres=gpu:v100:4 Features=volta32" in next(li for li in lines if "NodeName=iris" in li)


def test_nodes_are_whole_where_no_device_is_asked_for() -> None:
    assert any("OverSubscribe=EXCLUSIVE" in line for line in slurm_conf("facility=frontier"))
    assert not any("EXCLUSIVE" in line for line in slurm_conf("facility=lumi"))


@pytest.mark.parametrize("name", FACILITIES)
def test_every_facility_has_a_mirror(name: str) -> None:
    made = mirror(f"facility={name}")
    assert len(made.hosts) == 2
    assert made.default_partition and made.devices


def test_a_queue_that_was_typed_is_no_queue_of_the_facility() -> None:
    assert "nobody" not in mirror("facility=lumi", "facility.submit.qos=nobody").queues
    assert "gpu-dev" in mirror("facility=setonix", "facility.submit.partition=gpu-dev").queues
