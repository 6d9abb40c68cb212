"""What is asked of a facility in a round, and that its update claims no more."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.journal import Journal
from atoll.campaign.signing import refuse_unsigned
from atoll.campaign.store import CampaignStore
from atoll.config.compose import compose, settings_of
from atoll.errors import UserError
from atoll.settings import Lora, Run
from atoll.settings.exchange import UpdateManifest, manifest_file, read_manifest
from atoll.settings.federation import Campaign, Site

ASKED = ("campaign", "round", "facility", "base", "encoding")  # of a manifest, as it was asked
ROOM_BYTES = 16 << 20  # of an update, for headers
BUNDLE = "folders.bundle="


def attempts_by(campaign: Campaign, journal: Journal) -> int:
    """All that a facility has: as many again each time a person was told of what failed."""
    reopened = journal.records("reopened")
    typed_again = sum(record.get("waits") is False for record in reopened)
    return campaign.attempts * (1 + typed_again)


def request(store: CampaignStore, number: int, site: Site) -> dict[str, Any]:
    """What a facility is asked in a round: the same words every time."""
    campaign, rule, newest = store.campaign, store.campaign.rule, store.global_round(number)
    return {
        "campaign": campaign.name,
        "round": number,
        "facility": site.name,
        "base": store.model_manifest(newest)["digest"],
        "global_round": newest,
        "fragments": rule.fragments,
        "fragment": rule.fragment(number),
        "fragment_pattern": rule.fragment_pattern,
        "merge_alpha": rule.merge_alpha,
        "frozen": store.model_manifest(0).get("frozen"),
        "codec": campaign.codec,
        "inner_state": campaign.inner_state,
        "attempts": attempts_by(campaign, store.journal(number)),
        "keep_checkpoints": campaign.keep_checkpoints,
        "facilities_here": sum(each.host == site.host for each in campaign.sites),
        "signing_key": site.signing_key,
        "overrides": training_words(
            campaign, number, site, store.steps(number, site), store.steps_before(number, site)
        ),
    }


def training_words(
    campaign: Campaign, number: int, site: Site, steps: int, steps_before: int
) -> list[str]:
    """The settings of a facility's run of a round, but for the folders there.

    Each takes samples in an order of its own: facilities that have the same text would learn the
    same from it. Its data goes on where its own steps ended; the schedule follows the campaign's, a
    round's share of it in a round, however many steps this facility takes.
    """
    stride = (
        [] if steps == campaign.steps else [f"training.schedule_stride={campaign.steps / steps}"]
    )
    data_seed = int(run_dir.digest([campaign.name, site.name], 8), 16)
    return [
        f"training.data_seed={data_seed}",
        *campaign.train,
        *site.overrides,
        *(["model=from_path"] if campaign.lora is None else lora_words(campaign.lora)),
        f"training.steps={steps}",
        "training.epochs=null",
        f"training.global_batch_samples={campaign.batch_samples}",
        "training.device_batch_samples=null",
        f"training.consumed_samples={steps_before * campaign.batch_samples}",
        f"training.consumed_steps={(number - 1) * campaign.steps}",
        f"training.schedule_steps={(campaign.schedule_rounds or campaign.rounds) * campaign.steps}",
        *stride,
    ]


def lora_words(lora: Lora) -> list[str]:
    """The settings of adapters as a run's words."""
    values = lora.model_dump(mode="json", exclude={"start"})
    return [f"++model.lora.{name}={json.dumps(value)}" for name, value in values.items()]


def check_update(store: CampaignStore, number: int, site: Site, folder: Path) -> UpdateManifest:
    """Signed by the facility, made for what this round asked of it, and never seen before.

    What it claims is held to what was asked. Its files are checked where they are read, by
    `atoll aggregate`.
    """
    if store.campaign.allowed_signers is not None:
        signers = Path(store.campaign.allowed_signers).expanduser()
        refuse_unsigned(manifest_file(folder), signers, site.name)
    manifest = read_manifest(folder)
    asked = request(store, store.asked_round(number, site), site)
    claims = {"encoding": manifest.encoding, **manifest.model_dump(include=set(ASKED))}
    for name in ASKED:
        if claims[name] != asked["codec" if name == "encoding" else name]:
            raise UserError(
                f"the update of {site.name} says {name}={claims[name]}, this round is "
                f"{asked['codec' if name == 'encoding' else name]}",
                "train the model of this round",
            )
    _refuse_large_claims(store, site, manifest, store.steps(asked["round"], site))
    if store.is_known(manifest.nonce, number, site):
        raise UserError(f"the update of {site.name} was sent before", "train again")
    return manifest


def _refuse_large_claims(
    store: CampaignStore, site: Site, manifest: UpdateManifest, steps: int
) -> None:
    """No more steps and tokens than were asked for, nor more bytes than the model has."""
    campaign = store.campaign
    samples = steps * campaign.batch_samples
    size = sum(path.stat().st_size for path in (store.model(0) / "master").glob("*"))
    claims = {
        "steps": (manifest.steps, steps),
        "tokens": (manifest.tokens, samples * sequence_tokens(campaign, site)),
        "bytes": (sum(f.bytes for f in manifest.files.values()), size + size // 10 + ROOM_BYTES),
    }
    for name, (claimed, most) in claims.items():
        if claimed > most:
            raise UserError(
                f"the update of {site.name} says {claimed:,} {name}, at most {most:,} were asked "
                "for",
                "do not use what comes from there",
            )


def refuse_unknown_samples(store: CampaignStore) -> None:
    """Before anybody trains: without the length of a sample no update's tokens have a bound."""
    for site in store.campaign.sites:
        sequence_tokens(store.campaign, site)


def sequence_tokens(campaign: Campaign, site: Site) -> int:
    """Of a sample at a facility, as this machine's clone knows its settings, else as they say it.

    Raises `UserError` where neither tells.
    """
    words = words_here(campaign, site)
    run = _composed(words)
    if isinstance(run, Run):
        return run.data.sequence_tokens
    if (said := _said_tokens(words)) is not None:
        return said
    raise UserError(
        f"how long a sample at {site.name} is, is not known here, so neither is how many tokens "
        f"its update may claim: {run.found}",
        f"mend that, or, where it is right there, say it in the overrides of {site.name}: "
        "data.sequence_tokens=N",
    )


def composed_here(campaign: Campaign, site: Site) -> Run | None:
    """A facility's run as this machine's clone knows its settings; None: only it has them."""
    run = _composed(words_here(campaign, site))
    return run if isinstance(run, Run) else None


def words_here(campaign: Campaign, site: Site) -> tuple[str, ...]:
    """A facility's run as it can be composed on this machine."""
    words = without_bundle(training_words(campaign, 1, site, 1, 0))[0]
    return (*words, "model.source=here", "name=site")


@cache
def _composed(words: tuple[str, ...]) -> Run | UserError:
    """A run of these words, or why there is none here."""
    try:
        return compose(words).run
    except UserError as error:
        return error


def _said_tokens(words: tuple[str, ...]) -> int | None:
    said = [value for name, value, _ in settings_of(words) if name == "data.sequence_tokens"]
    return said[-1] if said and type(said[-1]) is int and said[-1] > 0 else None


def without_bundle(words: list[str]) -> tuple[list[str], str]:
    """The words that need nothing of another machine, and the bundle that the others name."""
    bundles = [word.removeprefix(BUNDLE) for word in words if word.startswith(BUNDLE)]
    kept = [word for word in words if not word.startswith(BUNDLE)]
    return kept, bundles[-1] if bundles else ""
