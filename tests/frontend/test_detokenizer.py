"""Incremental text equals the text of all ids; stop strings depend on the text alone."""

from collections.abc import Iterator
from typing import ClassVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from qllm.errors import InvalidRequestError
from qllm.frontend.detokenizer import (
    MAX_WINDOW,
    Detokenizer,
    bytes_of,
    certain_text,
    decoded,
    token_text,
    token_texts,
)
from qllm.types import SamplingParams
from tests.support.tokenizers import KINDS, byte_level, sentencepiece_like


def batched(ids: list[int], size: int) -> Iterator[list[int]]:
    return (ids[i : i + size] for i in range(0, len(ids), size))


def decode(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stream(detokenizer: Detokenizer, ids: list[int], size: int = 1) -> str:
    text = "".join(detokenizer.push(part)[0] for part in batched(ids, size))
    return text + detokenizer.finish()


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, ids: list[int], **options: bool) -> str:
        self.num_decoded += len(ids)
        return self.tokenizer.decode(ids, **options)


TEXT = st.text(alphabet=st.sampled_from("abcdeT. \n日本é🎉👩‍\ufffd"), max_size=40) | st.text(
    alphabet=st.characters(exclude_categories=["Cs"]), max_size=40
)


@settings(deadline=None, max_examples=150)
@given(text=TEXT, size=st.integers(1, 5))
@example(text="\ufffd" * 20 + "a", size=1)
@example(text=" " * 100, size=3)
def test_pieces_join_to_the_whole_text(text: str, size: int) -> None:
    for tokenizer in (byte_level(), sentencepiece_like()):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert stream(Detokenizer(tokenizer), ids, size) == decode(tokenizer, ids)
    ids = byte_level().encode(text, add_special_tokens=False)
    assert decode(byte_level(), ids) == text


def test_the_bytes_of_tokens_join_to_the_text() -> None:
    text = "日本é🎉�a"
    for tokenizer in (byte_level(), sentencepiece_like()):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) > len(text)
        found = b"".join(bytes_of(tokenizer, i, decoded(tokenizer, [i])) for i in ids)
        assert found.decode().strip() == text


@settings(deadline=None, max_examples=150)
@given(ids=st.lists(st.integers(0, 329), max_size=80))
@example(ids=list(range(330)))
def test_any_ids_of_a_byte_level_vocabulary_join(ids: list[int]) -> None:
    assert stream(Detokenizer(byte_level()), ids) == decode(byte_level(), ids)


@settings(deadline=None, max_examples=100)
@given(ids=st.lists(st.just(0) | st.integers(258, 271), max_size=30))
@example(ids=[258, 0, 258, 260])
@example(ids=[0, 0, 258, 0, 270])
def test_spaces_and_special_tokens_of_a_sentencepiece_vocabulary_join(ids: list[int]) -> None:
    tokenizer = sentencepiece_like()
    assert stream(Detokenizer(tokenizer), ids) == decode(tokenizer, ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(text=TEXT, at=st.integers(0, 60), size=st.integers(1, 4), special=st.booleans())
@example(text="a \ufffd", at=1, size=1, special=False)
@example(text="🎉 é \ufffd a 🎉", at=5, size=1, special=False)
@example(text="日本日本日本日本日本日本日本 日本", at=40, size=1, special=False)
@example(text="éé日", at=6, size=1, special=False)
@example(text="  a", at=2, size=1, special=True)
def test_an_answer_goes_on_with_the_text_of_its_prompt(
    kind: str, text: str, at: int, size: int, special: bool
) -> None:
    """Wherever a text is cut: before a space, or inside a character."""
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text)  # what stands in front is a part of the prompt
    at += len(ids) - len(tokenizer.encode(text, add_special_tokens=False))
    prompt, answer = ids[:at], ids[at:]
    if answer:
        sure, _ = certain_text(tokenizer, prompt, special=special)
        shown = stream(Detokenizer(tokenizer, prompt=prompt, special=special), answer, size)
        assert sure + shown == decoded(tokenizer, ids, special=special)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_behind_special_tokens_alone_begins_a_text(kind: str) -> None:
    """However many they are; a space that the decoder strips may be among them."""
    tokenizer = KINDS[kind]()
    word = tokenizer.encode("the cat", add_special_tokens=False)
    space = tokenizer.convert_tokens_to_ids("▁")
    for before in ([], [space] if isinstance(space, int) else []):
        for num in (1, 15, 16, 17, 100):
            for prompt in ([*before, *[0] * num], [0] * num + before, [*word, *[0] * num]):
                shown = stream(Detokenizer(tokenizer, prompt=prompt), word)
                assert decode(tokenizer, prompt) + shown == decode(tokenizer, [*prompt, *word])


