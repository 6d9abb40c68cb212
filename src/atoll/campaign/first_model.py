"""The first and the last model of a campaign. No run is made for either.

That of round 0 is what a run of the campaign's `start` would begin with; of adapters, only these.
The last of adapters is the base with them merged into it.

It is copied, converted or drawn in the image's half of Atoll (`atoll untrained`), a file in memory
at a time; no text is read unless the tokenizer is made of it.
"""

import json
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.asked import composed_here, lora_words
from atoll.campaign.journal import alone
from atoll.campaign.store import CampaignStore
from atoll.campaign.suited import refuse_unsuited_start
from atoll.campaign.transfer import atoll_here, run_atoll
from atoll.cluster.modules import atoll_outside_jobs
from atoll.config.compose import compose, known_shape, path_word
from atoll.errors import UserError
from atoll.settings import Run
from atoll.settings.federation import Campaign, refuse_too_many_fragments


def make_first_model(store: CampaignStore) -> None:
    """Make it, unless it is there; whole or not at all."""
    with alone(store.round(0)):
        if store.has_model(0):
            shutil.rmtree(store.round(0) / "untrained", ignore_errors=True)  # a kill left it
            return
        composition = compose(start_words(store))
        refuse_few_layers(store, composition.run)
        refuse_unsuited_start(composition.run)
        settings, model = store.round(0) / "run.yaml", store.round(0) / "untrained"
        run_dir.write_whole(settings, composition.as_yaml())
        atoll, about = atoll_outside_jobs(composition.run), dict[str, Any]()
        if learns_answers(store.campaign):
            about["answers"] = True
        if store.campaign.lora is None:
            words = ["untrained", str(settings), str(model), *_answers(about)]
            _shown([*atoll, *words], "the first model")
        else:
            answer = run_atoll([*atoll, "adapter", str(settings), str(model)], "the first adapter")
            about["frozen"] = frozen_digest(answer)
        words = ["apply-delta", str(model), str(store.model(0)), "--first"]
        words += ["--about", json.dumps(about)]
        run_atoll([*atoll_here(), *words], "the model of round 0")
        shutil.rmtree(model)


def learns_answers(campaign: Campaign) -> bool:
    """Whether a facility's text is conversations, as far as is known here."""
    runs = (composed_here(campaign, site) for site in campaign.sites)
    return any(run is not None and run.data.holds_conversations for run in runs)


def _answers(manifest: Mapping[str, Any]) -> list[str]:
    """As the campaign began: its models say alike where an answer ends, wherever one is made."""
    return ["--answers"] if manifest.get("answers") else []


def refuse_few_layers(store: CampaignStore, run: Run) -> None:
    """Raise `UserError` where the model cannot be divided; `aggregate` does of an unknown one."""
    try:
        layers = known_shape(run).layers
    except UserError:  # a model of the hub that this machine has not seen yet
        return
    refuse_too_many_fragments(store.campaign.rule.fragments, layers)


class NoBase(UserError):
    """What adapters are for is not here, or cannot be read."""


def merge_adapter(
    store: CampaignStore, adapter: Path, out: Path, atoll: list[str] | None = None
) -> None:
    """The base with an adapter added to it, once and in fp32, in the numbers of the rule's export.

    atoll: the command that does it; unset, that of the campaign's own image. Raises `NoBase` where
    the base is not here, `UserError` where it is no longer what the campaign began with.
    """
    dtype = store.campaign.rule.dtype
    words = [*start_words(store), f"export.dtype={dtype}", "export.max_file_gib=4"]
    words.append(path_word("folders.prepared", store.folder))  # where an image has all rounds
    settings = merge_settings(out)
    with ExitStack() as stack:
        stack.callback(settings.unlink, missing_ok=True)
        began_with = store.model_manifest(0)["frozen"]
        try:
            composition = compose(words)  # which may name files of the coordinator's own clone
            run_dir.write_whole(settings, composition.as_yaml())
            atoll = atoll or atoll_outside_jobs(composition.run)
            now = frozen_digest(run_atoll([*atoll, "adapter", str(settings)], "the base's digest"))
        except UserError as error:
            raise NoBase(error.found, error.hint) from None
        if now != began_with:
            raise UserError(
                f"the base that the campaign's `start` names is {now[:12]}, the campaign began "
                f"with {began_with[:12]}",
                "get it back as it was",
            )
        words = ["untrained", str(settings), str(out), "--adapter", str(adapter)]
        words += _answers(store.model_manifest(0))
        _shown([*atoll, *words], "the merged model")


def merge_settings(out: Path) -> Path:
    """What the merge reads, beside what it makes; a kill may leave it there."""
    return out.with_name(f".{out.name}.yaml")


def frozen_digest(answer: str) -> str:
    """What `atoll adapter` says of a base; before it libraries may have printed lines."""
    return str(json.loads(answer.strip().splitlines()[-1])["digest"])


def _shown(argv: list[str], what: str) -> None:
    """A person sees how far it is."""
    code = subprocess.run(argv, stdin=subprocess.DEVNULL).returncode
    if code:
        raise UserError(f"{what} ended with exit code {code}", "see the lines above")


def start_words(store: CampaignStore) -> list[str]:
    """The settings of the run whose first weights are the campaign's."""
    here = store.round(0)
    own = ["name=start", path_word("folders.runs", here), path_word("folders.prepared", here)]
    # of a file, which is in memory while it is written
    lora = store.campaign.lora
    adapter = [] if lora is None else lora_words(lora)
    if lora is not None and lora.start is not None:
        adapter.append(path_word("++model.lora.start", lora.start.expanduser().absolute()))
    return ["export.max_file_gib=1", *store.campaign.start, *adapter, *own, "export.dtype=float32"]
