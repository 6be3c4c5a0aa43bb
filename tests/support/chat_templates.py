"""Chat templates with tools, written after the published formats of the families of models.

They are no copies. Each shows turns with calls, results and reasoning as its family's template
does, refusals included, and leaves out what has no part in that (images, dates, built-in tools).
`tests/outside/test_templates.py` runs the published templates themselves.
"""

from copy import deepcopy
from typing import Any

from qllm.models.tokenizer import load_tokenizer

_TOOLS = "{% if tools %}{{ START + 'Tools: ' + (tools | tojson) + END }}{% endif %}"
_LAST = (
    "{% set ns = namespace(last=-1, name=none, n=0, asked=false) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_CHATML_RESULTS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}"
    "{% endif %}{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
)
_ALTERNATE = (
    "{% for m in messages if m.role != 'system' and m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% endfor %}"
)
_NINE = (
    "{% if not ID is defined or ID | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}"
)

HERMES = _LAST + (
    _TOOLS.replace("START", "'<|im_start|>system\\n'").replace("END", "'<|im_end|>\\n'")
    + "{% for m in messages %}{% if m.role == 'tool' %}" + _CHATML_RESULTS + "{% else %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}"
    "{{ '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": \"' + c.function.name + '\", \"arguments\": ' }}"
    "{{ c.function.arguments if c.function.arguments is string else"
    " c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)  # fmt: skip
"""Qwen3's, which is Hermes' markup."""

QWEN_XML = _LAST + (
    _TOOLS.replace("START", "'<|im_start|>system\\n'").replace("END", "'<|im_end|>\\n'")
    + "{% for m in messages %}{% if m.role == 'tool' %}" + _CHATML_RESULTS + "{% else %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\\n' + (m.reasoning_content or '') | trim + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content | trim }}{% for c in m.tool_calls or [] %}"
    "{% if not loop.first %}{{ '\\n' }}{% elif m.content | trim %}{{ '\\n\\n' }}{% endif %}"
    "{{ '<tool_call>\\n<function=' + c.function.name + '>\\n' }}"
    "{% for k, v in c.function.arguments | items %}{{ '<parameter=' + k + '>\\n' }}"
    "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
    "{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)  # fmt: skip
"""Qwen3.5's; Qwen3-Coder's is the same without reasoning."""


_GLM = (
    _LAST + "[gMASK]<sop>"
    + _TOOLS.replace("START", "'<|system|>'").replace("END", "''")
    + "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>' }}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}"
    "{{ 'BR<think>' + m.reasoning_content.strip() + '</think>' }}{% else %}{{ 'BARE' }}"
    "{% endif %}{% if m.content.strip() %}{{ 'BR' + m.content.strip() }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if c.function.arguments is not mapping %}"
    "{{ raise_exception('Invalid tool call arguments') }}{% endif %}"
    "{{ 'BR<tool_call>' + c.function.name + 'BR' }}"
    "{% for k, v in c.function.arguments.items() %}"
    "{{ '<arg_key>' + k + '</arg_key>BR<arg_value>' }}"
    "{{ v if v is string else v | tojson(ensure_ascii=False) }}{{ '</arg_value>BR' }}"
    "{% endfor %}{{ '</tool_call>' }}{% endfor %}"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}"
    "{% endif %}{{ 'BR<tool_response>BR' + m.content + 'BR</tool_response>' }}"
    "{% else %}{{ '<|' + m.role + '|>BR' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)  # fmt: skip
GLM_45 = _GLM.replace("BARE", "BR<think></think>").replace("BR", "\\n")
GLM_47 = _GLM.replace("BARE", "</think>").replace("BR", "")
"""GLM-4.7's, which has no line breaks."""
DEEPSEEK_V3 = (
    "{{ bos_token or '' }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{ '<｜tool▁outputs▁begin｜>' }}{% endif %}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{ '<｜tool▁outputs▁end｜>' }}{% endif %}"
    "{% else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] }}"
    "{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}"
    "{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n'"
    " + c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}"
    "{{ '<｜tool▁calls▁end｜>' }}{% endif %}{{ '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<｜Assistant｜>' }}"
    "{% endif %}"
)
"""DeepSeek-V3's and R1's: arguments must be text."""

DEEPSEEK_V31 = (
    "{{ bos_token or '' }}{% set ns = namespace(asked=false) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{% set ns.asked = true %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'tool' %}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    "{% else %}{% if ns.asked %}{{ '<｜Assistant｜><think></think>' }}{% endif %}"
    "{% set ns.asked = false %}{{ m.content }}"
    "{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>'"
    " + (c.function.arguments | tojson) + '<｜tool▁call▁end｜>' }}{% endfor %}"
    "{{ '<｜tool▁calls▁end｜>' }}{% endif %}{{ '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and ns.asked %}"
    "{{ '<｜Assistant｜>' + ('<think>' if thinking else '<think></think>') }}{% endif %}"
)
"""DeepSeek-V3.1's: arguments must be objects."""

KIMI_K2 = (
    "{% if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}"
    "{% endif %}{% for m in messages %}"
    "{% set place = {'user': 'user', 'assistant': 'assistant'}.get(m.role, 'system') %}"
    "{{ '<|im_' + place + '|>' + m.role + '<|im_middle|>' }}"
    "{% if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\\n' }}{% endif %}"
    "{{ m.content }}{% if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}"
    "{% for c in m.tool_calls %}{{ '<|tool_call_begin|>' + (c.id or 'functions.'"
    " + c.function.name + ':' + loop.index0 | string) + '<|tool_call_argument_begin|>' }}"
    "{{ c.function.arguments | tojson if c.function.arguments is mapping else"
    " c.function.arguments }}{{ '<|tool_call_end|>' }}{% endfor %}"
    "{{ '<|tool_calls_section_end|>' }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)

MINIMAX_M2 = _LAST + (
    _TOOLS.replace("START", "']~b]system\\n'").replace("END", "'[e~[\\n'")
    + "{% for m in messages %}{% if m.role == 'assistant' %}{{ ']~b]ai\\n' }}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}"
    "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}{{ '\\n<minimax:tool_call>\\n' }}{% for c in m.tool_calls %}"
    "{% set ns.name = c.function.name %}{{ '<invoke name=\"' + c.function.name + '\">\\n' }}"
    "{% for k, v in c.function.arguments.items() %}{{ '<parameter name=\"' + k + '\">' }}"
    "{{ v if v is string else v | tojson(ensure_ascii=False) }}{{ '</parameter>\\n' }}"
    "{% endfor %}{{ '</invoke>\\n' }}{% endfor %}{{ '</minimax:tool_call>' }}{% endif %}"
    "{{ '[e~[\\n' }}{% elif m.role == 'tool' %}{% if ns.name is none %}"
    "{{ raise_exception('Message has tool role, but there was no call before it!') }}{% endif %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ ']~b]tool' }}{% endif %}"
    "{{ '\\n<response>' + m.content + '</response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '[e~[\\n' }}{% endif %}"
    "{% else %}{{ ']~b]' + m.role + '\\n' + m.content + '[e~[\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ']~b]ai\\n<think>\\n' }}{% endif %}"
)  # fmt: skip

LLAMA_3 = (
    "{{ bos_token or '' }}{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if not m.tool_calls | length == 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "\''
    ' + m.tool_calls[0].function.name + \'", "parameters": \''
    " + (m.tool_calls[0].function.arguments | tojson) + '}<|eot_id|>' }}"
    "{% elif m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n'"
    " + (m.content | tojson) + '<|eot_id|>' }}"
    "{% else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim"
    " + '<|eot_id|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

MISTRAL_V3 = _ALTERNATE + (
    "{{ bos_token or '' }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST]' + m.content + '[/INST]' }}{% elif m.tool_calls %}{{ '[TOOL_CALLS][' }}"
    "{% for c in m.tool_calls %}" + _NINE.replace("ID", "c.id") +
    "{{ (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' }}"
    "{{ ', ' if not loop.last else ']' }}{% endfor %}{{ eos_token or '' }}"
    "{% elif m.role == 'tool' %}" + _NINE.replace("ID", "m.tool_call_id") +
    "{{ '[TOOL_RESULTS]{\"content\": ' + m.content + ', \"call_id\": \"' + m.tool_call_id"
    " + '\"}[/TOOL_RESULTS]' }}{% elif m.role == 'assistant' %}"
    "{{ m.content + (eos_token or '') }}{% elif m.role == 'system' %}"
    "{{ '[INST]' + m.content + '[/INST]' }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)  # fmt: skip
"""Mistral Nemo's."""

MISTRAL_V11 = _ALTERNATE + (
    "{{ bos_token or '' }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST]' + m.content + '[/INST]' }}{% elif m.tool_calls %}{% for c in m.tool_calls %}"
    + _NINE.replace("ID", "c.id") +
    "{{ '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]'"
    " + (c.function.arguments | tojson) }}{% endfor %}{{ eos_token or '' }}"
    "{% elif m.role == 'tool' %}" + _NINE.replace("ID", "m.tool_call_id") +
    "{{ '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + (eos_token or '') }}"
    "{% elif m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}"
    "{% else %}{{ raise_exception('Only system, user, assistant, and tool roles') }}{% endif %}"
    "{% endfor %}"
)  # fmt: skip
"""Mistral Small 3.2's."""

GEMMA_4 = _LAST + (
    "{% macro value(x) %}{% if x is string %}{{ '<|\"|>' + x + '<|\"|>' }}"
    "{% elif x is boolean %}{{ 'true' if x else 'false' }}"
    "{% elif x is mapping %}{{ '{' }}{% for k, v in x | dictsort %}{{ k }}:{{ value(v) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}"
    "{% elif x is sequence %}{{ '[' }}{% for v in x %}{{ value(v) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{{ ']' }}"
    "{% elif x is none %}null{% else %}{{ x }}{% endif %}{% endmacro %}"
    + _TOOLS.replace("START", "'<|turn>system\\n'").replace("END", "'<turn|>\\n'")
    + "{% for m in messages %}{% if m.role != 'tool' %}"
    "{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
    "{% set thought = m.reasoning or m.reasoning_content %}"
    "{% if thought and m.tool_calls and loop.index0 > ns.last %}"
    "{{ '<|channel>thought\\n' + thought + '\\n<channel|>' }}{% endif %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ '<|tool_call>call:' + c.function.name + value(c.function.arguments) + '<tool_call|>' }}"
    "{% endfor %}{% set calls = m.tool_calls %}{% set ns.asked = true %}"
    "{% for t in messages[loop.index:] %}{% if t.role != 'tool' %}{% set ns.asked = false %}"
    "{% elif ns.asked %}"
    "{% set of = (calls | selectattr('id', 'equalto', t.tool_call_id) | first) or calls[0] %}"
    "{{ '<|tool_response>response:' + of.function.name + '{value:' + value(t.content)"
    " + '}<tool_response|>' }}{% endif %}{% endfor %}{% endif %}{{ m.content }}"
    "{{ '<turn|>\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|turn>model\\n' }}{% endif %}"
)  # fmt: skip

GPT_OSS = (
    "{% set ns = namespace(name=none, last=-1) %}{% for m in messages %}"
    "{% if m.role == 'assistant' and not m.tool_calls %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.content and m.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
    "{% if (m.content or m.thinking) and loop.index0 > ns.last %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking)"
    " + '<|end|>' }}{% endif %}{% set ns.name = m.tool_calls[0].function.name %}"
    "{{ '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary json<|message|>'"
    " + (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}"
    "{% elif m.role == 'tool' %}{% if ns.name is none %}"
    "{{ raise_exception('Message has tool role, but there was no call before it!') }}{% endif %}"
    "{{ '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>'"
    " + (m.content | tojson) + '<|end|>' }}"
    "{% elif m.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
"""GPT-OSS's: it shows the first call of a message."""

TEMPLATES = {
    "hermes": HERMES, "qwen xml": QWEN_XML, "glm 4.5": GLM_45, "glm 4.7": GLM_47,
    "deepseek v3": DEEPSEEK_V3, "deepseek v3.1": DEEPSEEK_V31, "kimi k2": KIMI_K2,
    "minimax m2": MINIMAX_M2, "llama 3": LLAMA_3, "mistral v3": MISTRAL_V3,
    "mistral v11": MISTRAL_V11, "gemma 4": GEMMA_4, "gpt-oss": GPT_OSS,
}  # fmt: skip


def with_template(template: str) -> Any:
    """The package's tokenizer with a chat template."""
    found = deepcopy(load_tokenizer("tiny"))
    found.chat_template = template
    return found
