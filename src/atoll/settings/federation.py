"""How updates become the next global model, and what is refused on the way."""

import os
import posixpath
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from atoll.errors import UserError, printable
from atoll.settings.exchange import SPARSE_CODECS, Codec, FragmentPattern, InnerState
from atoll.settings.fields import Count, CountOrZero, Fraction, Positive, Settings, Word
from atoll.settings.learning import Lora
from atoll.settings.machine import (
    GIVEN,
    option_values,
    refuse_secret_name,
    refuse_secrets,
)

# steps of which a delta has the same part whether it comes in time or later
LINEAR_STEPS = ("replace", "momentum", "nesterov")


class Rule(Settings):
    """weigh x combine x update, the rule of one campaign.

    FedAvg: capped, mean, replace. FedAdam: capped, mean, adam. DiLoCo: capped, mean, nesterov with
    rate 0.7 and beta1 0.9.
    """

    # capped: by tokens, which a facility counts itself, but nobody has more than `cap` of the whole
    weigh: Literal["tokens", "steps", "equal", "capped"] = "capped"
    # of capped: the largest share of the whole that one facility has, if enough others are there
    cap: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    # how the facilities' values become one
    combine: Literal["mean", "median", "trimmed_mean", "krum"] = "mean"
    trim: CountOrZero = 1  # of trimmed_mean: values left out at each end
    krum_bad: CountOrZero = 0  # of krum: facilities that may be bad
    clip_norm: Positive | None = None  # longer updates are shortened to this norm; null: none is
    # how the combined update is taken by the global model
    update: Literal["replace", "momentum", "nesterov", "adam", "yogi"] = "replace"
    # of that step; 1 with replace: the model becomes the combined one
    learning_rate: Positive = 1.0
    beta1: Fraction = 0.9  # of all but replace: decay of its average of updates
    beta2: Fraction = 0.99  # of adam and yogi: decay of the average of squares
    tau: Positive = 1e-3  # of adam and yogi: added to the root of that average
    # an update so many times longer than the others', or than those of earlier rounds, is left out
    max_norm_ratio: Positive = 10.0
    # so is one that points away from the sum of the others by more than this, and from it without
    # any one of them
    min_cosine: Annotated[float, Field(ge=-1.0, le=1.0)] = -0.5
    max_staleness: CountOrZero = 0  # rounds that an update may be late
    # a late update's weight is times (1 + rounds late)^-exponent (FedAsync, Xie et al. 2019)
    staleness_exponent: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.5
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # of the export
    quorum: Count = 1  # the fewest facilities whose updates make a round
    # where fewer are left: ask those again whose updates were left out, and stop when they have
    # failed; wait for them, round the clock; or hold the model, and go on with the next round
    below_quorum: Literal["ask", "wait", "hold"] = "ask"
    # parts of the model, of which one travels in each round, in turn, while the others go on at
    # each facility (Streaming DiLoCo); 1: the whole model travels in every round
    fragments: Annotated[int, Field(ge=1, le=1000)] = 1
    # which layers are in one: every so many-th, or neighbours
    fragment_pattern: FragmentPattern = "strided"
    # rounds that a facility trains on before it takes the averaged fragment, so that waiting
    # for others and averaging cost no time of it; fewer than `fragments`
    overlap_rounds: CountOrZero = 0
    # how much of its own value a facility keeps where it takes the averaged one; 0: none
    merge_alpha: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0

    def fragment(self, number: int) -> int:
        """The one that travels in a round."""
        return (number - 1) % self.fragments

    @property
    def keeps_own_weights(self) -> bool:
        """Whether a facility begins a round with weights of its own, beside the model's."""
        return self.fragments > 1 or self.merge_alpha > 0.0

    @property
    def least_updates(self) -> int:
        """The fewest that `combine` can bear its bad ones among."""
        return {"trimmed_mean": 2 * self.trim + 1, "krum": 2 * self.krum_bad + 3}.get(
            self.combine, 1
        )

    @model_validator(mode="after")
    def _fragments_can_be_told_apart(self) -> "Rule":
        if self.overlap_rounds >= self.fragments:
            raise ValueError(
                f"overlap_rounds={self.overlap_rounds} with fragments={self.fragments}: a fragment "
                "would be sent again before it was taken; set rule.fragments to "
                f"{self.overlap_rounds + 1} or more"
            )
        if self.fragments == 1 or not self.max_staleness:
            return self
        if self.overlap_rounds and self.below_quorum == "hold":
            raise ValueError(
                f"overlap_rounds={self.overlap_rounds} with max_staleness={self.max_staleness} and "
                "below_quorum=hold: late work of a held round would be counted twice",
                "choose below_quorum=ask or wait, or max_staleness=0",
            )
        if self.combine != "mean" or self.update not in LINEAR_STEPS:
            raise ValueError(
                f"combine={self.combine}, update={self.update} and fragments={self.fragments} "
                "cannot add what comes late to a fragment that was averaged before; set "
                f"max_staleness to 0, or combine=mean and update to one of {LINEAR_STEPS}"
            )
        return self


