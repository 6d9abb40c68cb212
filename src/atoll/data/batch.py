"""A microbatch of packed documents.

Legend: B samples, T tokens of a sample, S segments (pieces of documents, and padding).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

TENSORS = ("tokens_BT", "labels_BT", "positions_BT", "segment_ends", "classes_B", "reference_B2")


@dataclass(frozen=True)
class Batch:
    """Tokens with their targets, and where one document ends and the next begins.

    labels_BT are already shifted: the target of a token is the next one of the same segment,
    -100 where there is none. segment_ends counts over the flattened B*T tokens; a segment never
    crosses samples.
    """

    tokens_BT: Tensor  # int64
    labels_BT: Tensor  # int64
    positions_BT: Tensor  # int64, from 0 in every segment
    segment_ends: Tensor  # int32 [S+1], first 0, last B*T
    segment_lengths: tuple[int, ...]  # the same on the host, S numbers
    useful_tokens: int  # tokens that are not padding
    classes_B: Tensor | None = None  # fp32: the index of each sample's label, or its score
    reference_B2: Tensor | None = None  # fp32: log-probabilities of a pair, as the run began
    seed: int | None = None  # of its dropout, so that who computes it makes no difference

    def to(self, device: torch.device) -> "Batch":
        if device.type == "cpu":
            return self
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in TENSORS
            if getattr(self, name) is not None
        }
        return replace(self, **moved)
