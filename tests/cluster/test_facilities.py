"""Every facility: its full command, held by a golden text, and the limits it states.

`python tests/cluster/test_facilities.py` writes the golden texts anew.
"""

import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from atoll.cluster.launchers import launch_step
from atoll.cluster.submit import dry_run
from atoll.cluster.submit_checks import check
from atoll.config.compose import compose
from atoll.errors import UserError
from atoll.settings.capability import runs_on

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
FACILITIES = ROOT / "hydra_conf" / "facility"
NAMES = sorted(path.stem for path in FACILITIES.glob("*.yaml"))
LINE = ("name=x", "folders.runs=/runs", "folders.prepared=/prepared", "folders.images=/images")
# Known and not supported: composed all the same, for the day it is.
TRIED = {
    "aurora": ("facility.unsupported=null",),
    "ssh_hosts": ("facility.hosts_file=/hosts.txt",),
}
OF_ONE_S_OWN = {"laptop", "generic_slurm", "ssh_hosts"}  # no facts of a facility


def values(name: str) -> dict:
    return yaml.safe_load((FACILITIES / f"{name}.yaml").read_text())


def line(name: str, *more: str) -> tuple[str, ...]:
    """Two nodes, or as few as the facility takes, and a batch that divides."""
    facility = values(name)
    most = facility.get("limits", {}).get("max_nodes") or 2
    nodes = max(min(2, most), facility.get("limits", {}).get("min_nodes", 1))
    ranks = nodes * facility["node"]["devices"]
    given = (f"facility={name}", f"nodes={nodes}", f"training.global_batch_samples={ranks}")
    account = ("facility.account=project",) if facility["scheduler"] != "none" else ()
    return (*given, *LINE, *account, *TRIED.get(name, ()), *more)


def printed(name: str, tree: Path) -> str:
    """What --dry-run prints, without this machine's own paths."""
    text = dry_run(compose(line(name), tree).run)
    # the interpreter first: it may live in the clone
    return text.replace(sys.executable, "{PYTHON}").replace(str(ROOT), "{CLONE}")


# an image's own folder is called as what their libraries are bound to
IN_NO_IMAGE = {
    name: pytest.param(name, marks=pytest.mark.login_node)
    for name in ("frontier", "polaris", "setonix")
}


@pytest.mark.parametrize("name", [IN_NO_IMAGE.get(name, name) for name in NAMES])
def test_the_full_command(name, tree):
    assert printed(name, tree) == (GOLDEN / f"{name}.txt").read_text()


def test_there_is_a_golden_text_for_each_facility_and_no_other():
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == NAMES
    wanted = """leonardo karolina lumi setonix meluxina iris polaris aurora marenostrum5
        juwels_booster jupiter frontier perlmutter snellius generic_slurm laptop testbed"""
    assert set(wanted.split()) <= set(NAMES)


@pytest.mark.parametrize("name", sorted(set(NAMES) - OF_ONE_S_OWN))
def test_facts_have_a_source_and_a_date(name):
    facility = values(name)
    assert re.fullmatch(r"2\d{3}-\d\d-\d\d", facility["checked_on"])
    assert facility["source"]
    assert facility.get("account") in (None, "island")


LIMITED = [
    (name, queue, key, most)
    for name in NAMES
    for queue, limits in [
        (None, values(name).get("limits", {})),
        *values(name).get("limits", {}).get("queues", {}).items(),
    ]
    for key in ("min_nodes", "max_nodes", "max_walltime_minutes")
    for most in [limits.get(key)]
    if most is not None and values(name)["scheduler"] != "none"
]


@pytest.mark.parametrize(("name", "queue", "key", "most"), LIMITED)
def test_one_more_than_allowed_is_refused_with_both_numbers(name, queue, key, most, composed):
    facility = values(name)
    flag = next(flag for flag in ("qos", "partition", "q") if flag in facility["submit"])
    queues = facility["limits"].get("queues", {})
    if queue is None and any(
        facility["submit"].get(f) in queues for f in ("qos", "partition", "q")
    ):
        queue = next(
            facility["submit"][f]
            for f in ("qos", "partition", "q")
            if facility["submit"].get(f) in queues
        )
        most = queues[queue].get(key, most)
    limits = queues[queue] if queue else facility["limits"]
    beyond = most - 1 if key == "min_nodes" else most + 1
    nodes = beyond if key != "max_walltime_minutes" else max(limits.get("min_nodes", 1), 1)
    words = [
        f"nodes={nodes}",
        f"training.global_batch_samples={nodes * facility['node']['devices']}",
    ]
    words += [f"++facility.submit.{flag}={queue}"] if queue else []
    words += [f"facility.walltime_minutes={beyond}"] if key == "max_walltime_minutes" else []
    if key != "max_walltime_minutes":
        words += ["facility.walltime_minutes=10"]
    run = composed(*line(name), *words).run
    with pytest.raises(UserError) as caught:
        check(run, here=False, environment={})
    assert f" {most} " in caught.value.found
    assert caught.value.found.endswith(f"not {beyond}")


