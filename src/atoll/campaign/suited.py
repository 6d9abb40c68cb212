"""Runs that a campaign cannot be made of: each round is a run of its own, with a beginning.

What such settings mean depends on the weights that a run begins with, or on its only beginning: in
rounds they would do something else, and nobody would be told.
"""

from atoll.campaign.asked import composed_here
from atoll.campaign.store import CampaignStore
from atoll.errors import UserError
from atoll.settings import Run


def refuse_unsuited_runs(store: CampaignStore) -> None:
    """Of all facilities whose settings this machine's clone knows; the others refuse their own."""
    for site in store.campaign.sites:
        run = composed_here(store.campaign, site)
        if run is not None:
            try:
                refuse_unsuited(run, store.campaign.lora is not None)
            except UserError as error:
                raise UserError(f"{site.name}: {error.found}", error.hint) from None


def refuse_unsuited(run: Run, adapters_travel: bool) -> None:
    """Raise `UserError` where a facility's run learns something else in rounds."""
    quantisation = run.model.quantisation
    if quantisation != "none" and not adapters_travel:
        raise UserError(
            f"model.quantisation={quantisation} where whole models travel: each round would round "
            "the weights again, and lose what the last one learned",
            "lora.rank=16 of the campaign: adapters alone travel; or model.quantisation=none",
        )
    if run.task.name == "preference" and run.task.loss == "dpo":
        raise UserError(
            "task.loss=dpo in rounds: its reference is the model that a run begins with, which is "
            "another in each round",
            "task.loss=simpo, which has none",
        )


def refuse_unsuited_start(run: Run) -> None:
    """Raise `UserError` where the rounds could not go on as the first model was drawn."""
    if (width := run.model.mup.base_width) is not None:
        raise UserError(
            f"model.mup.base_width={width} in the campaign's start: rounds train a model that is "
            "there, with one rate for all of it",
            "model.mup.base_width=null",
        )
