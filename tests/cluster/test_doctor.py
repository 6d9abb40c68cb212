"""`atoll doctor` on the login node: each question, answered by programs that stand in for Slurm."""

import json
import stat
from pathlib import Path

import pytest

from atoll.cluster import doctor
from atoll.cluster.facility_checks import OK, UNKNOWN, WRONG, Finding, all_findings
from atoll.commands import COMMANDS

SLURM = ("facility=generic_slurm", "facility.account=mine", "folders.runs=/tmp")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Programs of a facility: `site(sinfo="echo up")` puts them on PATH, alone."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def install(**programs: str) -> dict[str, str]:
        for name, body in programs.items():
            path = folder / name
            path.write_text(f"#!/bin/sh\n{body}\n")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return {"PATH": str(folder), "HF_HOME": str(tmp_path / "hub")}

    return install


def found(run, environment, subject: str) -> Finding:
    [finding] = [one for one in all_findings(run, environment) if one.subject == subject]
    return finding


def test_accounts_that_are_not_yours_are_named_with_those_that_are(composed, site):
    environment = site(sacctmgr="printf 'mine|normal,debug|\\nours|normal|\\n'")
    assert found(composed(*SLURM).run, environment, "account").state == OK
    other = composed(*SLURM, "facility.account=theirs").run
    finding = found(other, environment, "account")
    assert (finding.state, finding.found) == (WRONG, "theirs is not yours")
    assert finding.hint == "facility.account=NAME, one of: mine, ours"


@pytest.mark.parametrize("account", ["EUHPC_D01_001", "euhpc_d01_001"])
def test_an_account_is_yours_in_upper_and_in_lower_case(account, composed, site):
    environment = site(sacctmgr="echo 'euhpc_d01_001|normal|'")
    words = (f"facility.account={account}", "+facility.submit.qos=normal")
    run = composed(*SLURM, *words).run
    finding = found(run, environment, "account")
    assert (finding.state, finding.found) == (OK, account)
    assert found(run, environment, "qos").state == OK


@pytest.mark.parametrize("facility", ["leonardo", "polaris"])
def test_an_account_that_is_missing_is_no_matter_of_time(facility, composed, site):
    run = composed(f"facility={facility}", "folders.runs=/tmp").run
    finding = found(run, site(), "account")
    assert (finding.state, finding.found) == (WRONG, f"{facility} needs an account")
    assert "facility.account=NAME" in finding.hint
    assert found(run, site(), "time limit").state == OK


def test_a_qos_that_the_account_has_not(composed, site):
    environment = site(sacctmgr="echo 'mine|normal,debug|'")
    for qos, state in (("debug", OK), ("big", WRONG)):
        run = composed(*SLURM, f"+facility.submit.qos={qos}").run
        assert found(run, environment, "qos").state == state


def test_what_any_association_of_an_account_allows_is_allowed(composed, site):
    answer = "printf 'mine|normal,debug|\\nmine|long|\\nours|big|\\n'"
    for qos, state in (("debug", OK), ("normal", OK), ("long", OK), ("big", WRONG)):
        run = composed(*SLURM, f"+facility.submit.qos={qos}").run
        finding = found(run, site(sacctmgr=answer), "qos")
        assert finding.state == state
    assert finding.hint == "facility.submit.qos=NAME, one of: debug, long, normal"


def test_an_association_of_another_partition_allows_nothing(composed, site):
    environment = site(sacctmgr="printf 'mine|normal|\\nmine|fast|gpu\\nmine|slow|cpu\\n'")
    for partition, allowed in (("gpu", {"normal", "fast"}), ("cpu", {"normal", "slow"})):
        for qos in ("normal", "fast", "slow"):
            words = (f"+facility.submit.partition={partition}", f"+facility.submit.qos={qos}")
            finding = found(composed(*SLURM, *words).run, environment, "qos")
            assert finding.state == (OK if qos in allowed else WRONG), (partition, qos)


def test_an_account_that_a_partition_does_not_know(composed, site):
    environment = site(sacctmgr="printf 'mine|fast|gpu\\nmine|slow|cpu\\n'")
    finding = found(composed(*SLURM, "+facility.submit.partition=big").run, environment, "account")
    assert (finding.state, finding.found) == (WRONG, "mine may not use the partition big")
    assert finding.hint == "facility.submit.partition=NAME, one of: cpu, gpu"
    assert found(composed(*SLURM).run, environment, "account").state == OK


def test_an_accounting_that_says_nothing_is_unknown(composed, site):
    finding = found(composed(*SLURM).run, site(sacctmgr="exit 1"), "account")
    assert finding.state == UNKNOWN


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        ("echo up infinite 4 nodes", OK, "gpu: up infinite 4 nodes"),
        ("exit 0", WRONG, "gpu is not known"),
        ("echo slurm_load_partitions: no controller >&2; exit 1", UNKNOWN, "no controller"),
        ("echo sinfo: error: Invalid partition gpu >&2; exit 1", WRONG, "gpu is not known"),
    ],
)
def test_the_partition(answer, state, words, composed, site):
    run = composed(*SLURM, "+facility.submit.partition=gpu").run
    finding = found(run, site(sinfo=answer), "partition")
    assert finding.state == state
    assert words in finding.found


def test_without_slurm_s_programs_the_partition_is_unknown(composed, site):
    run = composed(*SLURM, "+facility.submit.partition=gpu").run
    finding = found(run, site(), "partition")
    assert (finding.state, finding.found) == (UNKNOWN, "no sinfo here to ask about gpu")


def test_an_image_without_a_runtime(composed, site, tmp_path):
    run = composed(*SLURM, "image=cpu", f"folders.images={tmp_path / 'none'}").run
    assert found(run, site(), "container").state == WRONG
    assert found(run, site(apptainer="echo apptainer version 1.4.5"), "container").state == OK
    assert found(run, site(), "image").hint.startswith("build it: make image-cpu")