def test_longer_jobs_need_more_nodes_where_the_facility_says_so(composed):
    for nodes, most in ((1, 120), (91, 120), (92, 360), (184, 720)):
        words = (f"nodes={nodes}", f"training.global_batch_samples={nodes * 8}")
        good = composed(*line("frontier"), *words, f"facility.walltime_minutes={most}").run
        check(good, here=False, environment={})
        long = composed(*line("frontier"), *words, f"facility.walltime_minutes={most + 1}").run
        with pytest.raises(UserError, match=f"for {nodes} nodes, allows {most} minutes"):
            check(long, here=False, environment={})


def test_a_facility_that_is_not_supported_says_why(composed):
    run = composed(*line("aurora"), "facility.unsupported='needs an image for XPU'").run
    with pytest.raises(UserError, match="aurora cannot be used: needs an image for XPU"):
        check(run, here=False, environment={})
    assert "XPU" in values("aurora")["unsupported"]


@pytest.mark.parametrize("name", [name for name in NAMES if "task_binding" in values(name)])
def test_binding_is_for_one_task_per_device_alone(name, composed):
    scheduler = values(name)["scheduler"]
    binding = composed(*line(name)).run.facility.task_binding
    step = launch_step(composed(*line(name)).run, Path("/runs/x"))
    assert set(binding) <= set(step)
    if scheduler == "slurm":
        step = launch_step(composed(*line(name), "launcher=static_node").run, Path("/runs/x"))
        assert not set(binding) & set(step)


def test_lumi_s_masks_are_its_56_cores_once_each(composed):
    [binding] = composed(*line("lumi")).run.facility.task_binding
    masks = [int(word, 16) for word in binding.removeprefix("--cpu-bind=mask_cpu:").split(",")]
    cores = [[core for core in range(64) if mask >> core & 1] for mask in masks]
    assert [len(one) for one in cores] == [7] * 8
    flat = sorted(core for one in cores for core in one)
    assert flat == [core for core in range(64) if core % 8]  # the first of each eight is not ours


def test_network_variables_belong_to_facilities_alone():
    found = [path for path in (ROOT / "containers").rglob("*") if path.is_file()]
    inside = [path for path in found if path.suffix != ".pyc"]  # of an earlier run of the tests
    network = re.compile(r"\b(NCCL|FI|GLOO|CCL|UCX)_[A-Z]")
    assert [path for path in inside if network.search(path.read_text())] == []
    with_devices = [name for name in NAMES if values(name)["node"]["device"] == "rocm"]
    assert with_devices
    for name in with_devices:
        assert set(values(name)["task_folders"]) == {
            "MIOPEN_USER_DB_PATH",
            "MIOPEN_CUSTOM_CACHE_DIR",
        }


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"generic_slurm"}))
def test_a_facility_states_its_hardware(name):
    """Whoever plans, binds and chooses an image needs all of it; `generic_slurm` is one's own."""
    facility, wanted = values(name), {"devices"}
    if facility["node"]["device"] != "cpu":
        wanted |= {"device_memory_gib", "cores", "memory_gib"}
        assert facility["network"]["fabric"] in ("infiniband", "slingshot")
    if facility["node"]["device"] in ("cuda", "rocm"):
        wanted |= {"compute_capability"}
    assert {key for key in wanted if facility["node"].get(key) is None} == set()


@pytest.mark.parametrize("name", NAMES)
def test_the_image_of_a_facility_is_for_its_devices(name, composed):
    run = composed(*line(name)).run
    device, built_for = run.facility.node.compute_capability, run.image.capabilities
    assert device is None or run.image.name == "none" or runs_on(device, built_for)


def test_v100_and_cuda_13_are_refused_with_the_reason(composed):
    with pytest.raises(UserError) as caught:
        composed(*line("iris"), "image=cuda")
    assert "image=cuda was built for 7.5, 8.0" in caught.value.found
    assert "the devices of iris are 7.0" in caught.value.found
    assert "image=cuda12" in caught.value.hint