def test_a_character_that_is_not_whole_goes_on_behind_special_tokens() -> None:
    first, *rest = byte_ids("中".encode())
    prompt = [*byte_ids(b"a"), first, 0, 0]
    assert certain_text(byte_level(), prompt, special=False)[0] == "a"
    assert stream(Detokenizer(byte_level(), prompt=prompt), rest) == "中"
    assert stream(Detokenizer(byte_level(), prompt=prompt), byte_ids(b"b")) == "\ufffdb"


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(text=TEXT, special=st.booleans(), at=st.integers(0, 60))
@example(text="é🎉 a  b\ufffd", special=True, at=60)
@example(text="é🎉", special=False, at=1)
def test_the_texts_of_tokens_join_to_the_text(kind: str, text: str, special: bool, at: int) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text)[: at + 1]
    found = token_texts(tokenizer, ids, special=special, is_whole=True)
    whole = decoded(tokenizer, ids, special=special)
    sure, num_open = certain_text(tokenizer, ids, special=special)
    if num_open:  # byte fallback breaks the characters before that one too
        assert "".join(found).rstrip("\ufffd") == sure.rstrip("\ufffd")
        assert len("".join(found)) == len(whole)
    else:
        assert "".join(found) == whole
    found = token_texts(tokenizer, ids, special=special, is_whole=False)
    assert "".join(found) == sure
    assert len(found) == len(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(text=TEXT)
def test_a_token_is_shown_as_what_it_adds_inside_a_text(kind: str, text: str) -> None:
    """All but the first, whose space may be stripped, and those of parts of characters."""
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(f"a{text}", add_special_tokens=False)
    texts = token_texts(tokenizer, ids, special=True, is_whole=True)
    for token_id, added in list(zip(ids, texts, strict=True))[1:]:
        shown = token_text(tokenizer, token_id)
        assert shown == added or "\ufffd" in shown + added


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_differ_by_a_space_have_two_texts(kind: str) -> None:
    tokenizer = KINDS[kind]()
    known, num = tokenizer.get_vocab(), 0
    for token, token_id in known.items():
        with_space = next((x for x in (f"▁{token}", f"Ġ{token}") if x in known), None)
        if kind == "word pieces" and token.startswith("##"):
            token, with_space = token[2:], token[2:]
        text = token_text(tokenizer, token_id)
        if with_space in known and "\ufffd" not in text:
            num += 1
            assert token_text(tokenizer, known[with_space]) == f" {text}"
    assert num > 1


def byte_ids(data: bytes) -> list[int]:
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's letters for bytes
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = [chr(b if b in shown else 256 + hidden.index(b)) for b in data]
    return byte_level().convert_tokens_to_ids(letters)


def test_text_waits_for_whole_characters() -> None:
    detokenizer = Detokenizer(byte_level())
    pieces = [detokenizer.push([i])[0] for i in byte_ids("a中🎉".encode())]
    assert pieces == ["a", "", "", "中", "", "", "", "🎉"]
    assert detokenizer.push(byte_ids("é".encode()[:1])) == ("", False)
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("data", [b"\xe4", b"\x80", b"\xf0\x9f\x8e", "\ufffd".encode()])
def test_endless_broken_text_costs_a_bounded_window_per_token(data: bytes) -> None:
    tokenizer, num = Counting(byte_level()), 600
    ids = (byte_ids(data) * num)[:num] + byte_ids("中a".encode())
    assert stream(Detokenizer(tokenizer), ids) == decode(byte_level(), ids)
    assert tokenizer.num_decoded < (MAX_WINDOW + 3) * len(ids)


@pytest.mark.parametrize("num", range(MAX_WINDOW - 4, MAX_WINDOW + 2))
def test_a_full_window_may_end_inside_a_character(num: int) -> None:
    ids = byte_ids(b"\x80" * num + "🎉a".encode())
    assert stream(Detokenizer(byte_level()), ids) == "\ufffd" * num + "🎉a"


def test_endless_special_tokens_and_plain_text_cost_little() -> None:
    word = byte_level().encode(" the", add_special_tokens=False)
    for ids, per_token in (([0] * 600, MAX_WINDOW + 2), (word * 300, 4), ([*word, *[0] * 600], 4)):
        tokenizer = Counting(byte_level())
        assert stream(Detokenizer(tokenizer), ids) == decode(byte_level(), ids)
        assert tokenizer.num_decoded <= per_token * len(ids) + 8


def test_specials_between_the_bytes_of_a_character_lose_nothing() -> None:
    first, *rest = byte_ids("中".encode())
    for num in (1, 10, 200):
        ids = [first, *[0] * num]
        assert stream(Detokenizer(byte_level()), ids) == "\ufffd"
    assert stream(Detokenizer(byte_level()), [first, 0, *rest]) == "中"


class Tagged:
    """Knows one tag, and no reasoning."""

    marks: ClassVar[dict[int, str]] = {0: "\ud800"}
    is_thinking = False

    def split(self, text: str, token_id: int) -> list[tuple[str, bool]]:
        return [(text, False)]

    def undecided(self) -> str:
        return ""


@pytest.mark.parametrize("stop", [(), ("xyz",)])
def test_a_tag_stands_behind_all_that_was_said_before_it(stop: tuple[str, ...]) -> None:
    """A broken character does not wait for bytes behind a tag."""
    first, *rest = byte_ids("中".encode())
    for before, after, text in (
        (byte_ids(b"ab"), byte_ids(b"c"), "ab\ud800c"),
        (byte_ids(b"x"), byte_ids(b"yz"), "x\ud800yz"),
        ([first], [*byte_ids(b"c")], "\ufffd\ud800c"),
        ([first], rest, "\ufffd\ud800\ufffd\ufffd"),
    ):
        detokenizer = Detokenizer(byte_level(), stop, reading=Tagged)
        assert stream(detokenizer, [*before, 0, *after]) == text


def cut(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """Cut at the stop string that is complete first, the longest if several are."""
    for end in range(len(text) + 1):
        found = [end - len(s) for s in stop if text[:end].endswith(s)]
        if found:
            return text[: min(found)], True
    return text, False


@settings(deadline=None, max_examples=150)
@given(
    text=st.text(alphabet="ab ", max_size=20),
    stop=st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), max_size=3).map(tuple),
    size=st.integers(1, 7),
)
@example(text="ababac", stop=("abac",), size=1)
@example(text=" the", stop=("the", "h"), size=9)
def test_a_stop_string_cuts_the_same_text_however_it_arrives(
    text: str, stop: tuple[str, ...], size: int
) -> None:
    ids = byte_level().encode(text, add_special_tokens=False)
    detokenizer, seen, stopped = Detokenizer(byte_level(), stop), "", False
    expected, is_cut = cut(text, stop)
    for part in batched(ids, size):
        new, stopped = detokenizer.push(part)
        seen += new
        assert expected.startswith(seen), "handed out what a stop string takes back"
    assert stopped == is_cut
    assert seen + detokenizer.finish() == expected


