"""Blocks through torch.compile."""

from typing import Any

import torch
from torch import nn

# Of all blocks together, which share their code: packed or whole samples, all or the last few of
# an evaluation, training or not, deterministic or not, for each kind of layer. Beyond torch's own
# limit of 8 a block that has to be one graph is an error.
GRAPHS = 64


def compile_blocks(blocks: list[nn.Module], one_graph: bool, backend: Any = "inductor") -> None:
    """Compile each block: as one graph, or in pieces around what torch does not compile.

    In pieces (documents with calls of their own, `causal_lm.in_one_call`) each number of documents
    is another graph: there torch's own limit stays, beyond which it runs them as they are.
    """
    if one_graph:
        config: Any = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, GRAPHS)
    for block in blocks:
        block.compile(fullgraph=one_graph, backend=backend)
