"""A chat template is typed by name or file, and goes with the run as its text."""

from pathlib import Path

import pytest
from chat_templates import TALK, TEMPLATES, without_marks

from atoll.config.chat_templates import TEMPLATES as NAMED
from atoll.config.chat_templates import template_text
from atoll.errors import UserError

LINE = ["facility=laptop", "data=chat_files", "data.files=talks.jsonl"]


def test_a_file_s_text_is_what_the_run_has(tmp_path, composed):
    path = tmp_path / "own.jinja"
    path.write_text(TEMPLATES["qwen3"])
    run = composed(*LINE, f"tokenizer.chat_template={path}").run
    assert run.tokenizer.chat_template == TEMPLATES["qwen3"]
    assert template_text("own.jinja", tmp_path) == template_text(TEMPLATES["qwen3"], tmp_path)


def test_a_tokenizer_without_a_template_is_refused_where_it_is_typed(tmp_path, composed):
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text('{"eos_token": "</s>"}')
    line = [*LINE, f"tokenizer.path={tmp_path}"]
    with pytest.raises(UserError, match="has no chat template"):
        composed(*line)
    assert composed(*line, "tokenizer.chat_template=chatml").run.tokenizer.path == str(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["chatml"])
    assert composed(*line).run.tokenizer.chat_template is None
    (tmp_path / "chat_template.jinja").unlink()
    settings.write_text('{"chat_template": "{{ messages }}"}')
    assert composed(*line).run.tokenizer.chat_template is None


def test_chatml_is_known_by_name():
    from transformers.utils.chat_template_utils import render_jinja_template

    text = template_text("chatml", Path.cwd())
    assert text == NAMED["chatml"]
    for template in (text, without_marks(text)):
        ours, theirs = (
            render_jinja_template(conversations=[TALK], chat_template=one)[0]
            for one in (template, TEMPLATES["chatml"])
        )
        assert ours == theirs


@pytest.mark.parametrize(
    ("given", "message"),
    [("nowhere.jinja", "No such file"), ("words.jinja", "holds no {{ … }}"), ("chatm", "No such")],
)
def test_what_is_no_template_is_refused(tmp_path, given, message):
    (tmp_path / "words.jinja").write_text("words")
    with pytest.raises(UserError) as caught:
        template_text(given, tmp_path)
    assert f"tokenizer.chat_template={given}" in caught.value.found
    assert message in caught.value.found and "chatml" in caught.value.hint
