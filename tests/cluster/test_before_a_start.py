"""What is refused or said before a run is started here, and what machines read of it."""

import io
import json

import pytest
import yaml

from atoll import run_dir
from atoll.__main__ import main
from atoll.cluster import start, submit, submit_checks
from atoll.cluster.device_here import SIGNS, check_device
from atoll.cluster.hub_names import hub_names
from atoll.config.compose import compose
from atoll.errors import UserError
from atoll.monitor.progress import Progress
from atoll.settings import dumped

LAPTOP = ("facility=laptop", "name=x")


class StartedError(Exception):
    """In place of a start: where a run would have become another program."""


@pytest.fixture(autouse=True)
def no_start(monkeypatch):
    def execvp(program, words):
        raise StartedError

    monkeypatch.setattr(start.os, "execvp", execvp)


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("folders.runs=FILE/runs", "cannot write the run folder FILE/runs/x: Not a directory"),
        ("folders.prepared=FILE/p", "cannot make FILE/p: Not a directory"),
        ("model.source=/no/such/folder", "no such folder: model.source=/no/such/folder"),
        ("model.source=/", "no config.json in model.source=/"),
    ],
)
def test_a_place_that_cannot_be_used_is_named(word, found, here, capsys):
    (here / "file").touch()
    file = str(here / "file")
    assert main(["submit", *LAPTOP, word.replace("FILE", file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"atoll: {found.replace('FILE', file)}" and len(lines) == 2
    if word.startswith("folders"):
        assert lines[1].strip() == f"give another place: {word.partition('=')[0]}=FOLDER"


def test_a_cache_that_only_compute_nodes_have_keeps_no_run_without_an_image(here):
    (here / "local_scratch").touch()
    with pytest.raises(StartedError):
        main(["submit", *LAPTOP, f"folders.caches={{HF_HOME: {here}/local_scratch/hf}}"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["model=llama2_7b"], "model.source=meta-llama/Llama-2-7b-hf"),
        (["data=hub", "data.hub=a/texts"], "data.hub=a/texts"),
        (["tokenizer.path=some/words"], "tokenizer.path=some/words"),
    ],
)
def test_nodes_without_a_network_find_what_has_a_name_of_the_hub_or_nothing_is_queued(
    words, named, here
):
    shell = {"HF_HOME": str(here / "hf")}
    run = compose(["facility=leonardo", "name=x", *words]).run
    with pytest.raises(UserError, match="and nodes of leonardo have no network") as error:
        submit_checks.check_hub(run, shell)
    assert error.value.found.startswith(f"{named} is not in {here / 'hf' / 'hub'}")
    assert "atoll prepare --into BUNDLE" in error.value.hint
    for of in hub_names(run):
        (here / "hf" / "hub" / f"{of.kind}--{of.name.replace('/', '--')}").mkdir(parents=True)
    submit_checks.check_hub(run, shell)
    own = compose(["facility=leonardo", f"folders.caches={{HF_HOME: {here / 'hf'}}}", *words]).run
    submit_checks.check_hub(own, {})
    submit_checks.check_hub(compose(["facility=lumi", *words]).run, {})  # its nodes fetch


@pytest.mark.parametrize("setting", ["model.source", "tokenizer.path"])
def test_a_folder_that_is_not_there_is_refused_before_a_job_waits_for_it(setting, here):
    words = ["facility=generic_slurm", "facility.account=a", "name=x", f"{setting}={here}/modle"]
    with pytest.raises(UserError, match=f"no such folder: {setting}={here}/modle"):
        submit_checks.check_before_start(compose(words).run, False, {})


@pytest.mark.parametrize("fits", [False, True])
def test_dpo_begins_with_a_checkpoint_of_its_own_kind(fits, here):
    """The reference is the model's source: what a run of another kind learned would be no part."""
    words = ["facility=laptop", "model=from_path", f"model.source={here}"]
    words += ["data=text_files", "data.files=x.jsonl", "data.format=preference", "task=preference"]
    origin = compose([*(words if fits else ["facility=laptop"]), "name=before"]).run
    folder = run_dir.checkpoint(run_dir.folder(origin), 5)
    folder.mkdir(parents=True)
    file = run_dir.settings_file(run_dir.folder(origin))
    run_dir.write_whole(file, yaml.safe_dump(dumped(origin)))
    run = compose([*words, f"checkpoint.initial_load_path={folder}", "training.steps=9"]).run
    if fits:
        submit_checks.check_reference(run)
        return
    with pytest.raises(UserError, match=r"the reference of DPO would be model\.source=") as refused:
        submit_checks.check_reference(run)
    assert refused.value.hint.endswith("before/export")


def test_a_branch_of_a_run_is_no_reference(here):
    """Any task has a loss of preferences among its settings, and only one of them compares."""
    origin = compose(["facility=laptop", "name=trunk"]).run
    folder = run_dir.checkpoint(run_dir.folder(origin), 5)
    folder.mkdir(parents=True)
    file = run_dir.settings_file(run_dir.folder(origin))
    run_dir.write_whole(file, yaml.safe_dump(dumped(origin)))
    words = ["facility=laptop", f"checkpoint.initial_load_path={folder}", "training.steps=9"]
    submit_checks.check_reference(compose(words).run)


def test_an_adapter_that_is_not_there_is_refused_before_a_job_waits_for_it(here):
    words = ["facility=generic_slurm", "facility.account=a", "name=x", "image=none"]
    words += ["+model.lora.rank=4", f"+model.lora.start={here}/a"]
    with pytest.raises(UserError, match=f"no such folder: model.lora.start={here}/a"):
        submit_checks.check_before_start(compose(words).run, False, {})


@pytest.mark.parametrize("facility", ["setonix", "frontier", "perlmutter"])
def test_a_job_whose_nodes_may_talk_over_tcp_says_so(facility, here, capsys):
    """Its ranks end at their start where NCCL finds no plugin for the fabric."""
    words = [f"facility={facility}", "facility.account=a", "name=x", "nodes=2"]
    line = f"image={compose(words).run.image.name} has a plugin for slingshot; facility.network.plu"
    assert main(["submit", "--dry-run", *words]) == 0
    [note] = [text for text in capsys.readouterr().out.splitlines() if line in text]
    assert note.startswith("# whether nodes talk over slingshot is not known: neither the facili")
    for other in ("nodes=1", "facility.network.plugin=/a/librccl-net.so"):
        assert main(["submit", "--dry-run", *words, other]) == 0
        assert "talk over" not in capsys.readouterr().out
    assert main(["submit", "--dry-run", "facility=lumi", *words[1:]]) == 0
    assert "talk over" not in capsys.readouterr().out


def test_a_queued_job_says_that_its_nodes_may_talk_over_tcp(here, monkeypatch, capsys):
    (here / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (here / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:/usr/bin:/bin")
    monkeypatch.setattr(submit, "check_before_start", submit_checks.check)
    words = ["facility=setonix", "facility.account=a", "image.file=null", "name=x", "nodes=2"]
    monkeypatch.setattr(start, "keep_image", lambda *_: None)
    assert main(["submit", *words]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("job 7: ")
    assert said.err.count("whether nodes talk over slingshot is not known: ") == 1


def test_what_an_earlier_job_makes_may_be_missing_yet(here):
    words = ["facility=generic_slurm", "facility.account=a", "name=x", "image=none"]
    words += [f"model.source={here}/export", f"tokenizer.path={here}/export"]
    words += ["+facility.submit.dependency=afterok:7"]
    submit_checks.check_before_start(compose(words).run, False, {})


def test_what_a_run_began_with_may_be_put_away_once_it_has_its_own(here):
    words = ["facility=generic_slurm", "facility.account=a", "name=x", "training.steps=9"]
    words += [f"checkpoint.initial_load_path={here}/runs/before/checkpoints/step-00000005"]
    run = compose(words).run
    with pytest.raises(UserError, match="no such folder: checkpoint"):
        submit_checks.check_source(run)
    run_dir.write_whole(run_dir.checkpoint(run_dir.folder(run), 6) / "manifest.json", "{}")
    submit_checks.check_source(run)


def test_what_a_job_does_not_read_of_the_hub_is_not_looked_for(here):
    def of(*words):
        run = compose(["facility=leonardo", "name=x", *words]).run
        submit_checks.check_hub(run, {"HF_HOME": str(here / "hf")})
        return run

    hub = ("data=hub", "data.hub=a/texts", "tokenizer.path=some/words")
    with pytest.raises(UserError, match="have no network"):
        run = compose(["facility=leonardo", "name=x", *hub]).run
        submit_checks.check_hub(run, {"HF_HOME": str(here / "hf")})
    bundled = run.folders.model_copy(update={"bundle": here / "bundle"})
    submit_checks.check_hub(run.model_copy(update={"folders": bundled}), {})
    (here / "saved").mkdir()
    of("data=hub", "data.hub=saved")
    (here / "hf" / "datasets" / "a___texts").mkdir(parents=True)
    of(*hub[:2])
    tokens = run_dir.prepared(run)
    tokens.mkdir(parents=True)
    (tokens / "manifest.json").write_text("{}")
    of(*hub)


def test_an_environment_of_a_login_node_starts_no_training(here, monkeypatch, capsys):
    monkeypatch.setattr(submit_checks, "find_spec", lambda name: None)
    assert main(["submit", *LAPTOP]) == 2
    found, hint = capsys.readouterr().err.splitlines()
    assert "has no torch" in found and "make setup" in hint
    assert not (here / "runs").exists()
    assert main(["submit", "--dry-run", *LAPTOP]) == 0


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("data.files=none.txt", "data.files: no such file or folder: HERE/none.txt"),
        ("data.files=*.txt", "data.files holds no text: 1 files, 0 bytes"),
        ("data.files=folder", "data.files: the folder HERE/folder holds no file that ends in"),
        (
            "data.files=full.md data.validation.files=gone.txt data.validation.fraction=null",
            "data.validation.files: no such file or folder: HERE/gone.txt",
        ),
        (
            "data=python_stdlib data.files=full.md",
            "data.files names full.md, and data=python_stdlib reads Python's own sources",
        ),
    ],
)
def test_text_that_is_not_there_is_refused_before_a_folder_is_written(words, found, here, capsys):
    (here / "empty.txt").touch()
    (here / "full.md").write_text("words")
    (here / "folder").mkdir()
    assert main(["submit", *LAPTOP, "data=text_files", *words.split()]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"atoll: {found.replace('HERE', str(here))}") and len(lines) == 2
    assert not (here / "runs").exists()
    dry = ["submit", "--dry-run", *LAPTOP, "data=text_files", *words.split()]
    assert main(dry) == 0  # may be typed before the text is there


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], "evaluating llama_tiny, untrained (model.source=FOLDER gives a model), on what"),
        (["model.source=HERE"], "evaluating HERE, on what python_stdlib holds out"),
    ],
)
def test_evaluate_says_what_it_evaluates(words, shown, here, capsys):
    (here / "config.json").write_text('{"model_type": "llama"}')
    words = [word.replace("HERE", str(here)) for word in words]
    with pytest.raises(StartedError):
        main(["evaluate", *LAPTOP, *words])
    assert shown.replace("HERE", str(here)) in capsys.readouterr().err


