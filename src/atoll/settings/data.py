"""Where the text comes from, how it becomes documents, and how documents become batches."""

import math
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from atoll.settings.fields import (
    Count,
    CountOrZero,
    FileNames,
    Positive,
    Settings,
    Word,
)


class Validation(Settings):
    """The held-out text: a share of the documents, the end of each file, other files, a split."""

    # of the documents, drawn by the seed
    fraction: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    tail: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None  # of each file's characters
    files: FileNames = []  # of their own
    split: str | None = None  # of the dataset of the hub
    max_documents: CountOrZero | None = None  # of files or a split; 0 or null: all

    @model_validator(mode="after")
    def _one_way(self) -> "Validation":
        ways = [self.fraction, self.tail, self.files or None, self.split]
        if sum(way is not None for way in ways) != 1:
            raise ValueError("choose one of data.validation.fraction, .tail, .files, .split")
        return self


class Classes(Settings):
    """Rows of one or two texts and a label: an index, a name of `labels`, or (no labels) a score.

    Metrics are those of the GLUE benchmark (Wang et al. 2019).
    """

    # columns of one or two texts
    text_fields: Annotated[list[str], Field(min_length=1, max_length=2)]
    label_field: str = "label"  # column of the label
    labels: list[str] = []  # their names in order; none: the label is a score
    # computed on the held-out rows; f1: of two labels the second's, of more the mean of each one's
    metrics: list[Literal["accuracy", "f1", "matthews", "pearson", "spearman"]] = ["accuracy"]

    @model_validator(mode="after")
    def _metrics_are_of_labels(self) -> "Classes":
        of_labels = [name for name in self.metrics if name in ("accuracy", "f1", "matthews")]
        if of_labels and not self.labels:
            raise ValueError(
                f"data.classes.metrics has {', '.join(of_labels)}, and data.classes.labels is "
                "empty: the label is a score",
                "data.classes.metrics=[pearson,spearman], or name the labels: "
                "data.classes.labels=[…]",
            )
        return self


class Source(Settings):
    """One of several texts that are mixed; what it leaves unset is as `data` says."""

    name: Word  # its own, among the sources
    # its share of all tokens is this over the sum of all; or a curriculum, from step to weight
    weight: float | dict[int, float] = 1.0
    max_epochs: Positive | None = None  # passes over it that a run may take; null: any number
    source: Literal["python_stdlib", "files", "hub"] | None = None  # unset: by files and hub
    files: FileNames | None = None  # as data.files
    hub: str | None = None  # as data.hub
    hub_config: str | None = None  # as data.hub_config
    hub_split: str | None = None  # as data.hub_split
    hub_revision: str | None = None  # as data.hub_revision
    hub_files: dict[str, FileNames] | None = None  # as data.hub_files
    hub_shuffle_seed: CountOrZero | None = None  # as data.hub_shuffle_seed
    text_field: str | None = None  # as data.text_field
    quotes: bool | None = None  # as data.quotes
    document: Literal["file", "paragraph", "line"] | None = None  # as data.document
    format: Literal["text", "chat", "preference"] | None = None  # as data.format
    train_on: Literal["assistant", "last", "all"] | None = None  # as data.train_on
    long_conversations: Literal["cut", "drop"] | None = None  # as data.long_conversations
    template: str | None = None  # as data.template
    max_documents: CountOrZero | None = None  # as data.max_documents
    validation: Validation | None = None  # as data.validation

    @property
    def weights(self) -> dict[int, float]:
        """The weight from each step on, up to the next."""
        return self.weight if isinstance(self.weight, dict) else {0: self.weight}

    def weight_at(self, step: int) -> float:
        return self.weights[max(first for first in self.weights if first <= step)]

    @model_validator(mode="after")
    def _weights_are_shares(self) -> "Source":
        wrong = [w for w in self.weights.values() if not (w >= 0 and math.isfinite(w))]
        if wrong:
            raise ValueError(
                f"data.sources: {self.name} has the weight {wrong[0]:g}",
                "a weight is a share: 0 or more",
            )
        if min(self.weights, default=1) != 0:
            first = min(self.weights, default=None)
            begins = "is empty" if first is None else f"begins with step {first}"
            raise ValueError(
                f"data.sources: the curriculum of {self.name} {begins}",
                "say its weight from step 0 on: weight: {0: 1, 1000: 0.2}",
            )
        return self

    @model_serializer(mode="wrap")
    def _what_is_set(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}


