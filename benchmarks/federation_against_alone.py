"""Three facilities federated, against each alone, and one machine with all: `make demo-federation`.

All go on from one base model, trained first on text that none of the facilities has.
Each facility alone takes as many steps as in the campaign. So does one machine with the training
text of all, with the samples of all in each step: as many tokens as they together.
Prints held-out perplexity of every model on every facility's text, and on the union of them.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import results

from atoll import run_dir
from atoll.campaign.store import CampaignStore, checked_campaign, load_store
from atoll.config.compose import campaign_values, compose, path_word
from atoll.data.encode import SplitCorpus
from atoll.data.sources import blocks
from atoll.data.sources.corpus import train_corpus
from atoll.settings.federation import Campaign, Site

# Of each process: three or more share this machine's cores, and threads that wait for each other
# spin on the cores that the others need. A model of this size is no faster on two.
ONE_CORE = {"OMP_NUM_THREADS": "1"}
BASE = [
    "experiment=demo", "facility=laptop", "name=base", "data.sequence_tokens=128",
    "data.files=[a*.py,b*.py,f*.py,g*.py,idlelib/*,l*.py,m*.py,n*.py,o*.py,r*.py]",
    "training.steps=900", "training.device_batch_samples=8", "training.microbatch_samples=8",
    "generation.prompt=null", "generation.before=false", "checkpoint.every_steps=0",
]  # fmt: skip
ONE_MACHINE = "one machine"  # with the text of all of them
MOST_LOST = 0.02  # of perplexity against it
INTERRUPTED = 130  # as a shell says of Ctrl-C


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("runs/demo-federation"))
    parser.add_argument(
        "--check", action="store_true", help="fail unless it holds what is promised"
    )
    parser.add_argument("--record", action="store_true", help="keep the row in results/")
    parser.add_argument("settings", nargs="*", help="KEY=VALUE of the campaign")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(arguments.folder)
    print("1/4 a base model, on text that none of the facilities has", flush=True)
    side_by_side({"base": BASE}, "submit", 1)
    lines = ["federation=demo", f"rounds={arguments.rounds}", *arguments.settings]
    lines.append(from_base(checked_campaign(campaign_values(lines))))
    campaign = checked_campaign(campaign_values(lines))
    print(f"2/4 federated: {campaign.rounds} rounds", flush=True)
    argv = [sys.executable, "-m", "atoll", "federate", *lines]
    if code := subprocess.run(argv).returncode:
        return code  # it has said why
    home = Path(campaign.folder).absolute() / campaign.name
    first, last = (home / f"round-{n:03d}" / "global" / "export" for n in (0, campaign.rounds))
    print("3/4 each facility alone, and one machine with all text, side by side", flush=True)
    runs = {f"{site.name} alone": alone(campaign, site, first) for site in campaign.sites}
    write_union(campaign, first, Path("union"))
    runs[ONE_MACHINE] = one_machine(campaign, Path("union").absolute(), first)
    side_by_side(runs, "submit", len(runs))
    exports = {name: run_dir.export(folder_of(words)) for name, words in runs.items()}
    models = {"before": first, **exports, "federated": last}
    print("4/4 every model on every text", flush=True)
    union = show(campaign, judged(campaign, models))
    show_rounds(load_store(home))
    if arguments.record:
        results.record("federation_against_alone", rows(campaign, union))
    return 1 if missed(union) and arguments.check else 0


def from_base(campaign: Campaign) -> str:
    """The `start` of a campaign that goes on from the base."""
    source = path_word("model.source", run_dir.export(folder_of(BASE)).absolute())
    return f"start={json.dumps([*campaign.start, 'model=from_path', source])}"


def rows(campaign: Campaign, union: Mapping[str, float]) -> list[dict[str, Any]]:
    """Federated against one machine with all text, and against the best facility alone."""
    about = f"{campaign.rounds} rounds of {campaign.steps} steps, perplexity on all held-out text"
    best = min(value for name, value in union.items() if name.endswith(" alone"))
    pairs = [(ONE_MACHINE, union[ONE_MACHINE], 1 + MOST_LOST), ("best alone", best, 1.0)]
    ours = [union["federated"]]
    return [
        results.row(about, "perplexity", ours, peer, [value], "lower", target)
        for peer, value, target in pairs
    ]


def missed(union: Mapping[str, float]) -> bool:
    """Say how far federated is from the others; whether it is not better, or lost too much."""
    best_alone = min(union[name] for name in union if name not in ("federated", ONE_MACHINE))
    lost = union["federated"] / union[ONE_MACHINE] - 1
    print(
        f"federated: {union['federated'] / best_alone - 1:+.1%} against the best alone, "
        f"{lost:+.1%} against one machine with all text (at most {MOST_LOST:+.0%})"
    )
    return union["federated"] >= best_alone or lost > MOST_LOST


def side_by_side(runs: Mapping[str, Sequence[str]], command: str, at_once: int) -> None:
    """Run a command for each, so many at once; a line when one ends, output if it fails."""

    def run(name: str) -> None:
        began = time.monotonic()
        argv = [sys.executable, "-m", "atoll", command, *runs[name]]
        done = subprocess.run(argv, env=os.environ | ONE_CORE, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        print(f"{name}: done in {time.monotonic() - began:.0f} s", flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        for ended in [pool.submit(run, name) for name in runs]:
            ended.result()


def folder_of(words: Sequence[str]) -> Path:
    return run_dir.folder(compose(words).run)


def of_site(campaign: Campaign, site: Site) -> list[str]:
    tokenizer = Path(site.folder).absolute() / "tokenizer"
    lines = [*campaign.train, *site.overrides, "model=from_path", f"tokenizer.path={tokenizer}"]
    lines += [f"training.global_batch_samples={campaign.batch_samples}"]
    lines += ["training.device_batch_samples=null"]
    return [*lines, f"folders.prepared={Path(site.folder).absolute() / 'prepared'}"]


def alone(campaign: Campaign, site: Site, start: Path) -> list[str]:
    """The same model, steps and samples as in the campaign, without the others."""
    steps = campaign.rounds * campaign.steps
    own = [f"name=alone-{site.name}", f"model.source={start}", f"training.steps={steps}"]
    return [*of_site(campaign, site), *own, "training.epochs=null"]


def write_union(campaign: Campaign, start: Path, folder: Path) -> None:
    """The documents of all facilities as text files, those that they hold out in another folder."""
    for site in campaign.sites:
        run = compose(alone(campaign, site, start)).run
        corpus, share = train_corpus(run.data), run.data.validation.fraction or 0.0
        split = SplitCorpus(corpus, ("train", "validation"), share, run.seed)
        for block in blocks.blocks(corpus, run.data.documents_per_shard):
            held_out = split.held_out(block.first_document, block.documents).tolist()
            texts = blocks.read(corpus, block)[0]
            for n, (text, is_held_out) in enumerate(zip(texts, held_out, strict=True)):
                part = folder / ("validation" if is_held_out else "train")
                name = f"{site.name}-{block.first_document + n:05d}.txt"
                run_dir.write_whole(part / name, text)


def one_machine(campaign: Campaign, union: Path, start: Path) -> list[str]:
    """The training text of all, as many steps, and in each the samples of all, a rank for each."""
    words = alone(campaign, campaign.sites[0], start)
    own = ["name=one-machine", "data=text_files", f"data.files=[{union / 'train'}]"]
    own += ["data.validation.fraction=null", f"data.validation.files=[{union / 'validation'}]"]
    count = len(campaign.sites)
    own += [f"training.global_batch_samples={campaign.batch_samples * count}"]
    own += [f"ranks_per_node={count}", "sharding=ddp"]
    return [*words, *own, f"folders.prepared={union / 'prepared'}"]


def judged(campaign: Campaign, models: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Model -> facility -> the result of the model on its held-out text."""
    pairs = [(name, site) for name in models for site in campaign.sites]
    judges = {
        f"{name} on {site.name}": judge(campaign, site, name, models[name]) for name, site in pairs
    }
    side_by_side(judges, "evaluate", len(os.sched_getaffinity(0)))
    table: dict[str, dict[str, Any]] = {name: {} for name in models}
    for (name, site), words in zip(pairs, judges.values(), strict=True):
        result = run_dir.result_file(folder_of(words))
        table[name][site.name] = json.loads(result.read_text())
    return table


def judge(campaign: Campaign, site: Site, name: str, model: Path) -> list[str]:
    """Loss on a facility's whole held-out text, and its number of targets."""
    run = f"judge-{name.replace(' ', '-')}-on-{site.name}"
    own = [f"name={run}", f"model.source={model}", "evaluation.max_samples=null"]
    return [*of_site(campaign, site), *own]


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
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        sys.exit(INTERRUPTED)
