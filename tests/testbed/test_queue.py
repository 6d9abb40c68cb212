"""What Slurm itself answers: refusals, sweeps, devices that each task sees."""

import re

import pytest
from testbed_site import queued_jobs


@pytest.mark.parametrize(
    ("words", "said", "setting"),
    [
        ("facility.account=nobody", "Invalid account", "facility.account"),
        ("facility.submit.partition=nowhere", "invalid partition", "facility.submit.partition"),
    ],
)
def test_a_refusal_is_slurm_s_own(words, said, setting, site):
    line = ["sbatch/train.sbatch", "facility=testbed", "nodes=1", "name=refused", words]
    answer = site.type(*line, check=False)
    found, hint = answer.splitlines()[-2:]  # behind what the job would take
    assert said in found
    assert setting in hint
    assert not (site.clone / "runs" / "refused").exists()


def test_a_queue_s_limit_is_refused_before_slurm_is_asked(site):
    words = ["facility=testbed", "nodes=3", "training.global_batch_samples=6"]
    words += ["facility.submit.qos=debug"]
    answer = site.type("sbatch/train.sbatch", *words, check=False)
    assert "debug of testbed takes jobs of at most 2 nodes, not 3" in answer


def test_a_sweep_prints_three_jobs(site):
    line = ["sbatch/train.sbatch", "--multirun", "facility=testbed", "nodes=1,2,4"]
    answer = site.type(*line, "facility.submit.hold=true")
    lines = answer.splitlines()
    heads = [text.split()[1] for text in lines if re.match("[123]/3 ", text)]
    assert heads == ["nodes=1", "nodes=2", "nodes=4"]
    jobs = queued_jobs(answer)
    assert len(set(jobs)) == 3
    folders = [text.split()[-1] for text in lines if text.startswith("job ")]
    assert "queued, job" in site.atoll("status", folders[0])
    site.type("scancel", *jobs)
    assert "failed" in site.atoll("status", folders[0])


DEVICES = """
import os
from atoll.launch import device_index
visible = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
rank = int(os.environ["SLURM_LOCALID"])
try:
    print(rank, len(visible), device_index(rank, 2, len(visible)))
except Exception as error:
    print(rank, len(visible), error.found)
"""


@pytest.mark.parametrize(
    ("flags", "seen"),
    [
        (["--gpus-per-task=1"], ["0 1 0", "1 1 0"]),
        (["--gpus-per-node=2"], ["0 2 0", "1 2 1"]),
        ([], [f"{rank} 0 2 ranks on this node, 0 devices visible" for rank in (0, 1)]),
    ],
)
def test_one_visible_device_all_and_none_are_told_apart(flags, seen, site):
    step = ["srun", "--quiet", "--account=island", "--nodes=1", "--ntasks=2", *flags]
    command = [*step, "apptainer", "-q", "exec", str(site.image), "python3", "-c", DEVICES]
    assert sorted(site.type(*command).splitlines()) == seen
