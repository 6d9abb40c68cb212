"""How updates become the next global model, and what is refused on the way."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from atoll.errors import UserError
from atoll.settings.fields import Count, CountOrZero, Fraction, Positive, Settings, Word


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
    # rounds that an update may be late, and what that takes off its weight: (1 + rounds)^-exponent
    # (FedAsync, Xie et al. 2019, the polynomial rule)
    max_staleness: CountOrZero = 0
    staleness_exponent: Annotated[float, Field(ge=0.0)] = 0.5
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # of the export
    quorum: Count = 1


class Site(Settings):
    """One facility of a campaign: how it is reached, and what its runs say that others' do not."""

    name: Word
    host: str | None = None  # as ssh knows it; null: this machine
    folder: str  # where the campaign lives there
    command: list[str] = []  # atoll there; empty: as here
    overrides: list[str] = []  # facility=…, data=…
    signing_key: str | None = None  # a private ssh key's path there


class Campaign(Settings):
    """Rounds of training at several facilities, and of averaging here."""

    name: Word
    rounds: Count = 5
    # local: asked in turn, over ssh or on this machine; streamflow: a workflow for each round
    engine: Literal["local", "streamflow"] = "local"
    folder: str = "campaigns"
    sites: Annotated[list[Site], Field(min_length=1)]
    start: list[str]  # of the run that makes, or fetches, the model of round 0
    train: list[str] = []  # of every facility's runs
    steps: Count = 100  # of each facility in a round
    batch_samples: Count = 64
    rule: Rule = Rule()
    codec: Literal["fp32", "bf16", "int8", "int4", "topk"] = "int8"
    global_codec: Literal["fp32", "bf16", "int8", "int4"] = "bf16"
    deadline_minutes: Positive = 1440.0
    target_loss: Positive | None = None
    poll_seconds: Positive = 30.0
    attempts: Count = 3  # of a facility's job, and of a transfer, in a round
    allowed_signers: str | None = None  # ssh-keygen's file; null: updates are not signed
    ssh_options: list[str] = []


AnySettings = TypeVar("AnySettings", Rule, Campaign)


def checked_settings(
    kind: type[AnySettings], values: dict[str, Any], prefix: str, hint: str
) -> AnySettings:
    """Plain values to settings; `UserError` names the first that is wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = prefix + ".".join(map(str, first["loc"]))
        raise UserError(f"{name}: {first['msg']} ({first['input']!r})", hint) from None
