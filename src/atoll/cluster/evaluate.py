"""`atoll evaluate KEY=VALUE …`: a run of no steps, which only says how good its model is."""

import sys

from atoll.cluster import submit
from atoll.errors import UserError

USAGE = """usage: atoll evaluate [--dry-run] [--here] model.source=FOLDER data=… KEY=VALUE …

Perplexity (task=causal_lm) or the metrics of the data set (task=classification) on its held-out
part, anywhere a run may go. The last line of the run's metrics.jsonl holds them."""
NO_STEPS = ["training.steps=0", "training.epochs=null"]


def main(argv: list[str]) -> int:
    """Submit, or start here, a run that takes no step."""
    if not argv or set(argv) & {"--help", "-h"}:
        print(USAGE, file=sys.stdout)
        return 0
    steps = [word for word in argv if word.startswith(("training.steps=", "training.epochs="))]
    if steps:
        raise UserError(
            f"an evaluation takes no steps, and {steps[0]} asks for some", "leave it out"
        )
    return submit.main([*argv, *NO_STEPS])
