"""A small campaign whose facilities and coordinator sign, and changes of what proves it."""

import hashlib
import io
import json
import subprocess
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import made_up

from atoll.__main__ import main
from atoll.campaign import average as averaging
from atoll.campaign.lasting_settings import keep_settings
from atoll.campaign.prove import prove_campaign
from atoll.campaign.signing import OF_MODELS, sign
from atoll.campaign.store import CampaignStore, checked_campaign
from atoll.proof import of_run, statement
from atoll.settings import exchange

SITES = ("north", "south")
VOCABULARY = '{"a": 1}'
VOCABULARY_SHA256 = hashlib.sha256(VOCABULARY.encode()).hexdigest()
SAID = {"image": "atoll.sif", "lock": "ab12", "sbom": "cd34"}
A_JOB = exchange.JobRecord(
    job="7",
    cluster="cl",
    partition="gpu",
    state="COMPLETED",
    exit_code="0:0",
    nodes=2,
    elapsed_seconds=1800,
    submitted=1000,
    started=1010,
    ended=None,
    energy_joules=3_600_000,
).model_dump()


def in_this_process(argv: list[str], what: str) -> str:
    """A command without a process of its own, which would load torch anew."""
    with redirect_stdout(io.StringIO()) as output:
        assert main(argv[argv.index("aggregate") :]) == 0
    return output.getvalue()


def run_statement(folder: Path) -> Path:
    """Of a run in an image, as its export has it."""
    folder.mkdir()
    materials: list[statement.Resource] = [
        {"name": "image", "annotations": SAID, "digest": {"sha256": "ef56"}},
        {"name": "code", **of_run._of_code("0123abc+")},
        {"name": "libraries", "annotations": {"versions": "torch 2.13.0"}},
        statement.described("prepared/tokenizer/tokenizer.json", 7, VOCABULARY_SHA256),
    ]
    statement.write_statement(folder, statement.Made("run", "c-1", materials, []), [])
    return folder / statement.NAME


def made_campaign(folder: Path, **changes: Any) -> CampaignStore:
    """Two rounds of two facilities that sign; the coordinator signs too."""
    signers = ""
    for name in (*SITES, "coordinator"):
        key = folder / name
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        signers += f"{name} {Path(f'{key}.pub').read_text()}"
    (folder / "signers").write_text(signers)
    sites = [{"name": name, "folder": str(folder / "sites" / name)} for name in SITES]
    values = {"name": "c", "rounds": 2, "sites": sites, "start": [], "codec": "int8"}
    values |= {"allowed_signers": str(folder / "signers"), "rule": {"update": "nesterov"}}
    values |= {"signing_key": str(folder / "coordinator")}
    store = CampaignStore(checked_campaign(values | changes), folder / "c")
    keep_settings(store)
    made_up.first(folder)
    (folder / "c" / "round-000").mkdir(parents=True)
    (folder / "global-0").rename(store.model(0))
    said = {"north": run_statement(folder / "run"), "south": None}
    for number in (1, 2):
        scratch = folder / f"scratch-{number}"
        for place, name in enumerate(SITES):
            delta = made_up.weights(10 * number + place, 1e-3)
            base, about = store.model(number - 1), {"round": number}
            given = {"provenance": said[name], **about}
            made = made_up.update(scratch, base, name, delta, "int8", **given).folder
            sign(made / "manifest.json", folder / name)
            into = store.update(number, store.site(name))
            into.parent.mkdir(parents=True)
            made.rename(into)
        store.journal(number).append("began")
        store.keep_jobs(number, store.site("north"), [A_JOB])
        assert averaging.average(store, number)
    prove_campaign(store, 2)
    return store


def verify(store: CampaignStore, *words: str) -> int:
    return main(["verify", str(store.model(2) / "export"), *words])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def restated(store: CampaignStore, change: Callable[[dict[str, Any]], None]) -> None:
    """The statement with another content, signed by the coordinator."""
    path = store.model(2) / "export" / statement.NAME
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    sign(path, Path(str(store.campaign.signing_key)), OF_MODELS)


def materials(content: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = content["predicate"]["buildDefinition"]["resolvedDependencies"]
    return found
