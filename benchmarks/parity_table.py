"""Every strategy against one process, as the table of docs/architecture.md.

    python benchmarks/parity_table.py [--write]

Four gloo ranks, five steps, fp32: the largest difference of a loss, and of a weight at the end,
from one process with the same batches. `--write` puts the table between its marks in the document.
"""

import argparse
import sys
from pathlib import Path

CLONE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CLONE / "tests"), str(CLONE / "tests" / "sharding")]

import test_parity  # noqa: E402
from rank_pool import RankPool  # noqa: E402

BEGIN, END = "<!-- parity: make bench-parity_table ARGS=--write -->\n", "<!-- end of parity -->"


def cell(ranks: RankPool, strategy: test_parity.Strategy, family: str) -> str:
    """Loss and weight difference of one strategy and family."""
    if family not in strategy.families:
        return "refused"
    reference = test_parity.one_process(family, 1.0, strategy.untied)
    got = ranks.run(test_parity.train, test_parity.chosen(strategy, family), 1.0)[0]
    losses = max(abs(a - b) for a, b in zip(got[0], reference[0], strict=True))
    weights = max(float((got[2][n] - w).abs().max()) for n, w in reference[2].items())
    return f"{losses:.0e}, {weights:.0e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/architecture.md")
    arguments = parser.parse_args()
    families = list(test_parity.CONFIGS)
    rows = [f"| strategy | {' | '.join(families)} |", f"|---|{'---|' * len(families)}"]
    ranks = RankPool()
    try:
        for strategy in test_parity.STRATEGIES:
            cells = [cell(ranks, strategy, family) for family in families]
            rows.append(f"| `{strategy.words}` | {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    finally:
        ranks.close()
    if arguments.write:
        document = CLONE / "docs" / "architecture.md"
        before, _, rest = document.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        document.write_text(before + BEGIN + "\n".join(rows) + "\n" + END + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
