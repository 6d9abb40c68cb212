"""Draw docs/images/overview.svg: one command, the facilities of this version, one model.

python docs/images/overview.py
"""

import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
FIGURE = Path(__file__).with_name("overview.svg")
# aurora's jobs are refused: there is no image for its devices yet
LEFT_OUT = ("aurora", "generic_slurm", "laptop", "ssh_hosts", "testbed", "testbed_pbs")
COMMAND = "sbatch/train.sbatch facility=… model=… nodes=…"
WIDTH, COLUMNS = 760, 4


def main() -> int:
    FIGURE.write_text(picture(facilities()))
    return 0


def facilities() -> list[str]:
    files = sorted((ROOT / "hydra_conf" / "facility").glob("*.yaml"))
    return ["laptop", *(path.stem for path in files if path.stem not in LEFT_OUT)]


def picture(names: list[str]) -> str:
    """SVG: the command above, an island for each facility, the model below."""
    rows = -(-len(names) // COLUMNS)
    bottom = 120 + 46 * rows
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 90}" role="img"'
        ' font-family="system-ui, sans-serif" font-size="15" text-anchor="middle">',
        "<title>One command, many facilities, one model</title>",
        f'<rect width="{WIDTH}" height="{bottom + 90}" rx="8" fill="#ffffff"/>',
        box(WIDTH // 2, 20, 560, 40, "#1b2a33", COMMAND, "monospace"),
        arrow(60, 96),
    ]
    for at, name in enumerate(names):
        x = 106 + (WIDTH - 28) // COLUMNS * (at % COLUMNS)
        parts.append(box(x, 104 + 46 * (at // COLUMNS), 170, 36, "#0b7285", name))
    parts += [
        arrow(bottom - 8, bottom + 24),
        box(WIDTH // 2, bottom + 30, 560, 40, "#2b8a3e", "one Hugging Face model, one report"),
        "</svg>",
        "",
    ]
    return "\n".join(parts)


def box(centre: int, y: int, width: int, height: int, colour: str, text: str, font="") -> str:
    family = f' font-family="{font}"' if font else ""
    return (
        f'<rect x="{centre - width // 2}" y="{y}" width="{width}" height="{height}" rx="8"'
        f' fill="{colour}"/><text x="{centre}" y="{y + height // 2 + 5}" fill="#ffffff"{family}>'
        f"{escape(text)}</text>"
    )


def arrow(start: int, end: int) -> str:
    x = WIDTH // 2
    return (
        f'<path d="M{x} {start} V{end} m-6 -8 l6 8 l6 -8" fill="none" stroke="#1b2a33"'
        ' stroke-width="2"/>'
    )


if __name__ == "__main__":
    sys.exit(main())
