"""What a coordinator asks of a facility in a round, as it is kept there.

What a job was handed over for trains one thing alone; until then a mistyped line may be mended.
"""

import json
import shutil
from itertools import takewhile
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.journal import Journal
from atoll.campaign.same_training import is_same_training
from atoll.errors import UserError

# of a request: they may change in a round
PATIENCE = ("attempts", "keep_checkpoints", "facilities_here", "signing_key")
# after refusals of the scheduler: twice so long behind the first, doubled with each, and the most
WAIT_SECONDS, MOST_WAIT_SECONDS = 60.0, 1800.0


def keep_campaign(folder: Path, name: str) -> None:
    """A folder is of one campaign for life."""
    path = folder / "campaign.json"
    try:
        owner = json.loads(path.read_text())["name"] if path.is_file() else name
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} says of no campaign that it is its own", "delete it") from None
    if owner != name:
        raise UserError(
            f"{folder} is of the campaign {owner}, and {name} asks for it",
            "give it another folder at the facility",
        )
    if not path.is_file():
        run_dir.write_whole(path, json.dumps({"name": name}))


def keep_request(here: Path, number: int, request: dict[str, Any]) -> None:
    """Keep what the coordinator asks; what a job was handed over for trains one thing alone."""
    if request["round"] != number:
        raise UserError(f"round {number} with a request for {request['round']}", "ask for one")
    journal = Journal(here)
    before = journal.last("asked").get("request", {})
    handed = [record["event"] for record in journal.records("submitted", "refused", "accepted")]
    is_free = handed[-1:] in ([], ["refused"]) and "accepted" not in handed
    is_same = bool(before) and is_same_training(before["overrides"], request["overrides"])
    if is_free and before and not is_same:
        for run in {record["run"] for record in journal.records("submitted")}:
            shutil.rmtree(run, ignore_errors=True)  # it holds settings that nothing was done with
    if is_free and before:
        before = {"facility": before["facility"]}
    elif is_same:
        before = before | {"overrides": request["overrides"]}
    for name in request:
        if name in before and name not in PATIENCE and before[name] != request[name]:
            raise UserError(
                f"{journal.path} has {name}={before.get(name)}, and now {request[name]} is asked "
                "for",
                "give the campaign another name=, or another folder at the facility",
            )
    if journal.last("asked").get("request") != request:
        journal.append("asked", request=request)


def kept_request(here: Path) -> dict[str, Any]:
    asked = Journal(here).last("asked")
    if not asked:
        raise UserError(f"{here} was never asked for", "give --request")
    request: dict[str, Any] = asked["request"]
    return request


def attempts(journal: Journal) -> int:
    """At what is asked now; those that a kill cut short are none."""
    count, overrides = 0, None
    for record in journal.records("asked", "refused", "accepted"):
        if record["event"] != "asked":
            count += 1
        elif record["request"]["overrides"] != overrides:
            count, overrides = 0, record["request"]["overrides"]
    return count


def is_refused_lately(journal: Journal, now: float) -> bool:
    """Whether the scheduler has its time yet; it is asked at once where other words came since."""
    events = reversed(journal.records("asked", "refused", "accepted"))
    refused = list(takewhile(lambda record: record["event"] == "refused", events))
    wait_seconds = min(MOST_WAIT_SECONDS, WAIT_SECONDS * 2 ** min(len(refused), 20))
    return bool(refused) and 0.0 <= now - refused[0]["time"] < wait_seconds
