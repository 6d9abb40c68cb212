"""`atoll federate --dry-run`: what a campaign would do, from its settings and nothing else.

Every run is composed and checked against its facility's limits here; no facility is asked, no
network is used, and what is only there (bundles, images, accounts) is not looked for.
"""

import yaml

from atoll.campaign.asked import BUNDLE, training_words, without_bundle
from atoll.campaign.first_model import refuse_few_layers, start_words
from atoll.campaign.store import CampaignStore
from atoll.campaign.suited import refuse_unsuited, refuse_unsuited_start
from atoll.cluster import limits
from atoll.config.compose import check_model, compose, known_shape, path_word
from atoll.errors import UserError, printable
from atoll.settings import Model, Run
from atoll.settings.federation import Site


def dry_run(store: CampaignStore) -> str:
    """The settings, then as comments the first model and each facility's run.

    Raises `UserError` naming the facility whose run is wrong.
    """
    settings = yaml.safe_dump(
        store.campaign.model_dump(mode="json"), sort_keys=False, allow_unicode=True
    )
    start = compose(without_bundle(start_words(store))[0]).run
    refuse_few_layers(store, start)
    refuse_unsuited_start(start)
    lines = [_first_model(store, start), *_fragments(store)]
    for site in store.campaign.sites:
        try:
            lines += _of_site(store, site, start.model)
        except UserError as error:
            raise UserError(f"{site.name}: {error.found}", error.hint) from None
    return settings + "".join(f"# {printable(line)}\n" for line in lines)


def _first_model(store: CampaignStore, start: Run) -> str:
    try:
        parameters = known_shape(start).parameters
        size = f", {parameters / 1e9:.2f} billion parameters, {4 * parameters / 2**30:.1f} GiB"
    except UserError:  # a model of the hub that this machine has not seen yet
        size = ""
    lora = store.campaign.lora
    origin = start.model.source or f"random weights of seed {start.seed}"
    if lora is not None:
        return (
            f"round 0: adapters of rank {lora.rank} to {store.model(0)} and each facility, which "
            f"has the model itself: {origin}{size}"
        )
    return f"round 0: {origin}{size} in fp32, to {store.model(0)} and once to each facility"


def _fragments(store: CampaignStore) -> list[str]:
    rule, rounds = store.campaign.rule, store.campaign.rounds
    if rule.fragments == 1:
        return []
    over = rounds % rule.fragments
    uneven = f"; in {rounds} rounds {over} of them once more than the others" if over else ""
    return [
        f"fragments: {rule.fragments}, {rule.fragment_pattern}; one a round, so each once in "
        f"{rule.fragments * store.campaign.steps} steps; {rule.overlap_rounds} rounds overlap"
        f"{uneven}"
    ]


def _of_site(store: CampaignStore, site: Site, model: Model) -> list[str]:
    """What a facility does in a round; checked as it will be there."""
    campaign = store.campaign
    words, bundle = without_bundle(training_words(campaign, 1, site, campaign.steps, 0))
    if campaign.lora is None:
        words.append(path_word("model.source", store.model(0)))
    run = compose([*words, f"name={site.name}"]).run
    known = {"source": model.source, "config": model.config}
    check_model(run.model_copy(update={"model": run.model.model_copy(update=known)}))
    refuse_unsuited(run, campaign.lora is not None)
    facility = run.facility
    limits.check_supported(run)
    limits.check_nodes(run)
    if facility.scheduler != "none":
        account = facility.account or "its own"
        limits.check_queue(
            run.model_copy(update={"facility": facility.model_copy(update={"account": account})})
        )
    lines = [
        f"{site.name}: on {site.host or 'this machine'}, {run.nodes} nodes x {run.ranks_per_node} "
        f"ranks of {facility.name}, sharding={run.sharding.name}; {campaign.steps} steps of "
        f"{campaign.batch_samples} samples of {run.data.name} a round"
    ]
    if bundle:
        lines.append(f"{site.name}: tokens from the bundle {bundle} there")
    elif facility.node_network is False and any(data.source == "hub" for data in run.data.each):
        lines.append(
            f"{site.name}: its nodes have no network, so hub data must be in its cache; surer is "
            f"{BUNDLE}FOLDER, made by atoll prepare --into FOLDER"
        )
    return lines