class Data(Settings):
    """Where the text comes from, how it becomes documents, and how documents become batches."""

    name: Word  # its own, and that of its YAML
    sources: list[Source] = []  # several texts, mixed by weights; none: this one
    # the sources of Python on this machine, files of yours, or a dataset of the hub
    source: Literal["python_stdlib", "files", "hub"]
    files: FileNames = []  # of python_stdlib: patterns of modules, as email/*
    hub: str | None = None  # name of a dataset of the hub
    hub_config: str | None = None  # name of its configuration, where it has several
    hub_split: str = "train"  # that is trained on
    hub_revision: str | None = None  # a branch, tag or commit
    # split -> patterns of its files in the repository: where that holds a script, or much more
    hub_files: dict[str, FileNames] = {}
    hub_shuffle_seed: CountOrZero | None = None  # of both splits, before max_documents are taken
    text_field: str = "text"  # column or key of the text, or of the conversation
    quotes: bool = True  # fields of csv and tsv may stand in quotes; false: GLUE's own files
    document: Literal["file", "paragraph", "line"] = "file"  # what of a text file is one document
    # chat: a row is a conversation; preference: it has two answers, of which one is better
    format: Literal["text", "chat", "preference"] = "text"
    train_on: Literal["assistant", "last", "all"] = "assistant"  # of a conversation: whose tokens
    # more tokens than a sample: cut after the last answer that fits, or left out
    long_conversations: Literal["cut", "drop"] = "cut"
    classes: Classes | None = None
    template: str = "{text}"  # what is learned of each text; {text} stands for it
    bos: Literal["auto", "always", "never"] = "auto"  # before a document; auto: as the tokenizer
    max_documents: CountOrZero | None = None  # 0 or null: all
    validation: Validation
    # packing: several documents fill a sample; padding: one a sample
    batching: Literal["packing", "padding"] = "packing"
    # best_fit: documents stay whole where they fit; concat: one after another, cut anywhere
    packing: Literal["best_fit", "concat"] = "best_fit"
    sequence_tokens: Annotated[int, Field(ge=2)] = 512  # of a sample
    # of the files of tokens; an interrupted preparation loses one at most
    documents_per_shard: Count = 5_000
    workers: Count | None = None  # threads that tokenise; null: one for each core
    # training begins with so many shards while the rest is made, and mixes samples within as many;
    # null: with all of them
    window_shards: Count | None = None

    @model_validator(mode="after")
    def _template_holds_text(self) -> "Data":
        if "{text}" not in self.template:
            raise ValueError(f"data.template holds no {{text}}: {self.template!r}")
        return self

    @model_validator(mode="after")
    def _only_the_hub_is_shuffled(self) -> "Data":
        if self.hub_shuffle_seed is not None and self.source != "hub" and not self.sources:
            raise ValueError(
                f"data.hub_shuffle_seed={self.hub_shuffle_seed}, but data.source={self.source}",
                "data.hub_shuffle_seed=null: training shuffles whatever it reads",
            )
        return self

    @model_validator(mode="after")
    def _tail_of_whole_files(self) -> "Data":
        whole_files = (self.source, self.document) == ("files", "file")
        if self.validation.tail is not None and not (whole_files or self.sources):
            raise ValueError(
                f"data.validation.tail={self.validation.tail} cuts whole text files, and these "
                f"documents are otherwise (data.source={self.source} document={self.document})",
                "set data.source=files and data.document=file, or data.validation.fraction",
            )
        return self

    @model_validator(mode="after")
    def _rows_with_labels(self) -> "Data":
        if self.classes is not None and self.source == "python_stdlib":
            raise ValueError("data.classes needs rows with labels: data.source=files or hub")
        if self.classes is not None and self.batching != "padding":
            raise ValueError("rows with labels are padded, one a sample: data.batching=padding")
        return self

    @property
    def holds_conversations(self) -> bool:
        formats = [source.format or self.format for source in self.sources] or [self.format]
        return any(format != "text" for format in formats)

    @model_validator(mode="after")
    def _conversations_are_whole_rows(self) -> "Data":
        if self.sources or not self.holds_conversations:
            return self
        unfit = {
            "data.source=python_stdlib": self.source == "python_stdlib",
            "data.classes": self.classes is not None,
            f"data.template={self.template!r}": self.template != "{text}",
            "data.packing=concat": self.packing == "concat" and self.batching == "packing",
            "data.bos=always": self.bos == "always",
        }
        wrong = [name for name, present in unfit.items() if present]
        if wrong:
            raise ValueError(
                f"data.format={self.format} with {wrong[0]}: a conversation is a whole row, and "
                "the chat template alone says what stands around it",
                f"leave {wrong[0].partition('=')[0]} out, or set data.format=text",
            )
        return self

    @model_validator(mode="after")
    def _windows_are_read_as_they_come(self) -> "Data":
        bounded = [source.name for source in self.sources if source.max_epochs is not None]
        unfit = {
            "data.classes": self.classes is not None,
            f"data.format={self.format}": self.format == "preference",
            f"max_epochs of source {', '.join(bounded)}": bool(bounded),
        }
        wrong = [name for name, present in unfit.items() if present]
        if self.window_shards is not None and wrong:
            raise ValueError(
                f"data.window_shards={self.window_shards} with {wrong[0]}: that needs the number "
                "of all rows before training begins",
                "data.window_shards=null",
            )
        return self

    @property
    def each(self) -> list["Data"]:
        """The data of each source, as a run on it alone would have it; or this."""
        return [self._of(source) for source in self.sources] or [self]

    @property
    def curriculum(self) -> list[tuple[int, list[float]]]:
        """The weights of all sources, from each step on that changes one."""
        steps = sorted({step for source in self.sources for step in source.weights})
        return [(step, [source.weight_at(step) for source in self.sources]) for step in steps]

    def _of(self, source: Source) -> "Data":
        own = source.model_dump(exclude={"weight", "max_epochs"})
        kind = self.kind_of(source)
        shared = {
            name: value
            for name, value in self.model_dump(exclude={"sources", "files", "hub"}).items()
            if kind == "hub" or not name.startswith("hub")
        }
        if self.format == "text" and own.get("format") not in (None, "text"):
            shared["text_field"] = "text"  # the texts' column is none of turns
        try:
            return Data.model_validate(shared | own | {"source": kind})
        except ValidationError as error:
            first = error.errors()[0]
            found, *hint = first.get("ctx", {}).get("error", ValueError(first["msg"])).args
            raise ValueError(f"source {source.name}: {found}", *hint) from None

    def kind_of(self, source: Source) -> str:
        """Where a source comes from, said or not: python_stdlib, files or hub."""
        if source.source is not None or source.hub is not None:
            return source.source or "hub"
        return "files" if source.files and self.source == "hub" else self.source

    @model_validator(mode="after")
    def _sources_agree(self) -> "Data":
        names = [source.name for source in self.sources]
        if not names:
            return self
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(
                f"data.sources: {names.count(twice)} sources have the name {twice}",
                "give each a name of its own",
            )
        unfit = {"files": self.files, "hub": self.hub, "classes": self.classes}
        if beside := [name for name, value in unfit.items() if value]:
            raise ValueError(
                f"data.{beside[0]} beside data.sources ({', '.join(names)})",
                "rows with labels are one source's"
                if beside == ["classes"]
                else f"give each source its own: {{name: {names[0]}, {beside[0]}: …}}",
            )
        for step, weights in self.curriculum:
            if not sum(weights):
                raise ValueError(
                    f"data.sources: from step {step} on the weights of {', '.join(names)} "
                    "sum to nothing",
                    "give one of them a weight above 0",
                )
        if len({data.format == "preference" for data in [self, *self.each]}) > 1:
            raise ValueError(
                "data.sources: some hold pairs of answers and some do not",
                "data.format=preference is for all of them, or none",
            )
        return self
