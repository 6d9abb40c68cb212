"""`atoll federate federation=NAME`: several facilities train one model, round after round.

What is done is read from which folders are whole and from each round's journal (journal.py).
Killed at any moment and started again, a campaign goes on where it was: a facility is asked the
same question, and does nothing twice.
"""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from atoll.campaign import streamflow
from atoll.campaign.asked import refuse_unknown_samples
from atoll.campaign.asking import Collect, collect_here, overlapped
from atoll.campaign.average import average, finish_letting_go
from atoll.campaign.dry_run import dry_run
from atoll.campaign.first_model import make_first_model, merge_adapter
from atoll.campaign.journal import alone
from atoll.campaign.last_loss import measure_last
from atoll.campaign.lasting_settings import (
    keep_settings,
    refuse_missing_keys,
    refuse_what_loses,
    settings_to_keep,
    unwritable,
)
from atoll.campaign.progress import shown
from atoll.campaign.prove import prove_campaign, sign_model
from atoll.campaign.steps_by_queue import choose_steps
from atoll.campaign.store import CampaignStore, checked_campaign, load_store
from atoll.campaign.suited import refuse_unsuited_runs, refuse_what_cannot_compose
from atoll.commands import CommandParser
from atoll.config.compose import campaign_values
from atoll.errors import UserError
from atoll.one_writer import one_writer
from atoll.proof.statement import NAME

ABOUT = """Rounds of training at the facilities of a federation, averaged on this machine. The same
command run again goes on where it stopped."""


def main(argv: list[str]) -> int:
    """Begin a campaign, or go on with it."""
    parser = CommandParser("federate", ABOUT)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="federation=NAME, …")
    parser.add_argument("--status", action="store_true", help="where it stands, round by round")
    parser.add_argument("--dry-run", action="store_true", help="compose, check, print, no more")
    arguments = parser.read(argv)
    campaign = checked_campaign(campaign_values(arguments.overrides))
    store = CampaignStore(campaign, Path(campaign.folder).absolute() / campaign.name)
    refuse_what_loses(store)
    if arguments.status:
        print("\n".join(status_lines(load_store(store.folder))))
        return 0
    settings_to_keep(store)
    if arguments.dry_run:
        print(dry_run(store), end="")
        return 0
    refuse_missing_keys(campaign)
    refuse_what_cannot_compose(store)
    refuse_unknown_samples(store)
    refuse_unsuited_runs(store)
    return run(store)


def run(store: CampaignStore) -> int:
    """Every round that is not done yet, by the campaign's engine; one process at a time."""
    with ExitStack() as stack:
        try:
            stack.enter_context(alone(store.folder, wait=False))
        except BlockingIOError:
            raise UserError(
                f"another atoll federate is at {store.folder}",
                "wait until it has ended, or end it: this line goes on from where it was",
            ) from None
        except OSError as error:
            raise unwritable(store, error) from None
        return _run(keep_settings(store))


def _run(store: CampaignStore) -> int:
    make_first_model(store)
    last = _rounds(store)
    if store.campaign.last_loss and store.global_loss(last) is None:  # else a later round did
        measure_last(store, last)
        print(last_line(store, last), flush=True)
    export = store.export(last)
    with alone(store.round(last)):
        if not export.is_dir():
            merge_adapter(store, store.model(last) / "master", export)
        if not (export / NAME).is_file():
            prove_campaign(store, last)
        sign_model(store, last)
    print(f"the model: {export}")
    return 0


def _rounds(store: CampaignStore) -> int:
    """Carry out what is to do of all rounds; the number of the last."""
    target = store.campaign.target_loss
    with _collecting(store) as collect:
        for number in range(1, store.campaign.rounds + 1):
            _open_again(store, number)
            finish_letting_go(store, number)
            _wait_for_maker(store, number)
            while not store.has_model(number):
                choose_steps(store, number)
                with shown(store, number):
                    collect(store, number)
                average(store, number)
            average(store, number)  # made by a process that was killed before it said so
            print(round_line(store, number), flush=True)
            is_last = not store.has_model(number + 1)  # a target that came later ends no older one
            if is_last and _reached_target(store, number):
                print(f"the target loss {target} is reached", flush=True)
                return number
    return store.campaign.rounds


