"""One round of a campaign, step by step: send, ask, take, average.

`atoll round FOLDER NUMBER send|take|average [FACILITY]` does one step of the campaign in FOLDER,
for the engines that start each step by itself. A step that is done already does nothing.
"""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.journal import alone, round_name
from atoll.campaign.signing import refuse_unsigned
from atoll.campaign.store import CampaignStore, load_store
from atoll.campaign.transfer import Unreachable, ask, atoll_here, fetch, run_verb, send
from atoll.commands import VerbParser
from atoll.errors import UserError
from atoll.settings.federation import Campaign, Site

# what is sent of a global model -> what of it is not: a facility's export has the master's weights
FIRST = {"master": (), "export": ("*.safetensors",)}
LATER: dict[str, tuple[str, ...]] = {"delta": ()}


def main(argv: list[str]) -> int:
    """One step of one round of a campaign."""
    parser = VerbParser("round", main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("number", type=int)
    parser.add_argument("step", choices=["send", "take", "average"])
    parser.add_argument("facility", nargs="?")
    parser.add_argument("--answer", type=Path, help="JSON that `atoll site` printed there")
    arguments = parser.read(argv)
    store, number = load_store(arguments.folder), arguments.number
    if arguments.step == "average":
        if len(updates(store, number)) >= store.campaign.rule.quorum:
            average(store, number)
        return 0  # below the quorum it is the coordinator that says so, and holds the round
    site = store.site(arguments.facility)
    if arguments.step == "send":
        bring_models(store, number, site, "--receive")
    else:
        use_answer(store, number, site, json.loads(arguments.answer.read_text()))
    return 0


def go_on(store: CampaignStore, number: int, site: Site) -> None:
    """One question to one facility, and what its answer asks for."""
    try:
        use_answer(store, number, site, bring_models(store, number, site))
    except Unreachable as error:
        store.record_answer(number, site, {"state": "unreachable", "why": error.found})
    except UserError as error:
        store.count_failure(number, site, error.found)


def bring_models(store: CampaignStore, number: int, site: Site, *flags: str) -> dict[str, Any]:
    """Ask, and send the model that the facility is to begin with if it needs it; its answer."""
    newest = None
    while (answer := _asked(store, number, site, *flags))["state"] == "needs":
        if answer["have"] == newest:
            raise UserError(
                f"{site.name} has no global model newer than round {newest}, though it was sent",
                f"look into {site.folder}/incoming and {site.folder}/bases there",
            )
        newest = answer["have"]
        _send_models(store, number, site, newest)
    return answer


def use_answer(store: CampaignStore, number: int, site: Site, answer: dict[str, Any]) -> None:
    """Take what is ready; go on without a facility that has failed; wait in all other states."""
    store.record_answer(number, site, answer)
    state, why = answer["state"], answer.get("why", "")
    if state == "ready":
        _take(store, number, site)
    elif state == "refused":
        store.count_failure(number, site, why)
    elif state == "failed" and store.asked_round(number, site) < number:
        store.journal(number).append("afresh", facility=site.name, why=why)
    elif state == "failed":
        store.leave_out(number, site, why)


def _take(store: CampaignStore, number: int, site: Site) -> None:
    """Fetch an update and check it; what is wrong in it is fetched again, then left out."""
    update, asked = store.update(number, site), store.asked_round(number, site)
    with alone(update.parent):
        if store.state(number, site).settled:
            return
        partial, began = update.with_name(".update.partial"), time.time()
        fetch(store.campaign, site, f"{site.folder}/rounds/{round_name(asked)}/update", partial)
        size = sum(path.stat().st_size for path in _files(partial))
        try:
            check_update(store, number, site, partial)
        except UserError as error:
            shutil.rmtree(partial)
            store.count_failure(number, site, error.found)
            return
        partial.rename(update)
        run_dir.sync_folder(update.parent)
    seconds = time.time() - began
    store.journal(number).append("received", facility=site.name, bytes=size, seconds=seconds)


def _asked(store: CampaignStore, number: int, site: Site, *flags: str) -> dict[str, Any]:
    asked = store.asked_round(number, site)
    words = ["site", site.folder, str(asked), "--request", json.dumps(request(store, asked, site))]
    answer: dict[str, Any] = json.loads(ask(store.campaign, site, [*words, *flags]))
    return answer


def request(store: CampaignStore, number: int, site: Site) -> dict[str, Any]:
    """What a facility is asked in a round: the same words every time."""
    campaign = store.campaign
    return {
        "campaign": campaign.name,
        "round": number,
        "facility": site.name,
        "base": store.model_manifest(number - 1)["digest"],
        "codec": campaign.codec,
        "attempts": campaign.attempts,
        "signing_key": site.signing_key,
        "overrides": training_words(campaign, number, site),
    }


def training_words(campaign: Campaign, number: int, site: Site) -> list[str]:
    """The settings of a facility's run of a round, but for the folders there."""
    return [
        *campaign.train,
        *site.overrides,
        "model=from_path",
        f"training.steps={campaign.steps}",
        "training.epochs=null",
        f"training.global_batch_samples={campaign.batch_samples}",
        "training.device_batch_samples=null",
        f"training.consumed_samples={(number - 1) * campaign.steps * campaign.batch_samples}",
    ]


def _send_models(store: CampaignStore, number: int, site: Site, have: int) -> None:
    """The first model whole, then deltas; the manifest last, which says it is whole."""
    for before in range(have + 1, store.asked_round(number, site)):
        model, target = store.model(before), f"{site.folder}/incoming/{round_name(before)}"
        began, size = time.time(), 0
        for part, left_out in (FIRST if before == 0 else LATER).items():
            send(store.campaign, site, model / part, f"{target}/{part}", left_out)
            size += sum(path.stat().st_size for path in _files(model / part, left_out))
        staged = model.with_name(f".manifest-for-{site.name}")
        staged.mkdir(exist_ok=True)
        shutil.copy(model / "manifest.json", staged / "manifest.json")
        send(store.campaign, site, staged, target)
        seconds = time.time() - began
        store.journal(number).append("sent", facility=site.name, bytes=size, seconds=seconds)


def _files(folder: Path, left_out: Sequence[str] = ()) -> list[Path]:
    files = [path for path in folder.iterdir() if path.is_file()]
    return [path for path in files if not any(map(path.match, left_out))]


def check_update(store: CampaignStore, number: int, site: Site, folder: Path) -> None:
    """Signed by the facility, made for what this round asked of it, and never seen before.

    Its files are checked where they are read, by `atoll aggregate`.
    """
    path, names = folder / "manifest.json", ("campaign", "round", "facility", "base")
    if store.campaign.allowed_signers is not None:
        refuse_unsigned(path, Path(store.campaign.allowed_signers).expanduser(), site.name)
    try:
        content = json.loads(path.read_text())
        manifest = {name: content[name] for name in (*names, "nonce")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no manifest: {error}", "send the update again") from None
    asked = request(store, store.asked_round(number, site), site)
    for name in names:
        if manifest[name] != asked[name]:
            raise UserError(
                f"the update of {site.name} says {name}={manifest[name]}, this round is "
                f"{asked[name]}",
                "train the model of this round",
            )
    if manifest["nonce"] in store.nonces(number, site):
        raise UserError(f"the update of {site.name} was sent before", "train again")


def average(store: CampaignStore, number: int) -> None:
    """Give the updates to `atoll aggregate`, which writes the next model whole or not at all."""
    campaign, rule = store.campaign, store.campaign.rule
    with alone(store.round(number)):
        if store.has_model(number):
            return
        folders = updates(store, number)
        _refuse_below_quorum(store, number, len(folders))
        began = time.time()
        words = ["aggregate", *map(str, folders)]
        words += ["--base", str(store.model(number - 1))]
        words += ["--out", str(store.model(number)), "--codec", campaign.global_codec]
        words += ["--rule", rule.model_dump_json(), "--about", json.dumps({"round": number})]
        for before in range(number - 2, max(-1, number - 2 - rule.max_staleness), -1):
            words += ["--older", store.model_manifest(before)["digest"]]
        outcome = json.loads(run_verb([*atoll_here(), *words], f"the model of round {number}"))
    store.journal(number).append("averaged", seconds=time.time() - began, **outcome)


def updates(store: CampaignStore, number: int) -> list[Path]:
    """Those that were taken, in the order of the campaign's facilities."""
    folders = [store.update(number, site) for site in store.campaign.sites]
    return [folder for folder in folders if folder.is_dir()]


def _refuse_below_quorum(store: CampaignStore, number: int, count: int) -> None:
    sites, quorum = store.campaign.sites, store.campaign.rule.quorum
    if count < quorum:
        why = "; ".join(sorted(store.left_out(number).values()))
        store.journal(number).append("reopened")
        raise UserError(
            f"round {number}: {count} of {len(sites)} facilities sent an update, the quorum "
            f"is {quorum} ({why})",
            "fix what --status names and type the same line again: nobody trains twice",
        )
