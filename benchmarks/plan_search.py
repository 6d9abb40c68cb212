"""How many layouts the planner prices, and how long that takes on the login node.

python benchmarks/plan_search.py [--check]
"""

import argparse
import sys
import time
from pathlib import Path

from atoll.config.compose import compose, config_tree, known_shape, shardings
from atoll.plan.search import best_layout, layouts

LIMIT_SECONDS = 2.0
PAGE = Path(__file__).resolve().parents[1] / "docs" / "planner.md"
BEGIN, END = "<!-- plan_search: made by make bench-plan_search -->", "<!-- plan_search: end -->"
JOBS = (
    ["facility=leonardo", "experiment=llama2_7b_it", "nodes=4"],
    ["facility=leonardo", "experiment=llama2_7b_it", "nodes=64"],
    ["facility=karolina", "experiment=llama2_7b_cs", "nodes=8"],
    ["facility=lumi", "model=llama2_7b", "nodes=128", "training.global_batch_samples=4096"],
)


def main() -> int:
    """Write the table; 1 where a search took too long and that was asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail beyond two seconds")
    check = parser.parse_args().check
    lines, longest = ["| job | layouts | seconds | chosen |", "|---|---|---|---|"], 0.0
    tree = shardings(config_tree())
    for words in JOBS:
        run = compose(words).run
        shape = known_shape(run)
        count = sum(1 for _ in layouts(run, shape, tree))
        started = time.monotonic()
        chosen = best_layout(run, shape, tree)
        seconds = time.monotonic() - started
        longest = max(longest, seconds)
        job, layout = " ".join(words), " ".join(chosen.overrides)
        lines.append(f"| `{job}` | {count:,} | {seconds:.2f} | `{layout}` |")
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text("\n".join([before + BEGIN, *lines, END + rest.split(END)[1]]))
    print("\n".join(lines))
    return int(check and longest > LIMIT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