def test_every_token_is_searched_for_a_bounded_number_of_stop_strings() -> None:
    SamplingParams(stop=["x" * 64] * 256)
    for stop in (["x"] * 257, ["x" * 16_385]):
        with pytest.raises(InvalidRequestError, match="at most 256 and 16384 are allowed"):
            SamplingParams(stop=stop)


def test_every_record_holds_a_bounded_number_of_ids() -> None:
    SamplingParams(stop_token_ids=[1] * 1024, logit_bias=dict.fromkeys(range(4096), 1.0))
    with pytest.raises(InvalidRequestError, match="stop_token_ids has 1025 entries; at most 1024"):
        SamplingParams(stop_token_ids=[1] * 1025)
    with pytest.raises(InvalidRequestError, match="logit_bias has 4097 entries; at most 4096"):
        SamplingParams(logit_bias=dict.fromkeys(range(4097), 1.0))


def test_only_what_may_begin_a_stop_string_waits() -> None:
    detokenizer = Detokenizer(byte_level(), ("\n\nUser:",))
    [newline, e, u] = byte_ids(b"\neU")
    assert detokenizer.push([e]) == ("e", False)
    assert detokenizer.push([newline]) == ("", False)
    assert detokenizer.push([e]) == ("\ne", False)
    assert detokenizer.push([newline, newline, newline, u]) == ("\n", False)
    assert detokenizer.push(byte_ids(b"ser: x")) == ("", True)
    assert detokenizer.push([e]) == ("", True)
    assert detokenizer.finish() == ""


def test_a_stop_string_across_characters_and_tokens() -> None:
    detokenizer = Detokenizer(byte_level(), ("中a",))
    pieces = [detokenizer.push([i]) for i in byte_ids("é中ab".encode())]
    assert "".join(text for text, _ in pieces) == "é"
    assert [stopped for _, stopped in pieces] == [False] * 5 + [True] * 2


def test_no_stop_string_is_looked_for_in_the_first_tokens() -> None:
    detokenizer = Detokenizer(byte_level(), ("b",), min_tokens=2)
    assert [detokenizer.push([i]) for i in byte_ids(b"abab")] == [
        ("a", False),
        ("b", False),
        ("a", False),
        ("", True),
    ]
    detokenizer = Detokenizer(byte_level(), ("b",), min_tokens=1)
    assert [stopped for _, stopped in map(detokenizer.push, [[i] for i in byte_ids(b"bb")])] == [
        False,
        True,
    ]
