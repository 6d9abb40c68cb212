"""A tokenizer's chat template: a conversation as text, and which of it the assistant says.

Where the template marks that itself ({% generation %}), by its marks. Else it is found by rendering
the conversation up to each answer, and, where what follows changes what stands before (thoughts
that are left out, a system prompt that moves to the last turn), by rendering another answer in its
place. What cannot be found so is refused, never guessed.
"""

import json
import re
import threading
from itertools import takewhile
from typing import Any, NamedTuple

from atoll.data.sources.conversations import Conversation, Message
from atoll.errors import UserError, first_line

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# a character for private use: nobody's text has it, no template treats it as space
MARK = "\ue0a7"
PROBE: list[Message] = [{"role": "user", "content": MARK}]


class Rendered(NamedTuple):
    """A conversation as text, and the characters that each answer begins and ends at."""

    text: str
    answers: list[tuple[int, int]]


class ChatTemplate:
    """Of a Hugging Face tokenizer. Raises `UserError` where it has none."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # the marks of one rendering at a time
        self._written: set[str] = set()
        if not tokenizer.chat_template:
            raise UserError(
                "the tokenizer has no chat template",
                "give one: tokenizer.chat_template=FILE.jinja, or tokenizer.chat_template=chatml",
            )
        added = (str(token) for token in tokenizer.get_added_vocab())
        self._added = tuple(token for token in added if token.strip())

    @property
    def marks(self) -> bool:
        """Whether the template says itself what is generated."""
        return bool(GENERATION.search(self._tokenizer.get_chat_template()))

    def rendered(self, conversation: Conversation, place: str) -> Rendered:
        """The text, and what of it the assistant says.

        Raises `UserError` with the record's place where the template refuses it, passes over one
        of its roles, its tools or their calls, or an answer cannot be told from the rest.
        """
        try:
            self._refuse_passed_over(conversation, place)
            text, marked = self._render(conversation, marks=True)
        except UserError:
            raise
        except Exception as error:  # a template raises what it likes
            raise UserError(
                f"{place}: the chat template refuses it: {first_line(error)[:200]}",
                "fix the record, or give another template: tokenizer.chat_template=FILE.jinja",
            ) from error
        return Rendered(text, marked or self._answers(conversation, text, place))

    def last_begins(self, conversation: Conversation, place: str) -> int:
        """The character at which the last answer begins."""
        text, _ = self._render(conversation)
        return self._answers(conversation, text, place)[-1][0]

    def prompt(self, messages: list[Message]) -> str:
        """A conversation that the assistant is to go on with, as text."""
        return self._render(Conversation(messages, None), prompt=True)[0]

    def turn_end(self) -> str:
        """The token that ends an answer; empty where the template puts none."""
        text, _ = self._render(Conversation([*PROBE, _answer("a" + MARK)], None))
        rest = text.rpartition(MARK)[2].strip()
        return next((t for t in sorted(self._added, key=len)[::-1] if rest.startswith(t)), "")

    def _render(
        self, conversation: Conversation, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        messages, tools = conversation
        template = self._tokenizer.get_chat_template(None, tools)
        marks = marks and bool(GENERATION.search(template))
        with self._lock:
            texts: Any = render_jinja_template(
                conversations=[messages],
                tools=[*tools] if tools is not None else None,
                chat_template=template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                **self._tokenizer.special_tokens_map,
            )
        return texts[0][0], [(a, b) for a, b in (texts[1][0] if marks else []) if a < b]

    def _answers(self, conversation: Conversation, text: str, place: str) -> list[tuple[int, int]]:
        roles = [message["role"] for message in conversation.messages]
        numbers = [number for number, role in enumerate(roles) if role == "assistant"]
        return [self._answer(conversation, number, text, place) for number in numbers]

    def _answer(
        self, conversation: Conversation, number: int, text: str, place: str
    ) -> tuple[int, int]:
        """Where the message of that number, an answer, begins and ends."""
        messages, tools = conversation
        start = self._start(Conversation(messages[:number], tools), text)
        until = self._attempt(Conversation(messages[: number + 1], tools))
        if start is not None and until and text.startswith(until) and len(until) > start:
            return start, self._end(text, start, len(until))
        other = [*messages[:number], _answer(MARK), *messages[number + 1 :]]
        before, _, after = (self._attempt(Conversation(other, tools)) or "").partition(MARK)
        if start is None and before and text.startswith(before):
            start = len(before)
        end = len(text) - len(after)
        if start is None or not before or not text.endswith(after) or end < start:
            calls = messages[number].get("tool_calls")
            if calls and (call := self._call(conversation, number, text)) is not None:
                return call
            raise UserError(
                f"{place}: what the assistant says in turn {number + 1} cannot be told from the "
                "rest of what the chat template writes",
                "put {% generation %} and {% endgeneration %} around it in the template, and give "
                "that: tokenizer.chat_template=FILE.jinja",
            )
        alone = self._attempt(Conversation(other[: number + 1], tools)) or ""
        tail = self._tail(alone.rpartition(MARK)[2], after)
        return start, self._end(text, start, end + tail)

    def _call(self, conversation: Conversation, number: int, text: str) -> tuple[int, int] | None:
        """Where a message of calls begins and ends, if it is told by what its turn adds.

        Some templates take no plain answer in its place: it and what came of it give way to one.
        """
        messages, tools = conversation
        before = [*messages[:number], _answer(MARK)]
        behind = next(
            (n for n in range(number, len(messages)) if messages[n]["role"] == "user"),
            len(messages),
        )
        there, alone = (
            (self._attempt(Conversation(talk, tools)) or "").partition(MARK)
            for talk in ([*before, *messages[behind:]], before)
        )
        last = self._attempt(Conversation(messages[: number + 1], tools)) or ""
        so_far = self._attempt(Conversation(messages[:number], tools))
        start, begin = _in_common(there[0], text), _in_common(alone[0], last)
        said = last[begin:]
        # a header that calls share with answers only in part would be cut
        is_whole = begin == len(alone[0]) or (so_far is not None and begin == len(so_far))
        if there[1] and alone[1] and said and is_whole and text.startswith(said, start):
            return start, self._end(text, start, start + len(said))
        return None

    def _tail(self, alone: str, after: str) -> int:
        """How much of what follows an answer ends it: what follows the last answer as well.

        Where those differ, only whole tokens count; the last answer may end with one of its own.
        """
        common = _in_common(alone, after)
        if common == len(alone):
            return common
        begins = ((alone.rfind(token, 0, common), token) for token in self._added if token in alone)
        whole = max((at + len(token) for at, token in begins if at >= 0), default=0)
        if whole or not alone.startswith(self._added):
            return whole
        return max((len(token) for token in self._added if after.startswith(token)), default=0)

    def _start(self, before: Conversation, text: str) -> int | None:
        """Where the answer to these messages begins, if they are followed by a prompt for it."""
        prompt = self._attempt(before, prompt=True)
        if not prompt or not text.startswith(prompt) or prompt == self._attempt(before):
            return None
        return len(prompt)

    def _end(self, text: str, start: int, end: int) -> int:
        """The end of an answer without the space that stands behind its last token."""
        answer = text[start:end].rstrip()
        return start + len(answer) if answer.endswith(self._added) else end

    def _attempt(self, conversation: Conversation, *, prompt: bool = False) -> str | None:
        """The text, or nothing where the template takes no conversation that ends so."""
        try:
            return self._render(conversation, prompt=prompt)[0] if conversation.messages else None
        except Exception:  # a template raises what it likes
            return None

    def _refuse_passed_over(self, conversation: Conversation, place: str) -> None:
        """Find a role whose messages the template does not write, once for each role."""
        messages, tools = conversation
        for role in {message["role"] for message in messages} - self._written - {"assistant"}:
            probed = [m | {"content": MARK} if m["role"] == role else m for m in messages]
            if MARK not in self._render(Conversation(probed, tools))[0]:
                raise _passed_over(place, f"the role {role!r}")
            self._written.add(role)
        called = [_with_marked_calls(message) for message in messages]
        if called != messages:
            self._refuse_unmarked("tool calls", Conversation(called, tools), place)
        if tools and not _are_told(conversation):
            marked = Conversation(messages, [_marked(tool) for tool in tools])
            self._refuse_unmarked("tools", marked, place)

    def _refuse_unmarked(self, what: str, probed: Conversation, place: str) -> None:
        """Refuse a template without a trace of the marks, once: some have another for tools."""
        known = f"{what}, {'no' if probed.tools is None else 'with'} tools"
        if known in self._written or (text := self._attempt(probed)) is None:
            return
        if MARK not in text and json.dumps(MARK)[1:-1] not in text:
            raise _passed_over(place, what)
        self._written.add(known)


def turn_end_id(tokenizer: Any) -> int | None:
    """The id of the token that ends an answer, where the tokenizer's template puts one."""
    token = ChatTemplate(tokenizer).turn_end()
    return int(tokenizer.convert_tokens_to_ids(token)) if token else None


def _answer(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _passed_over(place: str, what: str) -> UserError:
    return UserError(
        f"{place}: the chat template writes nothing of {what}",
        "take them out, or give a template that has them: tokenizer.chat_template=FILE.jinja",
    )


def _marked(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool, or a call of one, by another name."""
    function = tool.get("function")
    if isinstance(function, dict):
        return tool | {"function": function | {"name": MARK}}
    return tool | {"name": MARK}


def _with_marked_calls(message: Message) -> Message:
    calls = [_marked(call) for call in message.get("tool_calls") or []]
    return message | {"tool_calls": calls} if calls else message


def _are_told(conversation: Conversation) -> bool:
    """Whether the system's words name every tool: then it needs no template for them."""
    messages, tools = conversation
    said = [m.get("content") or "" for m in messages if m["role"] in ("system", "developer")]
    names = [(tool.get("function") or tool).get("name") for tool in tools or []]
    return all(any(str(name) in words for words in said) for name in names)


def _in_common(text: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))
    return sum(1 for _ in alike)
