"""The demo campaign with updates in fp32, bf16 and int8: their bytes, and the loss it ends with.

    python benchmarks/codecs_over_rounds.py [--rounds 5] [--steps 20] [--learning-rate 5e-4]
        [--codecs fp32 bf16 int8] [--check]

The loss is of the last global model on the union of the facilities' held-out texts. The model
travels in the other direction in fp32, so that the codec of the updates is all that differs. The
campaigns begin with the same weights and read the same samples. A codec that is not given its own
campaign is not compared with. The rate is a quarter of the demo's: at that one so young a model
learns so unevenly that two campaigns differ by more than their codecs.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import results
from federation_against_alone import judged

from atoll.campaign.store import checked_campaign, load_store
from atoll.config.compose import campaign_values

CODECS = ("fp32", "bf16", "int8")
RATE = "optimizer.learning_rate"
# of the bytes and of the loss of each, what int8 may have
TARGETS = {"fp32": (0.27, 1.005), "bf16": (0.52, None)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=CODECS)
    parser.add_argument("--folder", type=Path, default=Path("runs/codecs"))
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    arguments = parser.parse_args()
    folder, measured_by_codec = arguments.folder.absolute(), {}
    for codec in {*arguments.codecs, "int8"}:
        (folder / codec).mkdir(parents=True, exist_ok=True)
        os.chdir(folder / codec)
        measured_by_codec[codec] = measured(codec, arguments)
    rows, (size, loss) = [], measured_by_codec.pop("int8")
    for peer, (bytes_, final) in measured_by_codec.items():
        of_bytes, of_loss = TARGETS[peer]
        case = f"int8, {arguments.rounds} rounds"
        values = ("MB", [size / 1e6], f"updates in {peer}", [bytes_ / 1e6])
        rows.append(results.row(f"{case}: updates", *values, "lower", of_bytes))
        values = ("nats", [loss], f"updates in {peer}", [final])
        rows.append(results.row(f"{case}: held-out loss", *values, "lower", of_loss))
    return int(not results.record("codecs_over_rounds", rows) and arguments.check)


def measured(codec: str, arguments: argparse.Namespace) -> tuple[int, float]:
    """Bytes of all updates of a campaign, and the loss of its last model on the union."""
    lines = ["federation=demo", f"name=codec-{codec}", f"codec={codec}", "global_codec=fp32"]
    lines += [f"rounds={arguments.rounds}", f"steps={arguments.steps}"]
    given = campaign_values(lines)["train"]
    words = [word for word in given if not word.startswith(RATE)]
    lines.append(f"train={json.dumps([*words, f'{RATE}={arguments.learning_rate}'])}")
    campaign = checked_campaign(campaign_values(lines))
    subprocess.run([sys.executable, "-m", "atoll", "federate", *lines], check=True)
    home = Path(campaign.folder).absolute() / campaign.name
    journals = [load_store(home).journal(number + 1) for number in range(arguments.rounds)]
    received = [record for journal in journals for record in journal.records("received")]
    size = sum(record["bytes"] for record in received)
    model = home / f"round-{arguments.rounds:03d}" / "global" / "export"
    rows = judged(campaign, {f"{codec} last": model})[f"{codec} last"].values()
    targets = sum(row["targets"] for row in rows)
    return size, sum(row["loss"] * row["targets"] for row in rows) / targets


if __name__ == "__main__":
    sys.exit(main())