def refuse_too_many_fragments(fragments: int, layers: int) -> None:
    if fragments > max(1, layers):
        raise UserError(
            f"rule.fragments={fragments} of a model of {layers} layers",
            f"a fragment is a layer or more: set rule.fragments to {max(1, layers)} or fewer",
        )


# Words of a command line that are never taken for options, nor end a line
Plain = Annotated[
    str, Field(min_length=1, max_length=4096, pattern=r"^[^-\x00-\x1f\x7f][^\x00-\x1f\x7f]*$")
]
Host = Annotated[
    str,
    Field(
        max_length=255, pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_\[][A-Za-z0-9_.:\]-]*$"
    ),
]
RESERVED = {
    "global",
    "losses",
    "untrained",
    "journal.jsonl",
    "run.yaml",
}  # beside facilities in a round


# What a run's words may name that is handed to programs or exported, and what is given in it
HANDED_ON = re.compile(r"[+~]*(facility|folders|image\.run_flags|image=.*run_flags)\b")
NAMED = re.compile(r"(?:^|[.{,\s'\"])([A-Za-z_][A-Za-z0-9_]*)['\"]?\s*[=:]")
NO_SECRET = {
    "kept": "campaign.json and requests",
    "hint": "export {name} at the facility, where its login shell reads it (.bashrc)",
}


def refuse_secret_words(setting: str, words: list[str]) -> list[str]:
    """Raise `ValueError` where words of a run give a variable that looks like a secret."""
    for word in words:
        for name in [*NAMED.findall(word), *GIVEN.findall(word)] if HANDED_ON.match(word) else []:
            refuse_secret_name(f"{setting} gives {name}, which", name, **NO_SECRET)
    return words


def _without_tilde(path: str, host: str | None) -> str:
    """A path in the home folder as it is meant: no shell reads it, and ssh begins there."""
    name, _, rest = path.partition("/")
    if not name.startswith("~"):
        return path
    if name != "~" or not rest:
        raise ValueError(f"{path}: no shell reads it; give the whole path")
    return rest if host is not None else os.path.expanduser(path)


class Site(Settings):
    """One facility of a campaign: how it is reached, and what its runs say that others' do not."""

    name: Word  # of the facility, in this campaign
    host: Host | None = None  # as ssh knows it; null: this machine
    folder: Plain  # where the campaign lives there
    command: list[str] = []  # atoll there; empty: as here
    overrides: list[str] = []  # facility=…, data=…
    signing_key: str | None = None  # a private ssh key's path there

    @field_validator("folder", "command")
    @classmethod
    def _is_of_a_home(cls, value: Any, info: ValidationInfo) -> Any:
        host = info.data.get("host")
        if isinstance(value, str):
            return _without_tilde(value, host)
        return [_without_tilde(word, host) for word in value[:1]] + value[1:]

    @property
    def place(self) -> str:
        """The folder, however it is written; links aside."""
        return (
            os.path.abspath(self.folder) if self.host is None else posixpath.normpath(self.folder)
        )

    @model_validator(mode="after")
    def _gives_no_secret(self) -> "Site":
        refuse_secrets(f"the command of {self.name}", self.command, **NO_SECRET)
        refuse_secret_words(f"the overrides of {self.name}", self.overrides)
        return self


