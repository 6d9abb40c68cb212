"""Whole campaigns on this machine: killed and taken up again, with a facility that is missing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from atoll import run_dir
from atoll.__main__ import main
from atoll.campaign import coordinator, streamflow
from atoll.campaign.asked import training_words
from atoll.campaign.journal import Journal, round_name
from atoll.campaign.lasting_settings import keep_settings
from atoll.campaign.round import check_update
from atoll.campaign.signing import refuse_unsigned, sign
from atoll.campaign.store import CampaignStore, checked_campaign, load_store
from atoll.errors import UserError
from atoll.federation.tensors import TensorReader, stretches
from atoll.report import command as report
from atoll.report.campaign import rounds
from atoll.settings import load_run

TINY = [
    "facility=laptop",
    "ranks_per_node=1",
    "sharding=single",
    "data=python_stdlib",
    "data.sequence_tokens=32",
    "data.validation.fraction=0.3",
    "precision=fp32",
    "facility.node.peak_tflops=0.1",
    "training.microbatch_samples=4",
    "optimizer.warmup_steps=0",
    "checkpoint.every_steps=0",
    "evaluation.max_samples=8",
]
MODEL = [
    "model=llama_tiny",
    "tokenizer.vocabulary_tokens=300",
    "model.config.vocab_size=300",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=1",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=2",
]
ALLOWED = "default\nfacility.node.peak_tflops\n"
TEXT = {"reef": "json/*", "lagoon": "email/*"}


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Of a campaign whose facilities let it say how fast they are: else every run measures it."""
    run_dir.write_whole(folder / "site.allow", ALLOWED)
    sites = [
        {
            "name": name,
            "folder": str(folder / "sites" / name),
            "overrides": [f"data.files=[{text}]"],
        }
        for name, text in TEXT.items()
    ]
    return {
        "name": "c",
        "rounds": 2,
        "schedule_rounds": 2,
        "folder": str(folder / "campaigns"),
        "sites": sites,
        "start": [*TINY, *MODEL, "data.files=[json/*,email/*]"],
        "train": TINY,
        "steps": 3,
        "batch_samples": 4,
        "poll_seconds": 0.1,
        "last_loss": False,
        "rule": {"max_norm_ratio": 100},
    } | changes


