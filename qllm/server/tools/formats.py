"""Formats of popular models, taken from the models' chat templates or encoders."""

from qllm.server.tools.format import PYTHON, Format, Notation
from qllm.server.tools.harmony import MARKS

HERMES = Format(
    "hermes",
    calls=("<tool_call>\n$json\n</tool_call>",),
    signs=("<tool_call>",),
    lead="\n",
    between="\n",
)
"""Nous Hermes, Qwen2.5, Qwen3."""

QWEN_XML = Format(
    "qwen-xml",
    calls=(
        "<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>",
        "<function=$name>\n$arguments</function>\n</tool_call>",
    ),
    argument="<parameter=$key>\n$value\n</parameter>\n",
    notation=Notation(literals=PYTHON.literals),
    signs=("<tool_call>", "<function=", "<parameter="),
    lead="\n\n",
    between="\n",
    ends_reasoning=True,
)
"""Qwen3-Coder, Qwen3.5 and later. Models also leave out the first tag."""

GLM = Format(
    "glm",
    calls=("<tool_call>$name\n$arguments</tool_call>",),
    argument="<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n",
    signs=("<tool_call>", "<arg_key>", "<arg_value>"),
    lead="\n",
    between="\n",
    reasoning=("<think>", "</think>\n"),
)
"""GLM-4.5 and GLM-4.6."""

GLM_COMPACT = Format(
    "glm-compact",
    calls=("<tool_call>$name$arguments</tool_call>",),
    argument="<arg_key>$key</arg_key><arg_value>$value</arg_value>",
    signs=("<tool_call>", "<arg_key>", "<arg_value>", "</arg_key><arg_value>"),
    lead="\n",
    reasoning=("<think>", "</think>"),
)
"""GLM-4.7 and GLM-5."""

MINIMAX = Format(
    "minimax",
    calls=('<invoke name="$name">\n$arguments</invoke>',),
    argument='<parameter name="$key">$value</parameter>\n',
    signs=("<minimax:tool_call>",),
    sections=(("<minimax:tool_call>\n", "\n</minimax:tool_call>"),),
    lead="\n",
    between="\n",
)
"""MiniMax-M2."""