@pytest.mark.parametrize(
    ("device", "built_for", "runs"),
    [
        ("7.0", ["7.5", "8.0"], False),
        ("8.6", ["8.0"], True),
        ("8.0", ["8.6"], False),
        ("9.0", ["8.0"], False),
        ("9.0", ["8.0+PTX"], True),
        ("10.3", ["9.0", "10.0"], True),
        ("7.0", ["7.5+PTX"], False),
        ("gfx90a", ["gfx908", "gfx90a"], True),
        ("gfx90a", ["gfx942"], False),
        ("gfx90a", ["9.0"], False),
    ],
)
def test_what_a_device_runs(device, built_for, runs):
    assert runs_on(device, built_for) is runs


def test_setonix_asks_for_packs_and_srun_states_the_rest(composed):
    queue, _, script = dry_run(composed(*line("setonix")).run).partition("\n")
    assert "--gres=gpu:8 --exclusive" in queue
    for flag in ("--ntasks-per-node", "--cpus-per-task", "--mem", "--gpus"):
        assert f"{flag}=" not in queue and flag not in queue.replace("--gpus-per-node", flag)
    [srun] = [text for text in script.splitlines() if "srun" in text]
    for flag in ("--nodes=2", "--ntasks=16", "--cpus-per-task=8", "--gres=gpu:8"):
        assert flag in srun
    assert "--gpus-per-task=1 --gpu-bind=closest" in srun


def test_nccl_net_without_its_plugin_is_refused(composed):
    with pytest.raises(UserError) as caught:
        composed(*line("polaris"), "facility.network.plugin=null")
    assert "NCCL_NET=AWS Libfabric is set" in caught.value.found
    assert "facility.network.plugin=FILE" in caught.value.hint
    composed(*line("lumi"), "++facility.environment.NCCL_NET='AWS Libfabric'")
    composed(*line("leonardo"), "++facility.environment.NCCL_NET=IB")


def test_machines_without_a_scheduler_need_a_file_of_them(composed):
    with pytest.raises(UserError) as caught:
        composed("facility=laptop", "launcher=ssh")
    assert caught.value.hint.startswith("facility.hosts_file=FILE")
    words = ("facility=ssh_hosts", "nodes=2", "facility.hosts_file=h.txt")
    run = composed(*words, "facility.ssh_options=[-p,'2222']").run
    check(run, here=False, environment={})
    assert run.facility.hosts_file.is_absolute()
    step = launch_step(run, Path("/runs/x"), "module:function")
    assert step[1:4] == ["-m", "atoll", "over-ssh"]
    assert step[step.index("--") - 2 : step.index("--")] == ["--ssh-option=-p", "--ssh-option=2222"]
    assert step[-5:] == ["--fork", "2", "--follow-stdin", "/runs/x", "module:function"]


@pytest.mark.login_node
def test_the_page_of_facilities_has_them_all_as_their_files_say():
    page = (ROOT / "docs" / "facilities.md").read_text()
    limits, known = page.split("### What is known of each")
    for name in NAMES:
        facility = values(name)
        node = facility["node"]
        memory = f" {node['device_memory_gib']} GiB" if node.get("device_memory_gib") else ""
        [row] = re.findall(rf"^\| `{name}` \|.*$", limits, re.M)
        assert f"| {facility['scheduler']} | {node['devices']} x {node['device']}{memory}" in row
        image = next((w for d in facility.get("defaults", []) for w in image_of(d)), "none")
        assert f"| {image} |" in row
        assert name in OF_ONE_S_OWN or re.search(rf"^\| `{name}` \|", known, re.M)


def image_of(default: object) -> list[str]:
    """The image of one line of a facility's defaults."""
    pairs = default.items() if isinstance(default, dict) else []
    return [value for key, value in pairs if "/image@" in key]


def test_module_folders_come_before_what_is_loaded_from_them(composed):
    text = dry_run(composed(*line("polaris")).run)
    use, load = "module use /soft/modulefiles", "module load spack-pe-base"
    assert text.index("source /etc/profile") < text.index(use) < text.index(load)
    assert text.index("module load apptainer") < text.index("set -euo pipefail")


def test_the_host_s_plugin_and_its_libraries_are_where_nccl_looks(composed):
    text = dry_run(composed(*line("polaris")).run)
    plugin = values("polaris")["network"]["plugin"]
    assert f"export NCCL_NET_PLUGIN={plugin}\n" in text
    assert (
        f"--bind {Path(plugin).parent} --bind /soft/libraries/hwloc/lib:/opt/atoll/fabric/0" in text
    )
    assert "/opt/atoll/fabric" in (ROOT / "containers" / "atoll.def").read_text()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        own = Path(name) / "hydra_conf"
        shutil.copytree(ROOT / "hydra_conf", own, ignore=shutil.ignore_patterns("local"))
        GOLDEN.mkdir(exist_ok=True)
        for facility_name in NAMES:
            (GOLDEN / f"{facility_name}.txt").write_text(printed(facility_name, own))
