"""The model of round 0: what a run of the campaign's `start` would begin with. No run is made.

It is copied, converted or drawn in the image's half of Atoll (`atoll untrained`), a file in memory
at a time; no text is read unless the tokenizer is made of it.
"""

import shutil
import subprocess

from atoll import run_dir
from atoll.campaign.journal import alone
from atoll.campaign.store import CampaignStore
from atoll.campaign.transfer import atoll_here, run_verb
from atoll.cluster.launchers import atoll_command
from atoll.config.compose import compose, path_word
from atoll.errors import UserError


def make_first_model(store: CampaignStore) -> None:
    """Make it, unless it is there; whole or not at all."""
    with alone(store.round(0)):
        if store.has_model(0):
            return
        composition = compose(start_words(store))
        settings, model = store.round(0) / "run.yaml", store.round(0) / "untrained"
        run_dir.write_whole(settings, composition.as_yaml())
        words = ["untrained", str(settings), str(model)]
        # a person sees how far it is
        code = subprocess.run(
            [*atoll_command(composition.run), *words], stdin=subprocess.DEVNULL
        ).returncode
        if code:
            raise UserError(f"the first model ended with exit code {code}", "see the lines above")
        words = ["apply-delta", str(model), str(store.model(0)), "--first"]
        run_verb([*atoll_here(), *words], "the model of round 0")
        shutil.rmtree(model)


def start_words(store: CampaignStore) -> list[str]:
    """The settings of the run whose first weights are the campaign's."""
    here = store.round(0)
    own = ["name=start", path_word("folders.runs", here), path_word("folders.prepared", here)]
    # of a file, which is in memory while it is written
    return ["export.max_file_gib=1", *store.campaign.start, *own, "export.dtype=float32"]