def test_a_sweep_counts_its_dry_runs(capsys):
    words = ["facility=laptop", "seed=1,2", "sharding=ddp"]
    assert main(["submit", "--dry-run", "--multirun", *words]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# 1/2")]
    assert heads == ["# 1/2 seed=1"]


def test_compose_and_plan_as_json(capsys):
    assert main(["compose", "--json", *LAPTOP]) == 0
    [run] = json.loads(capsys.readouterr().out)
    assert run["settings"] == compose(LAPTOP).run.model_dump(mode="json")
    assert run["sources"]["name"] == "command line"
    assert main(["plan", "--json", *LAPTOP]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["submit"][-len(plan["chosen"]) :] == plan["chosen"]
    assert {tuple(option["overrides"]) for option in plan["options"]} >= {tuple(plan["chosen"])}
    assert all(option["memory_bytes"]["peak"] > 0 for option in plan["options"])


def test_a_progress_bar_begins_with_the_first_figures(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    progress = Progress(total_steps=9, first_step=0)
    progress.before_step(1)
    assert progress.bar is None and terminal.getvalue() == ""
    progress.show({"event": "train", "step": 3, "loss": 2.5, "tokens_per_second": 1234.0})
    [task] = progress.bar.tasks
    assert task.fields["figures"] == "loss 2.5000  1,234 tokens/s  0:00 left"
    progress.on_end()
    assert "step 3/9" in terminal.getvalue() and "step 0/9" not in terminal.getvalue()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def machine(folder, *files):
    for name in ("dev/kmsg", *files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.fixture
def no_programs(monkeypatch):
    monkeypatch.setattr("atoll.cluster.device_here.shutil.which", lambda name: None)


@pytest.mark.parametrize("device", SIGNS)
def test_devices_that_this_machine_has_not_are_refused(device, tmp_path, no_programs):
    run = compose((*LAPTOP, f"facility.node.device={device}")).run
    with pytest.raises(UserError) as caught:
        check_device(run, machine(tmp_path))
    assert f"this machine has no {device} device" in caught.value.found
    assert "facility.node.device=cpu" in caught.value.hint


@pytest.mark.parametrize(
    ("device", "file"),
    [("cuda", "dev/nvidia0"), ("cuda", "dev/dxg"), ("cuda", "dev/nvmap"), ("rocm", "dev/kfd")],
)
def test_devices_that_may_be_there_are_not_refused(device, file, tmp_path, no_programs):
    check_device(compose((*LAPTOP, f"facility.node.device={device}")).run, machine(tmp_path, file))


@pytest.mark.parametrize("program", ["sbatch", "qsub", "nvidia-smi"])
def test_what_another_machine_may_have_is_not_refused(program, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "atoll.cluster.device_here.shutil.which", lambda name: name if name == program else None
    )
    run = compose((*LAPTOP, "facility.node.device=cuda")).run
    check_device(run, machine(tmp_path))


def test_devices_of_a_cluster_or_another_container_are_not_known(tmp_path, no_programs):
    check_device(compose(("facility=leonardo", "name=x")).run, machine(tmp_path / "login"))
    own_dev = tmp_path / "container"
    check_device(compose((*LAPTOP, "facility.node.device=cuda")).run, own_dev)


def test_absent_devices_end_in_two_lines_before_a_folder_is_written(
    here, no_programs, monkeypatch, capsys
):
    root = machine(here / "root")
    monkeypatch.setattr(submit_checks, "check_device", lambda run: check_device(run, root))
    words = ["submit", *LAPTOP, "facility.node.device=cuda"]
    assert main(words) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert not (here / "runs").exists()
    assert main(["submit", "--dry-run", *words[1:]]) == 0  # may be typed elsewhere
