"""One round of a campaign, step by step: send, ask, take, average.

`atoll round FOLDER NUMBER send|take|average [FACILITY]` does one step of the campaign in FOLDER,
for the engines that start each step by itself. A step that is done already does nothing.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.asked import check_update, request
from atoll.campaign.average import average
from atoll.campaign.calls import QUIET_SECONDS, Over, never
from atoll.campaign.journal import Journal, alone, round_name
from atoll.campaign.store import CampaignStore, load_store
from atoll.campaign.transfer import PARTS, NoRoom, Unreachable, ask, fetch, refuse_full_disk, send
from atoll.commands import CommandParser
from atoll.errors import UserError, printable
from atoll.settings.exchange import (
    BESIDE_WEIGHTS,
    MAX_MANIFEST_BYTES,
    SHOWN,
    WEIGHTS,
    UpdateManifest,
    read_answer,
)
from atoll.settings.federation import Site

# what is sent of a global model -> its kinds: a facility's export has the master's weights
WHOLE = {"master": (WEIGHTS,), "export": BESIDE_WEIGHTS}
DELTA: dict[str, tuple[str, ...]] = {"delta": (WEIGHTS,)}
MANIFEST = ("manifest.json", "manifest.json.sig")
CALL_SECONDS = 3600.0  # of a question over ssh: a facility that hangs is asked again
SILENT_SECONDS = 600.0  # without a sign of life nobody is waited for, however much time there is


def main(argv: list[str]) -> int:
    """One step of one round of a campaign."""
    parser = CommandParser("round", main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("number", type=int)
    parser.add_argument("step", choices=["send", "take", "average"])
    parser.add_argument("facility", nargs="?")
    arguments = parser.read(argv)
    store, number = load_store(arguments.folder), arguments.number
    if arguments.step == "average":
        enough = len(store.updates(number)) >= store.campaign.rule.quorum
        if enough and not store.unsettled(number):
            average(store, number, decides=False)
        return 0  # else it is the coordinator that asks again, or says why the round is held
    site = store.site(arguments.facility)
    if arguments.step == "send":
        store.note_asked(number, site)
        at_the_seam(store, number, site, lambda: bring_models(store, number, site, "--receive"))
    else:  # what came of its job is asked here: a workflow system believes whatever it is sent
        go_on(store, number, site)
    return 0


def go_on(
    store: CampaignStore,
    number: int,
    site: Site,
    stopped: Over = never,
    end: float | None = None,
) -> None:
    """One question to one facility, and what its answer asks for.

    stopped: nobody waits for any answer any more. end: of the grace, where that has begun already.
    """
    end = end_of(store, number) if end is None else end
    over = time_of(store, number, end, stopped)

    def step() -> None:
        store.note_asked(number, site)
        answer = bring_models(store, number, site, over=over)
        use_answer(store, number, site, answer, end, stopped)

    at_the_seam(store, number, site, step)


def at_the_seam(store: CampaignStore, number: int, site: Site, step: Callable[[], object]) -> None:
    """Whatever comes of one facility's words and files is that facility's failure, and counted.

    Raises `NoRoom` where it is this machine's disk that is full.
    """
    try:
        step()
    except NoRoom:
        raise
    except Unreachable as error:
        begun = {"begun": True} if error.has_begun else {}
        begun |= {"sent_to": True} if error.is_sent_to else {}
        answer = {"state": "unreachable", "why": error.in_a_line, **begun}
        store.record_answer(number, site, answer)
    except UserError as error:
        store.count_failure(number, site, error.in_a_line)
    except Exception as error:
        if isinstance(error, OSError):
            refuse_full_disk(store.folder)
        why = f"{site.name}: unexpected {type(error).__name__}: {error}"
        store.count_failure(number, site, printable(why, SHOWN))


def end_of(store: CampaignStore, number: int) -> float:
    """When a question that begins now, and what comes of it, is over in any case."""
    return max(store.deadline(number), time.time()) + 60 * store.campaign.grace_minutes


def time_of(store: CampaignStore, number: int, end: float, stopped: Over = never) -> Over:
    """Whether a call that begins now is waited for no longer.

    After the deadline, where the others are a quorum, for as long as it gives a sign of life, and
    where they are too few in any case; never longer than to the `end`.
    """
    deadline = store.deadline(number)

    def over(quiet_seconds: float) -> bool:
        now = time.time()
        if stopped(quiet_seconds) or now > end:
            return True
        enough = len(store.updates(number)) >= store.campaign.rule.quorum
        return now > deadline and quiet_seconds > QUIET_SECONDS and enough

    return over


def bring_models(
    store: CampaignStore, number: int, site: Site, *flags: str, over: Over = never
) -> dict[str, Any]:
    """Ask, and send the model that the facility is to begin with if it needs it; its answer."""
    asked = store.asked_round(number, site)
    words = request(store, asked, site)
    return bring(store, asked, site, words, store.journal(number), *flags, over=over)


def bring(
    store: CampaignStore,
    asked: int,
    site: Site,
    words: dict[str, Any],
    journal: Journal,
    *flags: str,
    over: Over = never,
    sending: Callable[[], Over] | None = None,
) -> dict[str, Any]:
    """Ask for what the request `words` says, and send the models up to the one it begins with.

    over: when a question is waited for no longer, and a transfer where `sending` says no other.
    """
    newest = -2
    while (answer := _asked(store, asked, site, words, over, *flags))["state"] == "needs":
        if answer["have"] <= newest:
            raise UserError(
                f"{site.name} has no global model newer than round {newest}, though it was sent",
                f"look into {site.folder}/incoming and {site.folder}/bases there",
            )
        newest = answer["have"]
        past = over if sending is None else sending()
        try:
            _send_models(store, words["global_round"], site, past, journal, newest)
        except Unreachable as error:
            error.has_begun = error.is_sent_to = True
            raise
    return answer


def use_answer(
    store: CampaignStore,
    number: int,
    site: Site,
    answer: dict[str, Any],
    end: float,
    stopped: Over = never,
) -> None:
    """Take what is ready; go on without a facility that has failed; wait in all other states.

    end: when what is ready is waited for no longer.
    """
    store.record_answer(number, site, answer)
    state, why = answer["state"], answer.get("why", "")
    if state == "ready":
        _take(store, number, site, answer.get("jobs", []), end, stopped)
    elif state == "refused":
        store.count_failure(number, site, why)
    elif state == "failed" and store.asked_round(number, site) < number:
        store.journal(number).append("afresh", facility=site.name, why=why)
    elif state == "failed":
        store.leave_out(number, site, why)


def _take(
    store: CampaignStore,
    number: int,
    site: Site,
    jobs: list[dict[str, Any]],
    end: float,
    stopped: Over,
) -> None:
    """Fetch an update and check it; what is wrong in it is fetched again, then left out."""
    update = store.update(number, site)
    with alone(update.parent):
        if store.state(number, site).settled:
            return
        partial, began = update.with_name(".update.partial"), time.time()
        try:
            manifest = _fetched(store, number, site, partial, end, stopped)
        except Unreachable:
            raise
        except (UserError, OSError):
            refuse_full_disk(update.parent)
            shutil.rmtree(partial, ignore_errors=True)
            raise
        size = sum(path.stat().st_size for path in _files(partial))
        shutil.rmtree(partial / PARTS, ignore_errors=True)  # of an update that came before it
        store.keep_jobs(number, site, jobs)
        store.remember_nonce(number, site, manifest.nonce)
        partial.rename(update)
        run_dir.sync_folder(update.parent)
    seconds = time.time() - began
    store.journal(number).append("received", facility=site.name, bytes=size, seconds=seconds)


def _fetched(
    store: CampaignStore, number: int, site: Site, partial: Path, end: float, stopped: Over
) -> UpdateManifest:
    """An update's files, on this machine's disk; its manifest.

    That comes first: nothing is fetched that it does not name, or that is larger than a model.
    """
    source = f"{site.folder}/rounds/{round_name(store.asked_round(number, site))}/update"

    def past(quiet_seconds: float) -> bool:
        return stopped(quiet_seconds) or time.time() > end

    def get(names: Sequence[str], most_bytes: int) -> None:
        fetch(store.campaign, site, source, partial, names, most_bytes, past)

    get(MANIFEST, MAX_MANIFEST_BYTES)
    manifest = check_update(store, number, site, partial)
    files = manifest.all_files
    keep_only(partial, {*MANIFEST, *files})  # whole files of a transfer that was cut off
    for names in of_like_size({name: facts.bytes for name, facts in files.items()}):
        get(names, max(files[name].bytes for name in names))
    keep_only(partial, {*MANIFEST, *files})  # older rsyncs take more than was asked for
    for path in _files(partial):  # rsync does not see to it
        run_dir.sync_file(path)
    run_dir.sync_folder(partial)
    return manifest


def of_like_size(sizes: dict[str, int]) -> list[list[str]]:
    """Names by the bits of their sizes: no file is twice as long as the longest of its group.

    rsync has one limit for all files of a transfer, and a facility may send other files than it
    said.
    """
    groups: dict[int, list[str]] = {}
    for name, size in sizes.items():
        groups.setdefault(size.bit_length(), []).append(name)
    return list(groups.values())


def keep_only(folder: Path, names: set[str]) -> None:
    """Remove what is beside plain files of these names, and parts that came of others."""
    for path in folder.iterdir():
        plain = path.is_file() and not path.is_symlink()
        is_folder = path.is_dir() and not path.is_symlink()
        if is_folder and path.name == PARTS:
            keep_only(path, names - {PARTS})
        elif is_folder:
            shutil.rmtree(path)
        elif not (plain and path.name in names):
            path.unlink()


def _asked(
    store: CampaignStore, asked: int, site: Site, request: dict[str, Any], over: Over, *flags: str
) -> dict[str, Any]:
    words = ["site", site.folder, str(asked), "--request", json.dumps(request)]
    end = time.time() + (CALL_SECONDS if site.host is not None else math.inf)

    def past(quiet_seconds: float) -> bool:
        return over(quiet_seconds) or time.time() > end or quiet_seconds > SILENT_SECONDS

    answer = read_answer(ask(store.campaign, site, [*words, *flags], past), site.name)
    if answer["state"] == "needs" and answer["have"] >= request["global_round"]:
        raise UserError(
            f"{site.name} needs a model, and has that of round {answer['have']}",
            f"look into {site.folder}/bases there",
        )
    return answer


def _send_models(
    store: CampaignStore, newest: int, site: Site, over: Over, journal: Journal, have: int
) -> None:
    """Deltas, or the newest whole to who has none; the manifest last, which says it is whole."""
    for before in range(have + 1, newest + 1) if have >= 0 else [newest]:
        _refuse_once_more(store, before, site, journal)
        model, target = store.model(before), f"{site.folder}/incoming/{round_name(before)}"
        began, size = time.time(), 0
        for part, kinds in (WHOLE if have < 0 else DELTA).items():
            send(store.campaign, site, model / part, f"{target}/{part}", kinds, over)
            size += sum(path.stat().st_size for path in _files(model / part, kinds))
        staged = model.with_name(f".manifest-for-{site.name}")
        staged.mkdir(exist_ok=True)
        shutil.copy(model / "manifest.json", staged / "manifest.json")
        send(store.campaign, site, staged, target, over=over)
        seconds = time.time() - began
        journal.append("sent", facility=site.name, model=before, bytes=size, seconds=seconds)


def _refuse_once_more(store: CampaignStore, model: int, site: Site, journal: Journal) -> None:
    """Who loses what was sent gets it a few times in a round, until a person has looked."""
    records = journal.records("sent", "reopened")
    typed_again = [n for n, record in enumerate(records) if record.get("waits") is False]
    since = records[typed_again[-1] :] if typed_again else records
    sent = [r for r in since if r.get("model") == model and r.get("facility") == site.name]
    if len(sent) >= max(2, store.campaign.attempts):  # one that is damaged there is sent again
        raise UserError(
            f"{site.name} got the model of round {model} {len(sent)} times, and has it no more",
            f"look into {site.folder}/bases there, and its quota",
        )


def _files(folder: Path, kinds: Sequence[str] = ()) -> list[Path]:
    files = [path for path in folder.iterdir() if path.is_file()]
    return [path for path in files if not kinds or path.suffix in kinds]
