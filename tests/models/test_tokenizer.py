"""Ids of texts: one BOS, and long texts without the interpreter's lock."""

from collections.abc import Callable
from typing import Any

import pytest

from qllm import QLLMEngine
from qllm.errors import ContextLengthError
from qllm.frontend.incremental_tokens import IncrementalText
from qllm.frontend.prompts import render_chat, to_token_ids
from qllm.models.tokenizer import LONG_TEXT, ids_of, load_tokenizer, longest_token
from tests.support.lock import longest_hold_s
from tests.support.tokenizers import IN_FRONT, KINDS

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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["", "a", "the cat", " a", "a" * LONG_TEXT])
def test_a_text_that_was_rendered_has_what_stands_in_front_once(kind: str, text: str) -> None:
    """A text has the ids that its own tokens come to, and those in front that it lacks."""
    tokenizer = KINDS[kind]()
    front = tokenizer.convert_tokens_to_ids(IN_FRONT.get(kind, []))
    rendered = "".join(IN_FRONT.get(kind, [])) + text
    bare, whole = (ids_of(tokenizer, rendered, special=x) for x in (False, True))
    end = tokenizer(text)["input_ids"][len(front) + len(ids_of(tokenizer, text, special=False)) :]
    assert whole == [*bare, *end]
    assert bare[: len(front)] == front
    assert ids_of(tokenizer, text)[: len(front)] == front
    twice = ids_of(tokenizer, "".join(IN_FRONT.get(kind, [])) + rendered)
    assert twice[: 2 * len(front)] == 2 * front, "a user may write it twice"
    tokens = IncrementalText(tokenizer, lambda whole: ids_of(tokenizer, whole))
    tokens.append(rendered)
    tokens.look()
    assert [*tokens.token_ids, *end] == (whole if rendered else [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_that_puts_nothing_in_front_leaves_what_a_user_wrote_twice(kind: str) -> None:
    tokenizer = KINDS[kind]()
    special = tokenizer.convert_ids_to_tokens(next(iter(tokenizer.added_tokens_decoder)))
    assert ids_of(tokenizer, 2 * special, special=False)[:2] == 2 * [
        tokenizer.convert_tokens_to_ids(special)
    ]
    num = len(IN_FRONT.get(kind, []))
    both = ids_of(tokenizer, 2 * special)[num : num + 2]
    assert both == 2 * [tokenizer.convert_tokens_to_ids(special)]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_other_threads_go_on_while_a_long_text_is_made_into_tokens(
    tokenizer: Any, text: str
) -> None:
    def grow() -> None:
        tokens = IncrementalText(tokenizer, lambda whole: ids_of(tokenizer, whole))
        tokens.append(text)
        tokens.replace(0, text)
        tokens.finish()

    chat = [{"role": "user", "content": text}]
    ways: dict[str, Callable[[], object]] = {
        "prompt": lambda: to_token_ids(text, tokenizer, 1 << 20),
        "chat": lambda: render_chat(chat, tokenizer),
        "pieces": grow,
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
    with engine.open(prompt="") as prompt, pytest.raises(ContextLengthError):
        prompt.append("a" * (most + 1))
    assert asked == [most]
