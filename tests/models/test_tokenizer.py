"""Ids of long texts: the same, and without the interpreter's lock."""

from collections.abc import Callable
from typing import Any

import pytest

from qllm import QLLMEngine
from qllm.errors import ContextLengthError
from qllm.frontend.growing import GrowingText
from qllm.frontend.prompts import render_chat, to_token_ids
from qllm.models.tokenizer import LONG_TEXT, ids_of, load_tokenizer, longest_token
from tests.support.lock import longest_hold_s

MOST_HELD_S = 0.02
TEXTS = {
    "words": "word " * 60_000,
    "one letter": "a" * 200_000,
    "many bytes": "\u20ac\U0001f600" * 20_000,
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("tiny")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_a_long_text_has_the_ids_that_the_tokenizer_gives_it(
    tokenizer: Any, text: str, special: bool
) -> None:
    for size in (LONG_TEXT - 1, LONG_TEXT, LONG_TEXT + 1, len(text)):
        expected = tokenizer(text[:size], add_special_tokens=special)["input_ids"]
        assert ids_of(tokenizer, text[:size], special=special) == expected


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_other_threads_go_on_while_a_long_text_is_made_into_tokens(
    tokenizer: Any, text: str
) -> None:
    def grow() -> None:
        growing = GrowingText(tokenizer, lambda whole: ids_of(tokenizer, whole))
        growing.append(text)
        growing.replace(0, text)
        growing.finish()

    chat = [{"role": "user", "content": text}]
    ways: dict[str, Callable[[], object]] = {
        "prompt": lambda: to_token_ids(text, tokenizer, 1 << 20),
        "chat": lambda: render_chat(chat, tokenizer),
        "growing": grow,
    }
    held = {name: longest_hold_s(do) for name, do in ways.items()}
    assert all(seconds <= MOST_HELD_S for seconds in held.values()), held


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def ids(_: Any, text: str, **__: Any) -> list[int]:
        asked.append(len(text))
        return [1]

    monkeypatch.setattr("qllm.frontend.prompts.ids_of", ids)
    shape = engine.client.info.shape
    most = shape.longest(engine.config.pool_tokens) * longest_token(engine.tokenizer)
    engine.submit("a" * most, max_tokens=1).result()
    assert asked == [most]
    for prompt in ("a" * (most + 1), [{"role": "user", "content": "a" * most}]):
        with pytest.raises(ContextLengthError, match=f"at most {most}"):
            engine.submit(prompt)
    with engine.open(prompt="") as growing, pytest.raises(ContextLengthError):
        growing.append("a" * (most + 1))
    assert asked == [most]