def _wait_for_maker(store: CampaignStore, number: int) -> None:
    """A kill may have left the aggregation of a round behind: nobody is asked for what it makes."""
    if store.round(number).is_dir() and not store.has_model(number):
        with one_writer(store.model(number)):
            pass


def _open_again(store: CampaignStore, number: int) -> None:
    """A round that waits is typed again: who failed may be mended, and has its attempts again."""
    waits = store.campaign.rule.below_quorum == "wait" and not store.has_model(number)
    if waits and store.journal(number).last("reopened").get("waits"):
        store.journal(number).append("reopened", waits=False)


def _collecting(store: CampaignStore) -> AbstractContextManager[Collect]:
    """How the campaign gets the updates of a round, while it goes over all of them."""
    if store.campaign.rule.overlap_rounds:
        return overlapped(store)
    return nullcontext(ENGINES[store.campaign.engine])


# engine -> how it gets the updates of one round; cut off, it goes on from where it was
ENGINES: dict[str, Collect] = {"local": collect_here, "streamflow": streamflow.collect}


def _reached_target(store: CampaignStore, number: int) -> bool:
    """Of the upper half of what most facilities say: none ends a campaign by itself.

    Neither by what it says, nor where the others are late or say nothing, or have left since. Of
    weights that facilities keep of their own a loss says nothing of the model.
    """
    if store.campaign.rule.keeps_own_weights:
        return False
    target, losses = store.campaign.target_loss, store.losses(number)
    first = sorted(loss[0] for loss in losses)
    averaged = store.journal(number).last("averaged")  # an older Atoll's has no facilities
    enough = 2 * len(first) > averaged.get("facilities", len(store.campaign.sites))
    return target is not None and enough and first[len(first) // 2] <= target


def status_lines(store: CampaignStore) -> list[str]:
    """A line for each round that has begun, and one for each facility where it is under way."""
    begun = store.begun_rounds()
    lines = [f"{store.campaign.name}: {store.campaign.rounds} rounds in {store.folder}"]
    for number in begun:
        lines.append(round_line(store, number))
        if not store.has_model(number):
            states = {site.name: store.state(number, site).text for site in store.campaign.sites}
            lines += [f"  {name}: {text}" for name, text in states.items()]
    if begun and store.loss_journal(begun[-1]).records():
        lines.append(last_line(store, begun[-1]))
    return lines


def last_line(store: CampaignStore, number: int) -> str:
    """The held-out loss of the model that the campaign ends with, and who did not say it."""
    loss, journal = store.global_loss(number), store.loss_journal(number)
    text = "not measured" if loss is None else f"loss {loss:.4f} (mean over facilities)"
    told = [record for record in journal.since("began") if record["event"] == "left out"]
    left_out = {record["facility"]: record["why"] for record in told}
    without = "".join(f"; without {name}: {why}" for name, why in sorted(left_out.items()))
    return f"the model of round {number}: {text}{without}"


def round_line(store: CampaignStore, number: int) -> str:
    """Where one round stands."""
    if not store.has_model(number):
        return f"round {number}: under way"
    shares = store.model_manifest(number)["weights"].items()
    weights = ", ".join(f"{name} {share:.2f}" for name, share in shares) or "none: it is held"
    missing = sorted(store.without(number).items())
    without = "".join(f"; without {name}: {why}" for name, why in missing)
    mean = store.mean_losses(number)
    losses = f"loss {mean[0]:.4f}, after training {mean[1]:.4f}" if mean else "no losses"
    return f"round {number}: {losses} (mean over facilities); weights {weights}{without}"
