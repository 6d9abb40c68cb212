"""The chat template that a run names, as the text that its folder carries."""

import json
from pathlib import Path

from atoll.errors import UserError
from atoll.settings import Run

# where a tokenizer's folder may keep its templates, beside its tokenizer_config.json
FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")

# by name; the tokens are OpenAI's of 2023, which most chat models have taken over since
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
        "{{ '\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
}


def template_text(given: str | None, start: Path) -> str | None:
    """The text of a template that is given by name or by file, or as that text.

    Raises `UserError` for a file that is missing or is no template.
    """
    if given is None or _is_template(given):
        return given
    if given in TEMPLATES:
        return TEMPLATES[given]
    path = start / Path(given).expanduser()
    hint = f"give a jinja file, or a name: {', '.join(TEMPLATES)}"
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"tokenizer.chat_template={given}: {reason}", hint) from None
    if not _is_template(text):
        raise UserError(f"tokenizer.chat_template={given} holds no {{{{ … }}}} to fill in", hint)
    return text


def check_chat_template(run: Run) -> None:
    """Refuse conversations for a tokenizer of a folder that has no template, before any job."""
    if not run.data.holds_conversations or run.tokenizer.chat_template is not None:
        return
    folder = Path(run.tokenizer.path or str(run.model.source))
    settings = folder / "tokenizer_config.json"
    if not settings.is_file() or any((folder / name).exists() for name in FILES):
        return
    try:
        has_template = "chat_template" in json.loads(settings.read_text())
    except ValueError:
        return  # whoever loads the tokenizer says what is wrong with it
    if not has_template:
        raise UserError(
            f"data.format={run.data.format}, and the tokenizer of {folder} has no chat template",
            "give one: tokenizer.chat_template=FILE.jinja, or a name: " + ", ".join(TEMPLATES),
        )


def _is_template(text: str) -> bool:
    return "{{" in text or "{%" in text
