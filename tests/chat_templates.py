"""The forms that the chat templates of much used models have, written anew and small.

Each marks with {% generation %} what its model says: what follows the prompt for an answer, up to
and with the token that ends it. Without the marks the same must be found.
"""

import re
from typing import Any

GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def without_marks(template: str) -> str:
    return GENERATION.sub("", template)


def _turns(user: str, assistant: str, system: str = "", prompt: str = "", begin: str = "") -> str:
    """Each role in its own form; an answer's form is HEADER|what is said."""
    header, _, said = assistant.partition("|||")
    head = "{{ bos_token }}" if begin else ""
    other = f"{{%- elif m.role == 'system' %}}{system}" if system else ""
    refused = "{%- else %}{{ raise_exception('only user and assistant') }}" if not system else ""
    return (
        f"{head}{{%- for m in messages %}}"
        f"{{%- if m.role == 'user' %}}{user}"
        f"{{%- elif m.role == 'assistant' %}}{header}{{% generation %}}{said}{{% endgeneration %}}"
        f"{other}{refused}{{%- endif %}}{{%- endfor %}}"
        f"{{%- if add_generation_prompt %}}{prompt}{{%- endif %}}"
    )


CALLS = (
    "{%- for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function | tojson + '</tool_call>' }}"
    "{%- endfor %}"
)
IM = "{{ '<|im_start|>' + m.role + '\n' }}"
CHATML_TOOLS = (
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{{ m.content or '' }}" + CALLS + "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>' + m.content + '</tool_response><|im_end|>\n' }}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
# an earlier answer loses its thoughts, the last has some, if only empty ones
QWEN3 = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}"
    "{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{%- set said = (m.content or '').split('</think>')[-1].strip() %}"
    "{%- set thought = m.reasoning_content or '' %}"
    "{%- if '</think>' in (m.content or '') %}"
    "{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}"
    "{{ said }}" + CALLS + "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>' + m.content + '</tool_response><|im_end|>\n' }}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA2 = (
    "{%- set ns = namespace(system='') %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'system' %}{%- set ns.system = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}"
    "{%- elif m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + ns.system + m.content.strip() + ' [/INST]' }}"
    "{%- set ns.system = '' %}"
    "{%- else %}{{ ' ' }}{% generation %}{{ m.content.strip() + ' ' + eos_token }}"
    "{% endgeneration %}{%- endif %}"
    "{%- endfor %}"
)
# the system's words stand before the last question
MISTRAL = (
    "{%- set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{{ bos_token }}{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}"
    "{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}"
    "{{ '[INST] ' + (system + '\n\n' if system and loop.index0 == ns.last else '') + m.content "
    "+ '[/INST]' }}"
    "{%- elif m.role == 'assistant' %}{{ ' ' }}{% generation %}{{ m.content + eos_token }}"
    "{% endgeneration %}{%- endif %}"
    "{%- endfor %}"
)
# calls and what came of them are no turns: but for them, questions and answers alternate
MISTRAL_TOOLS = (
    "{%- set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{%- set talk = messages[1:] if system else messages %}"
    "{%- set ns = namespace(turn=0, last=0) %}"
    "{%- for m in talk %}"
    "{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
    "{%- if m.role != 'tool' and not m.tool_calls %}"
    "{%- if (m.role == 'user') != (ns.turn % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set ns.turn = ns.turn + 1 %}{%- endif %}{%- endfor %}"
    "{{ bos_token }}{%- for m in talk %}"
    "{%- if m.role == 'user' %}"
    "{%- if tools and loop.index0 == ns.last %}"
    "{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{ '[INST] ' + (system + '\n\n' if system and loop.index0 == ns.last else '') + m.content "
    "+ '[/INST]' }}"
    "{%- elif m.tool_calls %}{% generation %}{{ '[TOOL_CALLS] [' }}"
    "{%- for c in m.tool_calls %}"
    "{%- if c.id | length != 9 %}{{ raise_exception('an id has 9 letters') }}{%- endif %}"
    "{{ (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' }}"
    "{{ '' if loop.last else ', ' }}{%- endfor %}"
    "{{ ']' + eos_token }}{% endgeneration %}"
    "{%- elif m.role == 'tool' %}"
    '{{ \'[TOOL_RESULTS] {"content": \' + m.content + \', "call_id": "\' + m.tool_call_id '
    "+ '\"}[/TOOL_RESULTS]' }}"
    "{%- else %}{{ ' ' }}{% generation %}{{ m.content | trim + eos_token }}{% endgeneration %}"
    "{%- endif %}{%- endfor %}"
)
# thoughts are prompted for, and left out of what was said before
DEEPSEEK_R1 = (
    "{{ bos_token }}{%- for m in messages %}"
    "{%- if m.role == 'system' %}{{ m.content }}"
    "{%- elif m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{%- else %}{{ '<|Assistant|>' }}{% generation %}"
    "{{ m.content.split('</think>')[-1] + '<|end|>' }}{% endgeneration %}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{%- endif %}"
)
GEMMA3 = (
    "{{ bos_token }}"
    "{%- set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{%- for m in messages if m.role != 'system' %}"
    "{%- if m.role == 'user' %}"
    "{{ '<start_of_turn>user\n' + (first if loop.first else '') + m.content.strip() + "
    "'<end_of_turn>\n' }}"
    "{%- else %}{{ '<start_of_turn>model\n' }}{% generation %}"
    "{{ m.content.strip() + '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{%- endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{%- for m in messages %}"
    "{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + "
    "'<|end_header_id|>\n\n' }}"
    "{%- if m.role == 'assistant' %}{% generation %}"
    "{%- if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{%- else %}"
    "{{ m.content | trim }}{%- endif %}"
    "{{ '<|eot_id|>' }}{% endgeneration %}"
    "{%- elif m.role == 'tool' %}{{ m.content | tojson + '<|eot_id|>' }}"
    "{%- else %}{{ m.content | trim + '<|eot_id|>' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
# the last answer ends otherwise than those before it
GPT_OSS = (
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{{ '<|start|>assistant' }}{% generation %}"
    "{{ '<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}"
    "{% endgeneration %}"
    "{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{%- endif %}"
)

# name -> a template
TEMPLATES = {
    "alpaca": _turns(
        "{{ '### Instruction:\n' + m.content + '\n\n' }}",
        "{{ '### Response:\n' }}|||{{ m.content + eos_token }}",
        "{{ m.content + '\n\n' }}",
        "{{ '### Response:\n' }}",
    ),
    "chatml": _turns(
        IM + "{{ m.content + '<|im_end|>\n' }}",
        IM + "|||{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% generation %}",
        IM + "{{ m.content + '<|im_end|>\n' }}",
        "{{ '<|im_start|>assistant\n' }}",
    ),
    "command_r": _turns(
        "{{ '<|START|><|USER|>' + m.content + '<|END|>' }}",
        "{{ '<|START|><|BOT|>' }}|||{{ m.content | trim + '<|END|>' }}",
        "{{ '<|START|><|SYSTEM|>' + m.content + '<|END|>' }}",
        "{{ '<|START|><|BOT|>' }}",
        begin="bos",
    ),
    "deepseek_r1": DEEPSEEK_R1,
    "deepseek_v3": _turns(
        "{{ '<|User|>' + m.content }}",
        "{{ '<|Assistant|>' }}|||{{ m.content + eos_token }}",
        "{{ m.content }}",
        "{{ '<|Assistant|>' }}",
        begin="bos",
    ),
    "falcon": _turns(
        "{{ 'User: ' + m.content + '\n' }}",
        "{{ 'Falcon: ' }}|||{{ m.content + '\n' }}",
        "{{ m.content + '\n' }}",
        "{{ 'Falcon: ' }}",
    ),
    "gemma2": _turns(
        "{{ '<start_of_turn>user\n' + m.content | trim + '<end_of_turn>\n' }}",
        "{{ '<start_of_turn>model\n' }}|||{{ m.content | trim + '<end_of_turn>' }}"
        "{% endgeneration %}{{ '\n' }}{% generation %}",
        prompt="{{ '<start_of_turn>model\n' }}",
        begin="bos",
    ),
    "gemma3": GEMMA3,
    "glm4": _turns(
        "{{ '<|user|>\n' + m.content }}",
        "{{ '<|assistant|>\n' }}|||{{ m.content }}",
        "{{ '<|system|>\n' + m.content }}",
        "{{ '<|assistant|>\n' }}",
    ),
    "gpt_oss": GPT_OSS,
    "granite": _turns(
        "{{ '<|start|>user<|role_end|>' + m.content + '<|end|>\n' }}",
        "{{ '<|start|>assistant<|role_end|>' }}|||{{ m.content + '<|end|>' }}"
        "{% endgeneration %}{{ '\n' }}{% generation %}",
        "{{ '<|start|>system<|role_end|>' + m.content + '<|end|>\n' }}",
        "{{ '<|start|>assistant<|role_end|>' }}",
    ),
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral_tools": MISTRAL_TOOLS,
    "olmo2": _turns(
        "{{ '<|user|>\n' + m.content + '\n' }}",
        "{{ '<|assistant|>\n' }}|||{{ m.content + eos_token }}"
        "{% endgeneration %}{{ '' if loop.last else '\n' }}{% generation %}",
        "{{ '<|system|>\n' + m.content + '\n' }}",
        "{{ '<|assistant|>\n' }}",
        begin="bos",
    ),
    "phi3": _turns(
        "{{ '<|user|>\n' + m.content + '<|end|>\n' }}",
        "{{ '<|assistant|>\n' }}|||{{ m.content + '<|end|>' }}"
        "{{ '\n' + eos_token if loop.last else '' }}"
        "{% endgeneration %}{{ '' if loop.last else '\n' }}{% generation %}",
        "{{ '<|system|>\n' + m.content + '<|end|>\n' }}",
        "{{ '<|assistant|>\n' }}",
    ),
    "phi4": _turns(
        "{{ '<|im_start|>user<|im_sep|>' + m.content + '<|im_end|>' }}",
        "{{ '<|im_start|>assistant<|im_sep|>' }}|||{{ m.content + '<|im_end|>' }}",
        "{{ '<|im_start|>system<|im_sep|>' + m.content + '<|im_end|>' }}",
        "{{ '<|im_start|>assistant<|im_sep|>' }}",
    ),
    "qwen2_5": CHATML_TOOLS,
    "qwen3": QWEN3,
    "vicuna": _turns(
        "{{ 'USER: ' + m.content + ' ' }}",
        "{{ 'ASSISTANT:' }}|||{{ ' ' + m.content + eos_token }}",
        "{{ m.content + ' ' }}",
        "{{ 'ASSISTANT:' }}",
    ),
    "zephyr": _turns(
        "{{ '<|user|>\n' + m.content + eos_token + '\n' }}",
        "{{ '<|assistant|>\n' }}|||{{ m.content + eos_token }}"
        "{% endgeneration %}{{ '\n' }}{% generation %}",
        "{{ '<|system|>\n' + m.content + eos_token + '\n' }}",
        "{{ '<|assistant|>\n' }}",
    ),
}  # fmt: skip
NO_SYSTEM = {"gemma2"}
TOOLS = {"qwen2_5", "qwen3", "llama3", "mistral_tools"}
SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|eot_id|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|START|>",
    "<|END|>", "<|return|>", "<|channel|>", "<|message|>",
    "<start_of_turn>", "<end_of_turn>", "<|start|>", "<|role_end|>", "<|User|>",
    "<|Assistant|>", "<|USER|>", "<|BOT|>", "<|SYSTEM|>",
)  # fmt: skip


def turn(role: str, content: str, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


SYSTEM = turn("system", "Be brief, and kind.")
TALK = [
    turn("user", "Where is the reef?"),
    turn("assistant", "Behind the island."),
    turn("user", "  And the wind,\n now? "),
    turn("assistant", "From the east: 5 knots.\n\n    calm"),
]
CALL = {
    "id": "a1b2c3d4e",
    "type": "function",
    "function": {"name": "wind", "arguments": {"at": "reef"}},
}
TOOL_TALK = [
    TALK[0],
    {"role": "assistant", "tool_calls": [CALL]},
    turn("tool", '{"knots": "5"}', tool_call_id="a1b2c3d4e"),
    TALK[1],
    *TALK[2:],
]
THOUGHTS = [
    TALK[0],
    turn("assistant", "<think>\nhm\n</think>\n\nBehind the island."),
    TALK[2],
    turn("assistant", "<think>\nso\n</think>\n\nFrom the east."),
]
