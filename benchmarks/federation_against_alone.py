"""Three facilities federated, against each alone for as many steps: `make demo-federation`.

Prints held-out perplexity of every model on every facility's text, and on the union of them.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.store import CampaignStore, checked_campaign, load_store
from atoll.config.compose import campaign_values, compose
from atoll.settings.federation import Campaign, Site

MODELS_BEFORE = "before"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("runs/demo-federation"))
    parser.add_argument("--check", action="store_true", help="fail unless federated is best")
    parser.add_argument("settings", nargs="*", help="KEY=VALUE of the campaign")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(arguments.folder)
    lines = ["federation=demo", f"rounds={arguments.rounds}", *arguments.settings]
    campaign = checked_campaign(campaign_values(lines))
    stages = [f"{site.name} alone" for site in campaign.sites]
    print(f"1/{len(stages) + 2} federated: {campaign.rounds} rounds", flush=True)
    atoll("federate", *lines)
    home = Path(campaign.folder).absolute() / campaign.name
    models = {MODELS_BEFORE: home / "round-000" / "global" / "export"}
    for stage, site in enumerate(campaign.sites, 2):
        print(f"{stage}/{len(stages) + 2} {site.name} alone", flush=True)
        models[f"{site.name} alone"] = alone(campaign, site, models[MODELS_BEFORE])
    models["federated"] = home / f"round-{campaign.rounds:03d}" / "global" / "export"
    print(f"{len(stages) + 2}/{len(stages) + 2} every model on every text", flush=True)
    table = {
        name: {site.name: judged(campaign, site, name, model) for site in campaign.sites}
        for name, model in models.items()
    }
    union = show(campaign, table)
    show_rounds(load_store(home))
    if arguments.check and min(union, key=lambda name: union[name]) != "federated":
        return 1
    return 0


def atoll(*words: str) -> None:
    """Run a verb; its progress is shown."""
    subprocess.run([sys.executable, "-m", "atoll", *words], check=True)


def of_site(campaign: Campaign, site: Site) -> list[str]:
    tokenizer = Path(site.folder).absolute() / "tokenizer"
    lines = [*campaign.train, *site.overrides, "model=from_path", f"tokenizer.path={tokenizer}"]
    return [*lines, f"folders.prepared={Path(site.folder).absolute() / 'prepared'}"]


def alone(campaign: Campaign, site: Site, start: Path) -> Path:
    """The same model, steps and samples as in the campaign, without the others."""
    name = f"alone-{site.name}"
    steps = campaign.rounds * campaign.steps
    own = [f"name={name}", f"model.source={start}", f"training.steps={steps}"]
    own += [f"training.global_batch_samples={campaign.batch_samples}", "training.epochs=null"]
    atoll("submit", *of_site(campaign, site), *own)
    return run_dir.export(run_dir.folder(compose([*of_site(campaign, site), *own]).run))


def judged(campaign: Campaign, site: Site, name: str, model: Path) -> dict[str, Any]:
    """Loss on a facility's whole held-out text, and its number of targets."""
    run = f"judge-{name.replace(' ', '-')}-on-{site.name}"
    own = [f"name={run}", f"model.source={model}", "evaluation.max_samples=null"]
    own += [f"training.global_batch_samples={campaign.batch_samples}"]
    atoll("evaluate", *of_site(campaign, site), *own)
    folder = run_dir.folder(compose([*of_site(campaign, site), *own]).run)
    result: dict[str, Any] = json.loads(run_dir.result_file(folder).read_text())
    return result


def show(campaign: Campaign, table: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Print the table; the perplexity of each model on the union."""
    names = [site.name for site in campaign.sites]
    print(f"\nheld-out perplexity after {campaign.rounds} rounds of {campaign.steps} steps")
    print(f"{'model':14}" + "".join(f"{name:>10}" for name in [*names, "union"]))
    union = {}
    for model, row in table.items():
        targets = sum(row[name]["targets"] for name in names)
        loss = sum(row[name]["loss"] * row[name]["targets"] for name in names) / targets
        union[model] = math.exp(loss)
        cells = [math.exp(row[name]["loss"]) for name in names] + [union[model]]
        print(f"{model:14}" + "".join(f"{cell:10.2f}" for cell in cells))
    return union


def show_rounds(store: CampaignStore) -> None:
    """Print the held-out loss of the global model after each round, the last one too."""
    losses = [store.global_loss(number) for number in store.begun_rounds()]
    cells = ["   none" if loss is None else f"{loss:7.4f}" for loss in losses]
    print(f"\nglobal model, held-out loss after each round: {' '.join(cells)}")


if __name__ == "__main__":
    sys.exit(main())
