"""The demo campaign with updates in fp32, bf16 and int8: their bytes, and the loss it ends with.

    python benchmarks/codecs_over_rounds.py [--rounds 5] [--steps 20]

The loss is of the last global model on the union of the facilities' held-out texts. The model
travels in the other direction in fp32, so that the codec of the updates is all that differs.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from federation_against_alone import atoll, judged

from atoll.host.campaign import checked_campaign
from atoll.host.compose import campaign_values

CODECS = ("fp32", "bf16", "int8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("runs/codecs"))
    arguments = parser.parse_args()
    folder, found = arguments.folder.absolute(), {}
    for codec in CODECS:
        (folder / codec).mkdir(parents=True, exist_ok=True)
        os.chdir(folder / codec)
        found[codec] = measured(codec, arguments.rounds, arguments.steps)
    size, loss = found["fp32"]
    print(f"{'codec':6}{'bytes':>12}{'of fp32':>9}{'of bf16':>9}{'loss':>10}{'of fp32':>9}")
    for codec, (bytes_, final) in found.items():
        cells = f"{bytes_ / size:9.4f}{bytes_ / found['bf16'][0]:9.4f}{final:10.5f}"
        print(f"{codec:6}{bytes_:12,}{cells}{final / loss:9.5f}")
    return 0


def measured(codec: str, rounds: int, steps: int) -> tuple[int, float]:
    """Bytes of all updates of a campaign, and the loss of its last model on the union."""
    lines = ["federation=demo", f"name=codec-{codec}", f"codec={codec}", "global_codec=fp32"]
    lines += [f"rounds={rounds}", f"steps={steps}"]
    campaign = checked_campaign(campaign_values(lines))
    atoll("federate", *lines)
    home = Path(campaign.folder).absolute() / campaign.name
    events = [json.loads(line) for line in (home / "events.jsonl").read_text().splitlines()]
    size = sum(one["bytes"] for one in events if one["event"] == "received")
    model = home / f"round-{rounds:03d}" / "global" / "export"
    rows = [judged(campaign, site, f"{codec}-last", model) for site in campaign.sites]
    targets = sum(row["targets"] for row in rows)
    return size, sum(row["loss"] * row["targets"] for row in rows) / targets


if __name__ == "__main__":
    sys.exit(main())
