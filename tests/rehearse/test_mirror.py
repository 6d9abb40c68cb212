"""What a facility's YAML becomes in the Slurm that stands for it."""

from pathlib import Path

import pytest

from atoll.config.compose import compose, config_tree, groups
from atoll.rehearse.mirror import accounting, mirror_of, settings_files
from atoll.rehearse.rehearsal import whole_run

FACILITIES = sorted(set(groups(config_tree())["facility"]) - {"laptop"})


def slurm_conf(*words: str) -> list[str]:
    mirror = mirror_of(compose(list(words)).run)
    return settings_files(mirror, Path("/stage"), "here")["slurm.conf"].splitlines()


def test_nodes_carry_the_facilitys_names_cores_memory_and_devices() -> None:
    lines = slurm_conf("facility=leonardo", "nodes=4")
    [first, second, others] = [line for line in lines if line.startswith("NodeName=")]
    assert first.startswith("NodeName=lrdn0001 ") and second.startswith("NodeName=lrdn0002 ")
    assert "CPUs=32 RealMemory=494592 Gres=gpu:4" in first
    assert others.startswith("NodeName=other[1-2] ") and others.endswith("State=DOWN")


def test_a_queue_is_a_partition_and_a_qos_with_its_limits() -> None:
    run = compose(["facility=leonardo"]).run
    words = accounting(mirror_of(run), "me")
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
    mirror = mirror_of(whole_run([f"facility={name}"]))
    assert len(mirror.hosts) == 2
    assert mirror.default_partition and mirror.devices
