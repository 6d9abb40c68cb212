"""How updates become the next global model, and what is refused on the way."""

from typing import Annotated, Literal

from pydantic import Field

from atoll.settings.fields import Count, CountOrZero, Fraction, Positive, Settings


class Rule(Settings):
    """weigh x combine x update, the rule of one campaign.

    FedAvg: tokens, mean, replace. FedAdam: tokens, mean, adam. DiLoCo: tokens, mean, nesterov with
    rate 0.7 and beta1 0.9.
    """

    weigh: Literal["tokens", "steps", "equal", "capped"] = "tokens"
    cap: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    combine: Literal["mean", "median", "trimmed_mean", "krum"] = "mean"
    trim: CountOrZero = 1
    krum_bad: CountOrZero = 0
    clip_norm: Positive | None = None
    update: Literal["replace", "momentum", "nesterov", "adam", "yogi"] = "replace"
    learning_rate: Positive = 1.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.99
    tau: Positive = 1e-3
    # an update so many times longer than the median of all is left out
    max_norm_ratio: Positive = 10.0
    # nor one that points away from the sum of the others by more than this
    min_cosine: Annotated[float, Field(ge=-1.0, le=1.0)] = -0.5
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # of the export
    quorum: Count = 1
