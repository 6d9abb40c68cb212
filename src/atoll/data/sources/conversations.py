"""Conversations in the layouts that data sets have: messages, ShareGPT, Alpaca, and pairs.

Whatever the layout, what comes out is a list of messages as transformers' chat templates take it.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from atoll.errors import UserError

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
# how others call a role -> its name
OTHER_NAMES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "model": "assistant", "function_call": "assistant", "observation": "tool",
    "function_response": "tool", "function": "tool", "ipython": "tool",
}  # fmt: skip
TURNS = ("messages", "conversations", "conversation")  # columns that hold a list of turns
OPTIONAL = ("tools", "system", "input", "history", "prompt")  # columns that are read where they are
UNNAMED = "text"  # the text_field that says nothing


class Layout(NamedTuple):
    """What a data set calls a conversation, and the columns that it must have."""

    name: str
    fields: tuple[str, ...]


class Conversation(NamedTuple):
    """Messages, and the tools that the model may call, where there are any."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None


def layout_of(place: str, fields: Mapping[str, Any], named: str = UNNAMED) -> Layout:
    """The layout of a row, or of columns.

    named: the column of the turns, as data.text_field names it. Raises `UserError` where there is
    nothing that is known to hold a conversation.
    """
    if named not in (UNNAMED, *fields):
        raise UserError(
            f"{place}: no {named!r} in the fields: {', '.join(fields) or 'none'}",
            "set data.text_field to the column of the turns, or leave it out",
        )
    for column in ([] if named == UNNAMED else [named]) + [*TURNS]:
        if column in fields:
            turns = fields[column]
            first = turns[0] if isinstance(turns, list) and turns else None
            # columns have no row to look at yet: ShareGPT's name is the plural
            is_sharegpt = "from" in first if isinstance(first, dict) else column == TURNS[1]
            return Layout("ShareGPT" if is_sharegpt else "messages", (column,))
    for layout in (
        Layout("Alpaca", ("instruction", "output")),
        Layout("prompt and completion", ("prompt", "completion")),
    ):
        if all(field in fields for field in layout.fields):
            return layout
    raise UserError(
        f"{place}: no conversation in the fields: {', '.join(fields) or 'none'}",
        "give messages, conversations, instruction and output, or prompt and completion; or name "
        "the column of the turns: data.text_field=NAME",
    )


def conversation_of(place: str, fields: Mapping[str, Any], named: str = UNNAMED) -> Conversation:
    """The messages of a row, checked.

    Raises `UserError` with the row's place: no turn, no assistant turn, an unknown role, no text.
    """
    layout = layout_of(place, fields, named)
    turns = _PARTS[layout.name](place, layout, fields)
    if fields.get("system") and turns and _role(turns[0]) != "system":
        turns = [{"role": "system", "content": fields["system"]}, *turns]
    messages = [_message(place, number, turn) for number, turn in enumerate(turns, 1)]
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise UserError(
            f"{place}: no assistant turn, its roles are: {', '.join(roles) or 'none'}",
            "add the answer, or take the record out",
        )
    return Conversation(messages, _tools(place, fields.get("tools")))


def pair_layout_of(place: str, fields: Mapping[str, Any], named: str = UNNAMED) -> Layout:
    """That of rows with a better and a worse answer. Raises `UserError` where they have none."""
    layout = Layout("preference", ("chosen", "rejected"))
    missing = [name for name in layout.fields if name not in fields]
    if missing:
        raise UserError(
            f"{place}: no {missing[0]!r} in the fields: {', '.join(fields) or 'none'}",
            "give prompt, chosen and rejected: texts, or lists of messages",
        )
    return layout