def test_a_runtime_that_the_job_does_not_call_is_none(composed, site, tmp_path):
    environment = site(singularity="echo singularity-ce version 4.1.5")
    words = (*SLURM, "image=cpu", f"folders.images={tmp_path / 'none'}")
    finding = found(composed(*words).run, environment, "container")
    assert (finding.state, finding.found) == (WRONG, "no apptainer here")
    assert finding.hint == "facility.container=singularity"
    own = composed(*words, "facility.container=singularity").run
    assert found(own, environment, "container").state == OK


def test_limits_are_asked_as_at_submission(composed, site):
    run = composed(*SLURM, "nodes=16", "facility.limits.max_nodes=8").run
    finding = found(run, site(), "nodes")
    assert finding.state == WRONG
    assert finding.hint.startswith("nodes=8")


def test_names_of_the_hub_want_a_cache_and_a_token(composed, site, tmp_path):
    run = composed(*SLURM, "model=from_path", "model.source=meta/llama").run
    environment = site()
    assert found(run, environment, "hub cache").state == UNKNOWN
    (tmp_path / "hub" / "hub" / "models--meta--llama").mkdir(parents=True)
    assert found(run, environment, "hub cache").state == OK
    assert found(run, environment, "hub token").state == UNKNOWN
    with_token = found(run, environment | {"HF_TOKEN": "hf_secret"}, "hub token")
    assert with_token.state == OK
    assert "hf_secret" not in str(with_token)


def test_its_job_asks_for_minutes_unless_more_are_typed(composed):
    line = ("facility=leonardo", "facility.account=a", "nodes=2")
    assert doctor.as_probe(composed(*line)).run.facility.walltime_minutes == 15
    typed = composed(*line, "facility.walltime_minutes=40")
    assert doctor.as_probe(typed).run.facility.walltime_minutes == 40


def test_a_cache_that_no_container_sees_is_told(composed, site, tmp_path, monkeypatch):
    words = (*SLURM, "image=cpu", "model=from_path", "model.source=meta/llama")
    environment = site(apptainer="echo apptainer version 1.4.5")

    def told(run) -> list[str]:
        asked = all_findings(run, environment)
        return [f.found for f in asked if f.subject == "hub cache" and "not bound" in f.found]

    [found] = told(composed(*words).run)
    assert str(tmp_path / "hub") in found
    (tmp_path / "hub").mkdir()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    assert told(composed(*words).run) == []


def test_a_facility_without_a_plugin_for_its_fabric_is_told(composed, site):
    run = composed("facility=frontier", "facility.account=a", "folders.runs=/tmp").run
    finding = found(run, site(), "network")
    assert finding.state == UNKNOWN
    assert "facility.network.plugin=FILE" in finding.hint
    with_plugin = composed("facility=polaris", "nodes=10", "training.global_batch_samples=40").run
    assert "not seen here" in found(with_plugin, site(), "network").found


def test_hardware_that_is_not_stated_is_told(composed, site):
    asked = all_findings(composed(*SLURM).run, site())
    told = [f for f in asked if f.subject == "node"]
    assert {f.hint for f in told} == {
        f"facility.node.{name}=VALUE"
        for name in ("device_memory_gib", "cores", "memory_gib", "compute_capability")
    }
    assert {f.state for f in told} == {UNKNOWN}


def test_a_container_that_comes_with_a_module_is_unknown_and_the_job_goes_on(composed, site):
    words = ("facility=polaris", "nodes=10", "training.global_batch_samples=40")
    run = composed(*words, "folders.runs=/tmp", "folders.prepared=/tmp").run
    assert found(run, site(), "container").state == UNKNOWN


def test_a_folder_that_cannot_be_made(composed, site):
    run = composed(*SLURM, "folders.prepared=/proc/atoll").run
    finding = found(run, site(), "prepared")
    assert finding.state == WRONG
    assert "folders.prepared=" in finding.hint


def test_an_images_folder_is_only_written_to_where_the_image_is_missing(composed, site, tmp_path):
    """Whoever types in a clone that is only to be read needs no folder of images."""
    run = composed("facility=laptop", "folders.images=/proc/atoll").run
    assert "images" not in [one.subject for one in all_findings(run, site())]
    run = composed(*SLURM, "image=cpu", "folders.images=/proc/atoll").run
    assert found(run, site(), "images").state == WRONG
    there = tmp_path / "image.sif"
    there.touch()
    run = composed(*SLURM, "image=cpu", "folders.images=/proc/atoll", f"image.file={there}").run
    assert "images" not in [one.subject for one in all_findings(run, site())]


def test_the_command_prints_the_findings_and_fails_where_one_is_wrong(tree, capsys, here):
    good = ["--json", "facility=laptop", f"folders.runs={here}"]
    assert doctor.main(good) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {one["state"] for one in findings} == {OK}
    assert doctor.main(["facility=laptop", "nodes=2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    wrong = next(i for i, text in enumerate(lines) if text.startswith("wrong"))
    assert "at most 1 nodes, not 2" in lines[wrong]
    assert lines[wrong + 1].strip().startswith("→ nodes=1")


def test_a_wrong_facility_queues_no_job(here, capsys):
    assert doctor.main(["--job", "facility=laptop", "nodes=2"]) == 1
    assert not list(Path(here).iterdir())


def test_the_probe_has_a_name_of_its_own(tree, composed):
    probe = doctor.as_probe(composed("facility=laptop", "name=precious"))
    assert probe.run.name == "doctor-laptop-1x2"
    assert "doctor" in COMMANDS
