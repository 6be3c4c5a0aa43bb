"""A chat template shows every message, or the request is refused."""

from itertools import product
from typing import Any

import pytest

from qllm.errors import InvalidRequestError
from qllm.frontend.prompts import render_chat
from qllm.models.tokenizer import load_tokenizer

ASKED = {"role": "user", "content": "Hi."}
TEMPLATES = {
    "any role": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    "its own": "{% for m in messages %}{% if m.role == 'system' %}S:{{ m.content }}"
    "{% elif m.role == 'user' %}U:{{ m.content }}{% elif m.role == 'assistant' %}"
    "A:{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% elif m.role == 'tool' %}T:{{ m.content }}{% elif m.role == \"ipython\" %}P:{{ m.content }}"
    "{% endif %}{% endfor %}",
    "developer": "{% for m in messages %}{% if m.role in ['developer', 'user', 'assistant'] %}"
    "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}",
    "first": "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' or m.role == 'assistant' %}{{ m.content }}"
    "{% endif %}{% endfor %}",
    "strict": "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('only users') }}{% endif %}{{ m.content }}{% endfor %}",
    "last two": "{% for m in messages[-2:] %}{{ m.content }}{% endfor %}",
}


def tokenizer_of(template: str) -> Any:
    found = load_tokenizer("tiny")
    found.chat_template = template
    return found


def rendered(tokenizer: Any, messages: list[Any], **how: Any) -> str | None:
    """The text of messages; None if they are refused."""
    try:
        return str(tokenizer.decode(render_chat(messages, tokenizer, **how)))
    except InvalidRequestError:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_message_says_is_in_the_prompt_or_the_request_is_refused(name: str) -> None:
    tokenizer = tokenizer_of(TEMPLATES[name])
    roles = ("system", "developer", "user", "assistant", "tool", "function", "usr", "ipython")
    num_served = 0
    for length in (1, 2, 3):
        for chosen in product(roles, repeat=length):
            messages = [{"role": r, "content": f"SAID-{n}-"} for n, r in enumerate(chosen)]
            text = rendered(tokenizer, messages)
            num_served += text is not None
            assert text is None or all(f"SAID-{n}-" in text for n in range(length)), chosen
            assert text is None or "usr" not in chosen
    assert num_served >= 6


def test_a_developer_is_a_system_where_the_template_knows_none() -> None:
    own, known = tokenizer_of(TEMPLATES["its own"]), tokenizer_of(TEMPLATES["developer"])
    messages = [{"role": "developer", "content": "Be brief."}, ASKED]
    assert rendered(own, messages) == "S:Be brief.U:Hi."
    assert rendered(known, messages) == "[developer]Be brief.[user]Hi."
    both = [{"role": "system", "content": "One."}, *messages]
    assert rendered(own, both) == "S:One.\n\nBe brief.U:Hi."
    assert both[0]["content"] == "One.", "the caller's messages stay as they are"


@pytest.mark.parametrize(
    ("role", "says"),
    [
        ("usr", r"messages\[1\] has role 'usr'.*use one of system, developer, user"),
        ("function", r"leaves out the content of messages\[1\], of role 'function'"),
    ],
)
def test_a_refusal_names_the_message(role: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        render_chat([ASKED, {"role": role, "content": "x"}], tokenizer_of(TEMPLATES["its own"]))


def test_a_refusal_of_an_earlier_answer_is_what_the_model_said() -> None:
    parts = [{"type": "text", "text": "No"}, {"type": "refusal", "refusal": "I can't."}]
    tokenizer = tokenizer_of("{% for m in messages %}{{ m.content }};{% endfor %}")
    messages = [ASKED, {"role": "assistant", "content": parts}, ASKED]
    assert rendered(tokenizer, messages) == "Hi.;No\nI can't.;Hi.;"
    for wrong in ({"type": "refusal"}, {"type": "refusal", "text": "x"}, {"type": "thinking"}, 5):
        with pytest.raises(InvalidRequestError, match="content part of type"):
            render_chat([{"role": "user", "content": [wrong]}], tokenizer)


def test_what_says_nothing_may_be_left_out() -> None:
    tokenizer = tokenizer_of(TEMPLATES["last two"])
    assert rendered(tokenizer, [{"role": "system", "content": " "}, ASKED, ASKED]) == "Hi.Hi."
    assert rendered(tokenizer, [ASKED, ASKED, ASKED]) is None


HEAD = "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
TAIL = "{% endfor %}{% endif %}{{ m.content }}{% endfor %}"
WAYS = {
    "added up": "{{ 'call ' + c['function']['arguments'] + ';' }}",
    "shown": "{{ 'call ' }}{{ c.function.arguments }};",
    "joined": "{{ 'call ' ~ c.function.arguments ~ ';' }}",
    "as json": "{{ 'call ' + (c.function.arguments | tojson) + ';' }}",
    "either": "{% if c.function.arguments is string %}call {{ c.function.arguments }};{% else %}"
    "call {{ c.function.arguments | tojson }};{% endif %}",
    "walked": 'call { {%- for k, v in c.function.arguments.items() %}"{{ k }}": {{ v | tojson }}'
    "{% endfor -%} };",
    "whole": "call {{ (c.function | tojson)[27:-1] }};",
    "nine": "{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    "{{ 'call ' + c.function.arguments + ';' }}",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "given", ['{"place": "Bö\'nn"}', {"place": "Bö'nn"}], ids=["text", "object"]
)
def test_arguments_of_a_call_are_json_in_every_template(way: str, given: Any) -> None:
    tokenizer = tokenizer_of(HEAD + WAYS[way] + TAIL)
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": given}}
    messages = [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "123456789", "content": "Sun."},
    ]
    text = rendered(tokenizer, messages)
    assert text is not None
    compact = text.replace(" ", "")
    assert compact == 'Hi.call{"place":"Bö\'nn"};Sun.'
