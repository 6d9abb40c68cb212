"""The chat template that a run names, as the text that its folder carries."""

from pathlib import Path

from atoll.errors import UserError

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


def _is_template(text: str) -> bool:
    return "{{" in text or "{%" in text