class Campaign(Settings):
    """Rounds of training at several facilities, and of averaging here."""

    name: Word  # of the campaign, as its folder is called
    rounds: Count = 5  # of training and combining
    # local: asked in turn, over ssh or on this machine; streamflow: a workflow for each round
    engine: Literal["local", "streamflow"] = "local"
    folder: str = "campaigns"  # in which campaigns lie here
    sites: Annotated[list[Site], Field(min_length=1)]  # the facilities that take part
    start: list[str]  # of the run that makes, or fetches, the model of round 0
    train: list[str] = []  # of every facility's runs
    # of each facility in a round; of fragments, each is averaged once in `rule.fragments` rounds
    steps: Count = 100
    # fixed: every facility takes `steps`; queue: as many in the mean, and all end together, by what
    # queue, start, transfers and a step took each of them in earlier rounds
    steps_by: Literal["fixed", "queue"] = "fixed"
    # of queue: nobody takes more than `steps` x this, nor fewer than `steps` / this
    steps_span: Annotated[float, Field(ge=1.0, le=100.0)] = 4.0
    batch_samples: Count = 64  # of a step, at each facility
    # the learning rate follows one schedule over so many rounds; null: those it is begun with
    schedule_rounds: Count | None = None
    # adapters alone learn and travel; each facility has the model itself, which `train` names
    lora: Lora | None = None
    inner_state: InnerState = "kept"  # moments of a facility's optimizer, from round to round
    keep_checkpoints: Count = 2  # rounds whose checkpoints stay at a facility
    rule: Rule = Rule()
    codec: Codec = "int8"  # how updates are encoded on their way here
    # how the global model is encoded on its way to the facilities
    global_codec: Literal["fp32", "bf16", "int8", "int4"] = "bf16"
    deadline_minutes: Positive = 1440.0  # of a round
    # held-out loss (nats a token) at which the campaign ends, once more than half of the facilities
    # say theirs, and the upper half of these has reached it; null: all rounds
    target_loss: Positive | None = None
    # of the model of the last round, too: facilities are asked once more, and train nothing
    last_loss: bool = True
    # who is at work at the deadline may end it, and what is on its way may come
    grace_minutes: Positive = 15.0
    poll_seconds: Positive = 30.0  # between two questions to a facility
    attempts: Count = 3  # of a facility's job, and of a transfer, in a round
    allowed_signers: str | None = None  # ssh-keygen's file; null: updates are not signed
    signing_key: str | None = None  # a private ssh key here, by which the model's proof is signed
    ssh_options: list[str] = []  # words for ssh and rsync's ssh, to every facility

    @field_validator("folder")
    @classmethod
    def _is_here(cls, folder: str) -> str:
        return _without_tilde(folder, None)

    @model_validator(mode="after")
    def _gives_no_secret(self) -> "Campaign":
        refuse_secrets("ssh_options", option_values(self.ssh_options), **NO_SECRET)
        refuse_secret_words("start", self.start)
        refuse_secret_words("train", self.train)
        return self

    @model_validator(mode="after")
    def _facilities_are_told_apart(self) -> "Campaign":
        names = [site.name.lower() for site in self.sites]
        places = [(site.host, site.place) for site in self.sites]
        for site, place in zip(self.sites, places, strict=True):
            if site.name.lower() in RESERVED:
                raise ValueError(f"a facility cannot be called {site.name}")
            if names.count(site.name.lower()) > 1:
                raise ValueError(f"two facilities are called {site.name}")
            if places.count(place) > 1:
                raise ValueError(
                    f"two facilities share {site.folder} on {site.host or 'this machine'}",
                    "give each a folder of its own: sites[…].folder",
                )
        return self

    @model_validator(mode="after")
    def _facilities_are_enough(self) -> "Campaign":
        rule, count = self.rule, len(self.sites)
        if rule.quorum > count:
            raise ValueError(
                f"rule.quorum={rule.quorum}, and there are {count} facilities",
                f"set rule.quorum to {count} or fewer; once it has begun, name {rule.quorum} sites",
            )
        if rule.least_updates > count:
            raise ValueError(
                f"rule.combine={rule.combine} with trim={rule.trim} and krum_bad={rule.krum_bad} "
                f"needs {rule.least_updates} facilities, and there are {count}",
                "choose rule.combine=mean; once it has begun, name as many sites",
            )
        return self

    @model_validator(mode="after")
    def _encoding_suits_the_step(self) -> "Campaign":
        if self.codec not in SPARSE_CODECS:
            return self
        if self.rule.update != "replace":
            raise ValueError(
                f"codec={self.codec} with rule.update={self.rule.update} learns less than either "
                "alone: what arrives late is carried on twice; choose codec=int4, or "
                "rule.update=replace"
            )
        if self.rule.combine in ("median", "trimmed_mean"):
            raise ValueError(
                f"codec={self.codec} with rule.combine={self.rule.combine}: where one facility "
                "sends a value the others send none, and next to nothing is left; choose "
                "codec=int4, or rule.combine=mean"
            )
        return self

    @model_validator(mode="after")
    def _engine_can_overlap(self) -> "Campaign":
        if self.engine == "streamflow" and self.rule.overlap_rounds:
            raise ValueError(
                f"engine=streamflow with rule.overlap_rounds={self.rule.overlap_rounds}: each "
                "round is a workflow of its own, which ends before the next; choose engine=local, "
                "or rule.overlap_rounds=0"
            )
        return self


AnySettings = TypeVar("AnySettings", Rule, Campaign)


def checked_settings(
    kind: type[AnySettings], values: dict[str, Any], prefix: str, hint: str
) -> AnySettings:
    """Plain values to settings; `UserError` names the first that is wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        reason = first.get("ctx", {}).get("error")
        if isinstance(reason, ValueError) and len(reason.args) == 2:  # found, and how to mend it
            raise UserError(*reason.args) from None
        if isinstance(reason, ValueError) and not first["loc"]:  # of several settings together
            raise UserError(printable(str(reason), 500), hint) from None
        name = prefix + ".".join(map(str, first["loc"]))
        given = printable(repr(first["input"]), 200)
        raise UserError(f"{name}: {first['msg']} ({given})", hint) from None