DEEPSEEK_V3 = Format(
    "deepseek-v3",
    calls=(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$arguments\n```<｜tool▁call▁end｜>",
    ),
    signs=("<｜tool▁sep｜>", "```json"),
    sections=(("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),),
    between="\n",
)
"""DeepSeek-V3 and R1."""

DEEPSEEK_V31 = Format(
    "deepseek-v3.1",
    calls=("<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>",),
    signs=("<｜tool▁sep｜>",),
    sections=(("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),),
    reasoning=("<think>", "</think>"),
)


def _dsml(name: str, outer: str, gap: str = "") -> Format:
    """Return a variant of DSML. DeepSeek's encoders differ in the name of the outer element."""
    tag = f"｜DSML｜{gap}"
    outers = dict.fromkeys((outer, "function_calls", "tool_calls", "calls"))
    return Format(
        name,
        calls=(
            f'<{tag}invoke name="$name">\n$arguments</{tag}invoke>',
            f'<{tag}invoke name="$name"/>',
        ),
        argument=f'<{tag}parameter name="$key" string="$string">$value</{tag}parameter>\n',
        signs=("｜DSML｜", outer),
        sections=tuple((f"<{tag}{x}>\n", f"\n</{tag}{x}>") for x in outers),
        lead="\n\n",
        between="\n",
        reasoning=("<think>", "</think>"),
    )


DEEPSEEK_V32 = _dsml("deepseek-v3.2", "function_calls")
DEEPSEEK_V4 = _dsml("deepseek-v4", "tool_calls")
DEEPSEEK_V41 = _dsml("deepseek-v4.1", "calls", " ")

KIMI_K2 = Format(
    "kimi-k2",
    calls=(
        "<|tool_call_begin|>functions.$name:$index<|tool_call_argument_begin|>"
        "$arguments<|tool_call_end|>",
        "<|tool_call_begin|>functions.$name:$index <|tool_call_argument_begin|>"
        "$arguments<|tool_call_end|>",
        "<|tool_call_begin|>$name:$index <|tool_call_argument_begin|>$arguments<|tool_call_end|>",
    ),
    signs=("<|tool_call_argument_begin|>",),
    sections=(("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
    reasoning=("<think>", "</think>"),
    ends_reasoning=True,
)

KIMI_K3 = Format(
    "kimi-k3",
    calls=('<|open|>call tool="$name" index="$index"<|sep|>$arguments<|close|>call<|sep|>',),
    argument=('<|open|>argument key="$key" type="$type"<|sep|>$value<|close|>argument<|sep|>'),
    is_escaped=True,
    signs=("<|open|>", "<|close|>", "<|sep|>"),
    sections=(("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),),
    reasoning=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ends_reasoning=True,
    hidden=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)

MISTRAL_V3 = Format(
    "mistral-v3",
    calls=("$json",),
    signs=("[TOOL_CALLS]",),
    sections=(("[TOOL_CALLS] [", "]"),),
    between=", ",
    reasoning=None,
)
"""Mistral's tokenizers before version 11."""

MISTRAL_V11 = Format(
    "mistral-v11",
    calls=(
        "[TOOL_CALLS]$name[ARGS]$arguments",
        "[TOOL_CALLS]$name[CALL_ID]$id[ARGS]$arguments",
    ),
    signs=("[TOOL_CALLS]", "[ARGS]"),
    reasoning=("<think>\n", "\n</think>\n"),
)
"""Mistral's tokenizers of version 11. Magistral 2506 writes the tags of reasoning as plain text."""

MISTRAL = Format(
    "mistral",
    calls=MISTRAL_V11.calls,
    signs=("[TOOL_CALLS]", "[ARGS]", "[THINK]"),
    reasoning=("[THINK]", "[/THINK]"),
)
"""Mistral's tokenizers of version 13 and later."""

GEMMA = Format(
    "gemma",
    calls=("<|tool_call>call:$name$arguments<tool_call|>",),
    notation=Notation(quotes=('<|"|>',), escapes=False, bare=True, comma=",", is_sorted=True),
    signs=("<|tool_call>", "<tool_call|>"),
    reasoning=("<|channel>thought\n", "\n<channel|>"),
)
"""Gemma 4."""

LLAMA3 = Format(
    "llama3",
    calls=("$json",),
    keys=("name", "parameters"),
    signs=("<|python_tag|>",),
    between="; ",
    at_start=True,
    reasoning=None,
    hidden=("<|python_tag|>",),
)
"""Llama 3.1 to 3.3."""

LLAMA4 = Format(
    "llama4",
    calls=("$name$arguments",),
    notation=PYTHON,
    signs=("<|python_start|>",),
    sections=(("[", "]"),),
    between=", ",
    at_start=True,
    reasoning=None,
    hidden=("<|python_start|>", "<|python_end|>"),
)

HARMONY = Format(
    "harmony",
    calls=(
        "<|start|>assistant<|channel|>commentary to=functions.$name <|constrain|>json<|message|>"
        "$arguments<|call|>",
    ),
    signs=MARKS,
    reasoning=("<|channel|>analysis<|message|>", "<|end|>"),
    has_heads=True,
)
"""GPT-OSS."""

FORMATS = {
    x.name: x
    for x in (
        *(HERMES, QWEN_XML, GLM, GLM_COMPACT, MINIMAX, DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32),
        *(DEEPSEEK_V4, DEEPSEEK_V41, KIMI_K2, KIMI_K3, MISTRAL_V3, MISTRAL_V11, MISTRAL, GEMMA),
        *(LLAMA3, LLAMA4, HARMONY),
    )
}
"""Formats by name."""
