"""Blocks of conversations become tokens, and a byte for each: whether it is learned to be said."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from atoll.data.chat_template import ChatTemplate, Rendered
from atoll.data.encode import SplitCorpus, WorkItem
from atoll.data.shard_writer import TokenBlock
from atoll.data.shards import Split
from atoll.data.sources import blocks
from atoll.data.sources.conversations import Conversation, conversation_of, pair_of
from atoll.data.sources.rows import Row
from atoll.errors import UserError
from atoll.settings import Data

Learned = npt.NDArray[np.uint8]


class Encoded(NamedTuple):
    """A conversation's tokens, whether each is learned, and whether some of it was cut off."""

    ids: list[int]
    learned: Learned
    cut: bool


class ChatEncoder:
    """The tokenizer and the template of a prepared folder, with the settings that concern them."""

    def __init__(self, tokenizer_folder: Path, data: Data) -> None:
        from tokenizers import processors
        from transformers import PreTrainedTokenizerFast

        saved = PreTrainedTokenizerFast.from_pretrained(
            str(tokenizer_folder), trust_remote_code=False
        )
        self.template, self.data = ChatTemplate(saved), data
        self.tokenizer: Any = saved.backend_tokenizer
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        # the template writes all tokens; and some take the space in front of a word off its place
        self.tokenizer.post_processor = processors.Sequence([])

    def encoded(self, rows: list[Row]) -> Iterator[Encoded | None]:
        """Each conversation; nothing where it has to be left out for its length."""
        named = self.data.text_field
        conversations = [conversation_of(row.place, row.fields, named) for row in rows]
        pairs = zip(conversations, rows, strict=True)
        texts = [self.template.rendered(conversation, row.place) for conversation, row in pairs]
        encodings = self.tokenizer.encode_batch(
            [rendered.text for rendered in texts], add_special_tokens=False
        )
        for row, conversation, rendered, encoding in zip(
            rows, conversations, texts, encodings, strict=True
        ):
            if len(encoding.ids) <= self.data.sequence_tokens:
                learned = self._learned(row.place, conversation, rendered, encoding)
                yield Encoded(encoding.ids, learned, cut=False)
            else:
                yield self._shortened(row.place, conversation)

    def encoded_pairs(self, rows: list[Row]) -> Iterator[tuple[Encoded, Encoded] | None]:
        """The chosen and the rejected answer of each row; nothing where both are too long."""
        for row in rows:
            better, worse = (
                self._whole(row.place, talk) for talk in pair_of(row.place, row.fields)
            )
            fits = len(better.ids) + len(worse.ids) <= self.data.sequence_tokens
            yield (better, worse) if fits else None

    def _whole(self, place: str, conversation: Conversation) -> Encoded:
        rendered = self.template.rendered(conversation, place)
        encoding = self.tokenizer.encode(rendered.text, add_special_tokens=False)
        learned = self._learned(place, conversation, rendered, encoding)
        return Encoded(encoding.ids, learned, cut=False)

    def _shortened(self, place: str, conversation: Conversation) -> Encoded | None:
        """The conversation up to the last answer that a sample has room for."""
        if self.data.long_conversations == "drop":
            return None
        messages, tools = conversation
        answers = [n for n, message in enumerate(messages[:-1]) if message["role"] == "assistant"]
        # a call without what came of it is no place to stop
        ends = [n for n in answers if messages[n + 1]["role"] != "tool"]
        for last in reversed(ends):
            shorter = Conversation(messages[: last + 1], tools)
            rendered = self.template.rendered(shorter, place)
            encoding = self.tokenizer.encode(rendered.text, add_special_tokens=False)
            if len(encoding.ids) <= self.data.sequence_tokens:
                learned = self._learned(place, shorter, rendered, encoding)
                return Encoded(encoding.ids, learned, cut=True)
        return None

    def _learned(
        self, place: str, conversation: Conversation, rendered: Rendered, encoding: Any
    ) -> Learned:
        """1 for the tokens that training is on; a token belongs to all characters it is made of."""
        if self.data.train_on == "all" and self.data.format == "chat":
            return np.ones(len(encoding.ids), dtype=np.uint8)
        answers = rendered.answers
        if self.data.train_on == "last" or self.data.format == "preference":
            first = self.template.last_begins(conversation, place)
            answers = [(start, end) for start, end in answers if end > first]
        learned = np.zeros(len(encoding.ids), dtype=np.uint8)
        starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        for start, end in answers:
            inside = np.flatnonzero((ends > start) & (starts < end))
            if len(inside):
                learned[inside[0] : inside[-1] + 1] = 1
        if not learned.any():
            raise UserError(
                f"{place}: the chat template writes nothing of its answers",
                "fix the record, or give another template: tokenizer.chat_template=FILE.jinja",
            )
        return learned


def encoder(
    tokenizer_folder: Path, dtype: str, data: Data, sources: list[SplitCorpus]
) -> Callable[[WorkItem], dict[Split, TokenBlock]]:
    """Give the function that turns a block of conversations into tokens."""
    chat = ChatEncoder(tokenizer_folder, data)

    def encode(item: WorkItem) -> dict[Split, TokenBlock]:
        source, block = sources[item.corpus], item.block
        [rows] = blocks.read(source.corpus, block)
        held_out = source.held_out(block.first_document, block.documents)
        return {
            split: _block(
                [rows[n] for n in np.flatnonzero(held_out == (split == "validation"))], chat, dtype
            )
            for split in source.splits
        }

    return encode


def _block(rows: list[Row], chat: ChatEncoder, dtype: str) -> TokenBlock:
    written = [row for row in rows if row.fields]
    if pairs := chat.data.format == "preference":
        encoded = [
            answer
            for pair in chat.encoded_pairs(written)
            for answer in (pair if pair is not None else (None, None))
        ]
    else:
        encoded = list(chat.encoded(written))
    kept = [talk for talk in encoded if talk is not None]
    return TokenBlock(
        tokens=b"".join(np.array(talk.ids, dtype=dtype).tobytes() for talk in kept),
        lengths=np.array([len(talk.ids) for talk in kept], dtype=np.int64),
        blank=len(rows) - len(written),
        learned=b"".join(talk.learned.tobytes() for talk in kept),
        cut=sum(talk.cut for talk in kept),
        dropped=(len(encoded) - len(kept)) // (2 if pairs else 1),
    )
