"""Blocks through torch.compile."""

from typing import Any

from torch import nn


def compile_blocks(blocks: list[nn.Module], one_graph: bool, backend: Any = "inductor") -> None:
    """Compile each block: as one graph, or in pieces around what torch does not compile.

    In pieces where documents have calls of their own (`causal_lm.in_one_call`).
    """
    for block in blocks:
        block.compile(fullgraph=one_graph, backend=backend)
