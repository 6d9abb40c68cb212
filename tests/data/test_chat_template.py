"""What the assistant says is found in the text of every template, marked by it or not."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chat_templates import (
    CALL,
    NO_SYSTEM,
    SPECIAL,
    SYSTEM,
    TALK,
    TEMPLATES,
    THOUGHTS,
    TOOL_TALK,
    TOOLS,
    turn,
    without_marks,
)
from data_runs import make_run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from atoll.config.chat_templates import TEMPLATES as NAMED
from atoll.data.chat_template import ChatTemplate
from atoll.data.encode_chat import ChatEncoder
from atoll.data.sources.conversations import Conversation
from atoll.data.sources.rows import Row
from atoll.errors import UserError

CHATML = NAMED["chatml"]


@cache
def letters() -> Tokenizer:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    return bytewise


def speaking(template: str | None) -> Any:
    """A tokenizer with that template."""
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=letters(), bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens([*SPECIAL])
    tokenizer.chat_template = template
    return tokenizer


TALKS = {"plain": TALK, "system": [SYSTEM, *TALK], "tools": TOOL_TALK, "thoughts": THOUGHTS}
CASES = [
    (name, kind)
    for name in TEMPLATES
    for kind in TALKS
    if not (kind == "system" and name in NO_SYSTEM) and not (kind == "tools" and name not in TOOLS)
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_what_is_found_is_what_the_template_marks(name: str, kind: str) -> None:
    conversation = Conversation(TALKS[kind], None)
    marked = ChatTemplate(speaking(TEMPLATES[name])).rendered(conversation, "row 1")
    plain = speaking(without_marks(TEMPLATES[name]))
    assert "generation %" not in plain.chat_template
    found = ChatTemplate(plain).rendered(conversation, "row 1")
    assert found.text == marked.text
    said = [found.text[start:end] for start, end in found.answers]
    assert said == [marked.text[start:end] for start, end in marked.answers]
    assert found.answers == marked.answers


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_tokens_and_mask_are_those_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    theirs = speaking(TEMPLATES[name]).apply_chat_template(
        TALKS[kind], return_assistant_tokens_mask=True, return_dict=True
    )
    values = {"format": "chat", "sequence_tokens": 1024}
    data = make_run(tmp_path, values, tokenizer={"path": str(tmp_path)}).data
    for number, template in enumerate((TEMPLATES[name], without_marks(TEMPLATES[name]))):
        folder = tmp_path / str(number)
        speaking(template).save_pretrained(str(folder))
        [ours] = ChatEncoder(folder, data).encoded([Row("row 1", {"messages": TALKS[kind]})])
        assert ours is not None and not ours.cut
        assert ours.ids == theirs["input_ids"]
        assert ours.learned.tolist() == theirs["assistant_masks"]


def test_a_turn_ends_with_the_template_s_own_token() -> None:
    ends = {name: ChatTemplate(speaking(text)).turn_end() for name, text in TEMPLATES.items()}
    assert ends["chatml"] == ends["qwen3"] == "<|im_end|>"
    assert ends["llama3"] == "<|eot_id|>" and ends["llama2"] == ends["mistral"] == "</s>"
    assert ends["falcon"] == ends["glm4"] == ""


@pytest.mark.parametrize(
    ("template", "talk", "message"),
    [
        (TEMPLATES["gemma2"], [SYSTEM, *TALK], "row 7: the chat template refuses it: only user"),
        (
            TEMPLATES["mistral"],
            TOOL_TALK[2:3] + TALK,
            "row 7: .* writes nothing of the role 'tool'",
        ),
        ("{{ messages[1].content | upper }}", TALK, "row 7: .* writes nothing of the role 'user'"),
        (
            "{{ messages[0].content }}{{ messages[1].content[::-1] * 2 }}",
            TALK[:2],
            "row 7: what the assistant says in turn 2 cannot be told",
        ),
    ],
)
def test_what_a_template_cannot_write_is_refused(
    template: str, talk: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        ChatTemplate(speaking(template)).rendered(Conversation(talk, None), "row 7")


TOOL = {"type": "function", "function": {"name": "wind", "parameters": {}}}
WITH_TOOLS = "{%- if tools %}{{ '<tools>' + (tools | tojson) + '</tools>' }}{%- endif %}"
CALLED = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]


@pytest.mark.parametrize("template", [TEMPLATES["chatml"], CHATML])
@pytest.mark.parametrize(
    ("talk", "what"),
    [(Conversation(CALLED, None), "tool calls"), (Conversation(TALK, [TOOL]), "tools")],
)
def test_tools_that_a_template_does_not_write_are_refused(
    template: str, talk: Conversation, what: str
) -> None:
    with pytest.raises(UserError, match=f"row 7: .* writes nothing of {what}\n") as caught:
        ChatTemplate(speaking(template)).rendered(talk, "row 7")
    assert "tokenizer.chat_template=FILE.jinja" in caught.value.hint


@pytest.mark.parametrize("name", sorted(TOOLS))
@pytest.mark.parametrize("function", [TOOL, TOOL["function"]])
def test_tools_that_a_template_writes_are_taken(name: str, function: dict[str, Any]) -> None:
    writes_tools = "tools | tojson" in TEMPLATES[name]
    template = ChatTemplate(speaking(("" if writes_tools else WITH_TOOLS) + TEMPLATES[name]))
    for tools in (None, [function]):
        text = template.rendered(Conversation(CALLED, tools), "row 1").text
        assert text.count("wind") == (1 if tools is None else 2)


def test_calls_in_a_template_s_escapes_are_taken() -> None:
    escaped = "{{ messages[0].content }}{% generation %}{{ calls }}{% endgeneration %}"
    calls = "(messages[1].tool_calls | tojson(ensure_ascii=true))"
    template = speaking(escaped.replace("calls", calls))
    assert "wind" in ChatTemplate(template).rendered(Conversation(CALLED, None), "row 1").text


def test_tools_that_the_system_s_words_describe_are_taken() -> None:
    talk = [turn("system", "You may call wind."), *TALK]
    text = ChatTemplate(speaking(CHATML)).rendered(Conversation(talk, [TOOL]), "row 1").text
    assert "You may call wind." in text


def test_one_template_for_tools_does_not_answer_for_another() -> None:
    tokenizer = speaking(None)
    tool_use = WITH_TOOLS + TEMPLATES["qwen2_5"]
    tokenizer.chat_template = {"default": CHATML, "tool_use": tool_use}
    template = ChatTemplate(tokenizer)
    assert template.rendered(Conversation(CALLED, [TOOL]), "row 1").text.count("wind") == 2
    with pytest.raises(UserError, match=r"row 2: .* writes nothing of tool calls"):
        template.rendered(Conversation(CALLED, None), "row 2")


def test_no_template_is_refused() -> None:
    with pytest.raises(UserError, match="has no chat template"):
        ChatTemplate(speaking(None))


def test_an_answer_before_any_question_is_found() -> None:
    talk = Conversation([turn("assistant", "Hello!"), *TALK], None)
    for name in ("chatml", "phi3", "zephyr"):
        plain = ChatTemplate(speaking(without_marks(TEMPLATES[name]))).rendered(talk, "row 1")
        assert plain.answers == ChatTemplate(speaking(TEMPLATES[name])).rendered(talk, "").answers