def start(folder: Path, **changes: Any) -> subprocess.Popen[str]:
    """A coordinator in a process of its own, in a group with all that it starts here."""
    code = (
        "import json,sys; from pathlib import Path; from atoll.campaign.coordinator import run;"
        "from atoll.campaign.store import CampaignStore, checked_campaign;"
        "c=checked_campaign(json.loads(sys.argv[1]));"
        "sys.exit(run(CampaignStore(c,Path(c.folder)/c.name)))"
    )
    argv = [sys.executable, "-c", code, json.dumps(settings(folder, **changes))]
    return subprocess.Popen(
        argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def finished(folder: Path, **changes: Any) -> str:
    process = start(folder, **changes)
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, output
    return output


def manifest(folder: Path, number: int) -> dict[str, Any]:
    path = folder / "campaigns" / "c" / f"round-{number:03d}" / "global" / "manifest.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def keys(folder: Path, *names: str) -> Path:
    """A key pair for each name, and the file of allowed signers."""
    lines = []
    for name in names:
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
        subprocess.run(argv, check=True)
        kind, key, _ = (folder / f"{name}.pub").read_text().split()
        lines.append(f"{name} {kind} {key}\n")
    allowed = folder / "allowed_signers"
    allowed.write_text("".join(lines))
    return allowed


def signed(folder: Path) -> dict[str, Any]:
    """Settings by which each facility signs with the key of its name, as it lets them."""
    for name in TEXT:
        own = folder / "sites" / name / "site.allow"
        run_dir.write_whole(own, f"{ALLOWED}signing_key={folder / name}\n")
    sites = [
        site | {"signing_key": str(folder / site["name"])} for site in settings(folder)["sites"]
    ]
    return {"sites": sites, "allowed_signers": str(folder / "allowed_signers")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted campaign, whose facilities sign."""
    folder = tmp_path_factory.mktemp("whole") / "größe, a b"
    folder.mkdir()
    keys(folder, *TEXT)
    finished(folder, **signed(folder), last_loss=True)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """Where a campaign has its first model, and the facilities their tokens: the rest is to do."""
    first = Path("campaigns") / "c" / "round-000"
    shutil.copytree(whole / first, tmp_path / first)
    for name in TEXT:
        for part in ("prepared", "tokenizer"):
            shutil.copytree(whole / "sites" / name / part, tmp_path / "sites" / name / part)
    return tmp_path


@pytest.mark.login_node
def test_a_campaign_ends_with_a_model_that_transformers_loads(whole: Path) -> None:
    from transformers import AutoModelForCausalLM

    export = whole / "campaigns" / "c" / "round-002" / "global" / "export"
    model = AutoModelForCausalLM.from_pretrained(export)
    assert model.config.vocab_size == 300
    assert set(manifest(whole, 2)["weights"]) == set(TEXT)
    journals = [Journal(whole / "campaigns" / "c" / f"round-00{n}") for n in (1, 2)]
    received = [one["bytes"] for journal in journals for one in journal.records("received")]
    whole_model = journals[0].records("sent")[0]["bytes"]
    assert len(received) == 4 and max(received) < whole_model / 2
    card = (export / "README.md").read_text()
    for row in ("Task | causal_lm", "Optimizer | adamw", "Samples of a step | 4", "Seed | 0"):
        assert f"| {row} |" in card, card
    assert "Began" in card and "Training:" not in card, "no field of the training is a gap"


@pytest.mark.login_node
@pytest.mark.full
def test_the_model_is_verified_down_to_the_runs_of_its_facilities(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = whole / "campaigns" / "c" / "round-002" / "global" / "export"
    assert main(["verify", str(export)]) == 0
    output = capsys.readouterr().out
    for number in (1, 2):
        assert f"round {number}: aggregated again, bit for bit (2)" in output
        assert output.count(f"round {number}: the update of ") == 2
    assert output.count("(signed, as allowed)") == 4 == output.count(" says of its run: image ")
    came = {path.read_text() for path in export.parents[2].glob("round-*/*/update/provenance.json")}
    runs = list(whole.glob("sites/*/runs/c-round-*"))
    assert came == {(run / "export" / "provenance.json").read_text() for run in runs}
    for run in runs:
        assert main(["verify", str(run / "export")]) == 0


@pytest.mark.login_node
def test_the_report_tells_rounds_bytes_losses_and_weights(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(whole / "campaigns" / "c")]) == 0
    name, titles, *rows = capsys.readouterr().out.splitlines()
    assert name == "Facilities" and "queue s" in titles
    assert [row.split()[:2] for row in rows[:4]] == [
        [str(n), site] for n in (1, 2) for site in TEXT
    ]
    first, last = rounds(load_store(whole / "campaigns" / "c"))
    for part in first.parts:
        assert part.sent_bytes > 2 * part.received_bytes > 0 and part.why == ""
        assert part.seconds("train") is not None and part.losses[-1] < part.losses[0]
        assert part.seconds("queue") is None  # this machine has none
    assert sum(part.weight or 0.0 for part in first.parts) == pytest.approx(1.0)
    assert first.ended is not None and first.global_loss is not None
    assert last.global_loss is not None and last.global_loss < first.global_loss
    results = [
        json.loads(file.read_text()) for file in whole.glob("sites/*/runs/*loss*/result.json")
    ]
    mean = sum(result["loss"] for result in results) / len(results)
    assert len(results) == 2 and last.global_loss == pytest.approx(mean)
    assert not list(whole.glob("sites/*/rounds/round-003")), "nothing was trained for it"


@pytest.mark.login_node
def test_a_campaign_ends_early_where_its_target_is_reached(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = load_store(whole / "campaigns" / "c")
    further = store.campaign.model_copy(update={"rounds": 9, "target_loss": 100.0})
    before = (store.folder / "campaign.json").read_text()
    assert coordinator.run(CampaignStore(further, store.folder)) == 0
    (store.folder / "campaign.json").write_text(before)
    output = capsys.readouterr().out
    assert "the target loss 100.0 is reached" in output
    assert f"the model: {store.export(2)}" in output, "no round before the last that there is"
    assert not store.round(3).exists()


@pytest.mark.login_node
@pytest.mark.matrix(always=lambda moment: moment == "received")
@pytest.mark.parametrize("moment", ["sent", "received"])
def test_a_killed_coordinator_goes_on_where_it_was(whole: Path, folder: Path, moment: str) -> None:
    """SIGKILL to it and all it started here; the second start ends with the same bits."""
    process = start(folder, rounds=1)
    journal = Journal(folder / "campaigns" / "c" / "round-001")
    for _ in range(2000):
        if journal.records(moment):
            break
        assert process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    finished(folder, rounds=1)
    assert manifest(folder, 1)["digest"] == manifest(whole, 1)["digest"]
    assert len(list(folder.glob("sites/*/runs/*"))) == 2, "a run for each facility, not more"


@pytest.mark.login_node
@pytest.mark.matrix
def test_rounds_of_one_facility_are_one_run(folder: Path) -> None:
    """Moments, counts, warm-up and schedule go on; what differs is the rounding of differences."""
    words = [*TINY, "optimizer.warmup_steps=2", "optimizer.learning_rate=1e-2"]
    exact = {"train": words, "codec": "fp32", "global_codec": "fp32"}
    finished(folder, sites=settings(folder)["sites"][:1], **exact)
    store = load_store(folder / "campaigns" / "c")
    whole_run = training_words(
        store.campaign.model_copy(update={"steps": 6}), 1, store.campaign.sites[0], 6, 0
    )
    first = store.model(0) / "export"
    own = [f"model.source={first}", f"tokenizer.path={folder}/sites/reef/tokenizer"]
    own += [
        "training.schedule_steps=6",
        "export.dtype=float32",
        "generation.prompt=null",
        "name=whole",
    ]
    own += [f"folders.prepared={folder}/sites/reef/prepared", f"folders.runs={folder}/runs"]
    argv = [sys.executable, "-m", "atoll", "submit", *whole_run, *own]
    subprocess.run(argv, check=True, capture_output=True)
    with (
        TensorReader(folder / "runs" / "whole" / "export") as one_run,
        TensorReader(store.model(2) / "master") as in_rounds,
        TensorReader(first) as before,
    ):
        for stretch in stretches(in_rounds.layout):
            values_N, start_N = in_rounds.values(stretch), before.values(stretch)
            torch.testing.assert_close(values_N, one_run.values(stretch), rtol=0, atol=2e-7)
            assert not torch.allclose(values_N, start_N, rtol=0, atol=1e-3)


@pytest.mark.full
@pytest.mark.login_node
def test_each_facility_takes_the_steps_that_its_queue_leaves_it(folder: Path) -> None:
    slow = ["data.files=[email/*]", "data.sequence_tokens=128"]  # four times the tokens of a step
    sites = settings(folder)["sites"]
    sites[1] = sites[1] | {"overrides": slow}
    finished(folder, steps=24, steps_by="queue", rounds=3, schedule_rounds=3, sites=sites)
    store = load_store(folder / "campaigns" / "c")
    before = dict.fromkeys(TEXT, 0)
    for number in (1, 2, 3):
        chosen = store.journal(number).last("steps")["steps"]
        assert sum(chosen.values()) == 2 * 24
        for name, steps in chosen.items():
            update = store.update(number, store.site(name)) / "manifest.json"
            assert json.loads(update.read_text())["steps"] == steps
            run = load_run(
                store.folder.parents[1]
                / "sites"
                / name
                / "runs"
                / f"c-{round_name(number)}-{name}"
                / "run.yaml"
            )
            assert run.training.consumed_samples == before[name] * 4
            before[name] += steps
    assert store.journal(1).last("steps")["steps"] == dict.fromkeys(TEXT, 24)
    assert chosen != dict.fromkeys(TEXT, 24)


@pytest.mark.login_node
@pytest.mark.matrix
def test_a_facility_that_never_answers_is_left_out(folder: Path) -> None:
    sites = settings(folder)["sites"]
    sites[1]["command"] = ["false"]
    output = finished(folder, rounds=1, sites=sites, attempts=2)
    assert "without lagoon" in output and list(manifest(folder, 1)["weights"]) == ["reef"]
    [parts] = [one.parts for one in rounds(load_store(folder / "campaigns" / "c"))]
    assert "left out: lagoon: no reason" in next(
        one.why for one in parts if one.facility == "lagoon"
    )


@pytest.mark.login_node
@pytest.mark.matrix
@pytest.mark.parametrize("late", [1, pytest.param(3, marks=pytest.mark.full)])
def test_late_work_has_its_part_in_a_later_round(folder: Path, late: int) -> None:
    """One facility is at work until so many rounds are over; that for the first counts then."""
    sites = settings(folder)["sites"]
    slow, last = folder / "slow", late + 1
    slow.write_text(
        f"#!/bin/sh\n[ -e {folder}/campaigns/c/{round_name(last)}/journal.jsonl ] || "
        'exec echo \'{"state": "running"}\'\n'
        f'exec {sys.executable} -m atoll "$@"\n'
    )
    slow.chmod(0o755)
    sites[1]["command"] = [str(slow)]
    rule = {"max_norm_ratio": 100, "max_staleness": late, "weigh": "tokens"}
    output = finished(
        folder, rounds=last, sites=sites, rule=rule, deadline_minutes=0.02, attempts=1000
    )
    assert output.count("without lagoon: no update after 0.02 minutes") == late
    for number in range(1, last):
        assert list(manifest(folder, number)["weights"]) == ["reef"]
    assert set(manifest(folder, last)["weights"]) == set(TEXT)
    store = load_store(folder / "campaigns" / "c")
    update = store.update(last, store.site("lagoon")) / "manifest.json"
    assert json.loads(update.read_text())["round"] == 1
    share = (1 + late) ** -0.5
    shares = manifest(folder, last)["weights"]
    assert shares["lagoon"] == pytest.approx(share / (1 + share))


@pytest.mark.login_node
@pytest.mark.matrix
def test_below_the_quorum_the_model_stays_and_nobody_trains_twice(folder: Path) -> None:
    sites = settings(folder)["sites"]
    broken = [sites[0], sites[1] | {"command": ["false"]}]
    rule = {"quorum": 2, "max_norm_ratio": 100}
    process = start(folder, rounds=1, sites=broken, attempts=1, rule=rule)
    output, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert "1 of 2 facilities sent an update, the quorum is 2" in output
    update = folder / "campaigns" / "c" / "round-001" / "reef" / "update" / "manifest.json"
    nonce = json.loads(update.read_text())["nonce"]
    finished(folder, rounds=1, rule=rule)
    assert json.loads(update.read_text())["nonce"] == nonce


@pytest.mark.login_node
@pytest.mark.matrix
def test_a_run_that_failed_goes_on_in_another_way(folder: Path) -> None:
    """What is trained stays; how it is carried out may change."""
    sites = settings(folder)["sites"]
    own = folder / "sites" / "lagoon" / "site.allow"
    run_dir.write_whole(own, f"{ALLOWED}facility.environment.*\n")
    words = [*sites[1]["overrides"], "+facility.environment.PYTHONHOME=/nowhere"]
    broken = [sites[0], sites[1] | {"overrides": words}]
    rule = {"quorum": 2, "max_norm_ratio": 100}
    process = start(folder, rounds=1, sites=broken, attempts=1, rule=rule)
    output, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert "1 of 2 facilities sent an update, the quorum is 2" in output
    [run] = (folder / "sites" / "lagoon" / "runs").iterdir()
    (run / "kept").touch()
    finished(folder, rounds=1, attempts=1, rule=rule)
    assert set(manifest(folder, 1)["weights"]) == set(TEXT) and (run / "kept").is_file()


@pytest.mark.login_node
@pytest.mark.matrix
def test_a_facility_trains_on_the_tokens_of_its_bundle(whole: Path, tmp_path: Path) -> None:
    """The model that the bundle was made with is not there, nor is any text."""
    source, bundle = tmp_path / "source", tmp_path / "bundle"
    shutil.copytree(whole / "campaigns" / "c" / "round-000" / "global" / "export", source)
    site = settings(tmp_path)["sites"][0]
    words = [*TINY, *site["overrides"], "model=from_path", f"model.source={source}"]
    argv = [sys.executable, "-m", "atoll", "prepare", "--into", str(bundle), *words]
    subprocess.run(argv, check=True, capture_output=True)
    source.rename(tmp_path / "away")
    start = [*TINY, "model=from_path", f"model.source={tmp_path / 'away'}"]
    sites = [site | {"overrides": [*site["overrides"], f"folders.bundle={bundle}"]}]
    own = tmp_path / "sites" / "reef" / "site.allow"  # the facility's word: it is outside
    run_dir.write_whole(own, f"{ALLOWED}folders.bundle\n")
    finished(tmp_path, rounds=1, start=start, sites=sites)
    assert list(manifest(tmp_path, 1)["weights"]) == ["reef"]
    assert not list(tmp_path.glob("sites/reef/prepared/*"))


@pytest.mark.login_node
@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"round": 9}, "says round=9, this round is 1"),
        ({"campaign": "another"}, "says campaign=another"),
        ({"facility": "lagoon"}, "says facility=lagoon"),
        ({"base": "0" * 64}, "says base=0000"),
        ({"nonce": "a" * 32}, "was sent before"),
    ],
)
def test_foreign_and_replayed_updates_are_refused(
    whole: Path, tmp_path: Path, change: dict[str, Any], found: str
) -> None:
    campaign = checked_campaign(settings(whole))
    store = CampaignStore(campaign, whole / "campaigns" / "c")
    content = json.loads((store.update(1, campaign.sites[0]) / "manifest.json").read_text())
    seen = store.update(2, campaign.sites[0]) / "manifest.json"
    if "nonce" in change:
        change = {"nonce": json.loads(seen.read_text())["nonce"]}
    run_dir.write_whole(tmp_path / "manifest.json", json.dumps(content | change))
    with pytest.raises(UserError, match=found):
        check_update(store, 1, campaign.sites[0], tmp_path)


@pytest.mark.login_node
def test_signatures_are_of_one_facility_and_one_text(tmp_path: Path) -> None:
    allowed = keys(tmp_path, "reef", "lagoon")
    file = tmp_path / "manifest.json"
    file.write_text('{"round": 1}')
    with pytest.raises(UserError, match="is not signed"):
        refuse_unsigned(file, allowed, "reef")
    sign(file, tmp_path / "reef")
    refuse_unsigned(file, allowed, "reef")
    with pytest.raises(UserError, match="not signed by lagoon"):
        refuse_unsigned(file, allowed, "lagoon")
    file.write_text('{"round": 2}')
    with pytest.raises(UserError, match="not signed by reef"):
        refuse_unsigned(file, allowed, "reef")


@pytest.mark.login_node
def test_an_update_that_another_facility_signed_is_refused(whole: Path, tmp_path: Path) -> None:
    campaign = checked_campaign(settings(whole, **signed(whole)))
    store = CampaignStore(campaign, whole / "campaigns" / "c")
    reef, lagoon = campaign.sites
    for name in ("manifest.json", "manifest.json.sig"):
        shutil.copy(store.update(1, reef) / name, tmp_path / name)
    check_update(store, 1, reef, tmp_path)
    sign(tmp_path / "manifest.json", whole / "lagoon")
    with pytest.raises(UserError, match="not signed by reef"):
        check_update(store, 1, reef, tmp_path)
    (tmp_path / "manifest.json.sig").unlink()
    with pytest.raises(UserError, match="is not signed"):
        check_update(store, 1, lagoon, tmp_path)


@pytest.mark.login_node
def test_settings_stay_for_a_campaigns_life(whole: Path) -> None:
    store = CampaignStore(
        checked_campaign(settings(whole, steps=4, **signed(whole))), whole / "campaigns" / "c"
    )
    with pytest.raises(UserError, match="was begun with steps=3, now it is 4"):
        keep_settings(store)


def test_mistakes_in_settings_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="campaign setting codec"):
        coordinator.main(["--dry-run", "federation=demo", "codec=int7"])
    assert coordinator.main(["--dry-run", "federation=demo", "rounds=3"]) == 0
    assert "rounds: 3" in capsys.readouterr().out


SSH_CONFIG = """
Host leonardo
    HostName login.leonardo.example
    Port 2222
    User researcher
    IdentityFile {folder}/key
    UserKnownHostsFile {folder}/known
    ProxyJump gate
Host gate
    HostName gate.example
    User visitor
"""


@pytest.mark.login_node
def test_the_workflow_names_hosts_as_ssh_knows_them(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(SSH_CONFIG.format(folder=tmp_path))
    (tmp_path / "known").write_text("login.leonardo.example ssh-ed25519 AAAA\n")
    (tmp_path / "key").touch()
    values = settings(tmp_path, engine="streamflow", ssh_options=["-F", str(tmp_path / "config")])
    values["sites"][0] |= {"host": "leonardo", "folder": "campaign"}
    store = CampaignStore(checked_campaign(values), tmp_path / "campaigns" / "c")
    homes: dict[str, Path | None] = {"reef": tmp_path / "home"}
    streamflow.write(store, 1, homes, everyone=False)
    folder = store.folder / "streamflow"
    files = {path.name: yaml.safe_load(path.read_text()) for path in folder.glob("*.*l")}
    [node] = files["streamflow.yml"]["deployments"]["reef"]["config"]["nodes"]
    assert node["hostname"] == "login.leonardo.example:2222" and node["username"] == "researcher"
    assert node["sshKey"] == str(tmp_path / "key") and node["checkHostKey"] is True
    assert node["tunnel"]["hostname"] == "gate.example:22"
    assert node["tunnel"]["username"] == "visitor"
    assert "login.leonardo.example" in (folder / "home" / ".ssh" / "known_hosts").read_text()
    assert "average" not in files["round.cwl"]["steps"], "the other facility is still awaited"
    assert files["train_reef.cwl"]["baseCommand"][-2:] == ["site", "campaign"]
    streamflow.write(store, 1, homes, everyone=True)
    steps = yaml.safe_load((folder / "round.cwl").read_text())["steps"]
    assert list(steps) == ["send_reef", "train_reef", "take_reef", "average"]
