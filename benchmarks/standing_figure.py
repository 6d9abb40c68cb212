"""A figure of the report's as a file that stands alone on a page."""

import re

from atoll.report.drawing import Curves
from atoll.report.html import ON_LIGHT

# as on the report's page
STYLE = (
    "<style>svg{{font:13px system-ui,sans-serif;overflow:visible;background:#ffffff}}"
    "text{{fill:#1b2a33}}line{{stroke:#d5dbe0}}.saved{{display:inline}}"
    "{colours}.marks,.line{{fill:none}}.line{{stroke-width:2;stroke:currentColor}}</style>"
)


def standing(curves: Curves) -> str:
    """SVG, with its legend and its colours."""
    colours = "".join(f".c{n}{{color:{colour};fill:{colour}}}" for n, colour in enumerate(ON_LIGHT))
    head, begin, rest = curves.drawn().svg().partition("<title>")
    head = re.sub(r'viewBox="[^"]*"(.*) data-full="([^"]*)"', r'viewBox="\2"\1', head)
    return head + STYLE.format(colours=colours) + begin + rest + "\n"