def pair_of(place: str, fields: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
    """The conversation with the chosen answer, and with the rejected one, checked.

    Without a prompt both are whole conversations. Raises `UserError` with the row's place.
    """
    better, worse = (fields[name] for name in pair_layout_of(place, fields).fields)
    rest = {name: fields[name] for name in ("tools", "system") if name in fields}
    if (prompt := fields.get("prompt")) is None:
        chosen, rejected = ({"messages": answer} | rest for answer in (better, worse))
    else:
        chosen, rejected = (
            {"prompt": prompt, "completion": answer} | rest for answer in (better, worse)
        )
    return conversation_of(place, chosen), conversation_of(place, rejected)


def words_of(conversation: Conversation) -> str:
    """All that is said, to make a tokenizer of."""
    return "\n".join(str(message.get("content") or "") for message in conversation.messages)


def _of_turns(place: str, layout: Layout, fields: Mapping[str, Any]) -> list[Any]:
    turns = fields[layout.fields[0]]
    if not isinstance(turns, list):
        raise UserError(
            f"{place}: {layout.fields[0]} is no list of turns", "fix the record, or take it out"
        )
    return turns


def _of_alpaca(place: str, layout: Layout, fields: Mapping[str, Any]) -> list[Any]:
    asked = "\n\n".join(str(fields[name]) for name in ("instruction", "input") if fields.get(name))
    history = fields.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in history
    ):
        raise UserError(
            f"{place}: history is no list of pairs [question, answer]",
            "fix the record, or give the conversation as messages",
        )
    pairs = [*history, (asked, fields["output"])]
    return [turn for pair in pairs for turn in _pair(*pair)]


def _of_pair(place: str, layout: Layout, fields: Mapping[str, Any]) -> list[Any]:
    prompt, completion = fields["prompt"], fields["completion"]
    asked, answered = _pair(prompt, completion)
    before = prompt if isinstance(prompt, list) else [asked]
    if not isinstance(completion, list):
        return [*before, answered]
    # of whole conversations the prompt is a copy of what they begin with
    begins = _role(before[0]) if before else None
    told = len(completion) > 0 and _role(completion[0]) == "system" != begins
    begin = completion[told : told + len(before)]
    return completion if _said(begin) == _said(before) else [*before, *completion]


def _said(turns: list[Any]) -> list[tuple[Any, Any]]:
    """Who said what, however the turns are spelt."""
    return [
        (_role(turn), turn.get("content", turn.get("value"))) if isinstance(turn, dict) else turn
        for turn in turns
    ]


_PARTS = {
    "messages": _of_turns,
    "ShareGPT": _of_turns,
    "Alpaca": _of_alpaca,
    "prompt and completion": _of_pair,
}


def _pair(asked: Any, answered: Any) -> tuple[Message, Message]:
    return {"role": "user", "content": asked}, {"role": "assistant", "content": answered}


def _role(turn: Any) -> Any:
    name = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    return OTHER_NAMES.get(name, name) if isinstance(name, str) else name


def _message(place: str, number: int, turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise UserError(f"{place}: turn {number} is no object", "fix the record, or take it out")
    role = _role(turn)
    if role not in ROLES:
        raise UserError(
            f"{place}: turn {number} has the role {turn.get('role', turn.get('from'))!r}",
            f"roles are: {', '.join(ROLES)}, and as others call them: {', '.join(OTHER_NAMES)}",
        )
    message = {"role": role} | _others(turn)
    content = turn.get("content", turn.get("value"))
    if turn.get("from") == "function_call":
        message["tool_calls"] = [_called(place, number, content)]
    elif content is not None:
        message["content"] = _text(place, number, content)
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_called(place, number, call) for call in calls]
    elif "content" not in message:
        raise UserError(
            f"{place}: turn {number} ({role}) has no content", "fix the record, or take it out"
        )
    return message


def _others(turn: Message) -> Message:
    """What a turn says beside its role and its content."""
    others = {
        name: value
        for name, value in turn.items()
        if value is not None and name not in ("role", "from", "value", "content")
    }
    # templates ask by the key alone whether there are calls
    if not others.get("tool_calls"):
        others.pop("tool_calls", None)
    return others


def _text(place: str, number: int, content: Any) -> str:
    """Text, also where it comes in parts; an image is refused."""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        return "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise UserError(
            f"{place}: the content of turn {number} is no text", "fix the record, or take it out"
        )
    return content


def _called(place: str, number: int, call: Any) -> dict[str, Any]:
    """A tool call; arguments that are JSON text become what they say, as templates expect."""
    call = _from_json(call)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise UserError(
            f"{place}: turn {number} calls a tool without a name",
            'a call is {"function": {"name": "…", "arguments": { … }}}',
        )
    arguments = _from_json(function.get("arguments", {}))
    named = function | {"arguments": arguments}
    return call | {"function": named} if "function" in call else {
        "type": "function", "function": named
    }  # fmt: skip


def _tools(place: str, tools: Any) -> list[dict[str, Any]] | None:
    tools = _from_json(tools)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(
            f"{place}: tools is no list of JSON schemas", "fix the record, or take it out"
        )
    return tools


def _from_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
