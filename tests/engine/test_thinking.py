"""The reasoning budget: `</think>` comes when it is spent, whatever happens to the request."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from qllm.errors import InvalidRequestError
from qllm.grammar import Vocabulary
from qllm.llm import QLLMEngine
from qllm.runner.sampling.thinking import Thinking
from qllm.types import FinishReason, SamplingParams
from tests.support.letters import Letters

PROMPT = "What does json.dumps do?<think>"
BUDGET = 7


def sampling(**more: Any) -> SamplingParams:
    return SamplingParams(
        **{"seed": 4, "ignore_eos": True, "thinking_token_budget": BUDGET, **more}
    )


def end_of(engine: QLLMEngine) -> list[int]:
    return list(engine.tokenizer("</think>", add_special_tokens=False)["input_ids"])


def test_the_budget_ends_the_reasoning(engine: QLLMEngine) -> None:
    end = end_of(engine)
    free = engine.submit(PROMPT, max_tokens=40, sampling=sampling(thinking_token_budget=None))
    held = engine.submit(PROMPT, max_tokens=40, sampling=sampling()).result(300)
    assert held.token_ids[:BUDGET] == free.result(300).token_ids[:BUDGET]
    assert list(held.token_ids[BUDGET : BUDGET + len(end)]) == end
    assert held.text.count("</think>") == 1
    assert len(held.token_ids) == 40


def test_no_budget_at_all(engine: QLLMEngine) -> None:
    held = engine.submit(PROMPT, max_tokens=20, sampling=sampling(thinking_token_budget=0))
    assert held.result(300).text.startswith("</think>")


def test_an_answer_without_reasoning_is_as_it_was(engine: QLLMEngine) -> None:
    ask = {"prompt": "What does json.dumps do?", "max_tokens": 30}
    free = engine.submit(**ask, sampling=sampling(thinking_token_budget=None)).result(300)
    assert engine.submit(**ask, sampling=sampling()).result(300).token_ids == free.token_ids


def test_an_evicted_request_has_the_same_answer() -> None:
    settings: dict[str, Any] = {"max_kv_tokens": 256, "conformance": False, "threads": 1}
    settings["exactness"] = "batch-invariant"
    keywords: dict[str, Any] = {"max_tokens": 150, "sampling": sampling(thinking_token_budget=60)}
    with QLLMEngine.from_pretrained("tiny", run_in="thread", **settings) as engine:
        want = engine.submit(PROMPT, "BE", **keywords).result(300)
        handle = engine.submit(PROMPT, "BE", **keywords)
        next(iter(handle))
        engine.submit([5] * 180, "LS", max_tokens=60, sampling=SamplingParams(ignore_eos=True))
        found = handle.result(300)
        assert found.metrics.evictions >= 1
        assert found.token_ids == want.token_ids
        assert "</think>" in want.text


def test_a_checkpoint_keeps_the_state(engine: QLLMEngine, tmp_path: Path) -> None:
    keywords: dict[str, Any] = {"max_tokens": 90, "sampling": sampling(thinking_token_budget=50)}
    want = engine.submit(PROMPT, "BE", **keywords).result(300)
    with QLLMEngine.from_pretrained("tiny", threads=1, conformance=False) as other:
        handle = other.submit(PROMPT, "BE", **keywords)
        next(iter(handle))
        assert other.checkpoint(tmp_path / "file") == 1
        handle.cancel()
    (restored,) = engine.restore(tmp_path / "file")
    assert restored.result(300).token_ids == want.token_ids
    assert "</think>" in want.text


def test_it_goes_with_what_else_is_asked_for(engine: QLLMEngine) -> None:
    end, place = end_of(engine), slice(BUDGET, BUDGET + len(end_of(engine)))
    want = engine.submit(PROMPT, max_tokens=40, sampling=sampling()).result(300)
    shown = engine.submit(PROMPT, max_tokens=40, sampling=sampling(logprobs=2)).result(300)
    assert shown.token_ids == want.token_ids
    assert shown.logprobs is not None
    forced = [found.chosen for found in shown.logprobs[place]]
    assert min(forced) > -1000, "of what the model said, not of what was left to it"
    assert max(forced) < 0
    cut = engine.submit(PROMPT, max_tokens=40, sampling=sampling(stop=["</think>"])).result(300)
    assert cut.finish_reason is FinishReason.STOP
    assert want.text.startswith(f"{cut.text}</think>")
    asked = sampling(ignore_eos=False, min_tokens=30, temperature=0, logit_bias={2: 100.0})
    least = engine.submit(PROMPT, max_tokens=40, sampling=asked).result(300)
    assert (len(least.token_ids), least.token_ids[-1]) == (31, 2)
    assert list(least.token_ids[place]) == end
    many = engine.generate([PROMPT], sampling=sampling(n=3, max_tokens=40))
    assert len(many) == 3
    for answer in many:
        assert list(answer.token_ids[place]) == end


def test_refusals() -> None:
    with pytest.raises(InvalidRequestError, match="an integer in"):
        SamplingParams(thinking_token_budget=-1)
    with pytest.raises(InvalidRequestError, match="with a tokenizer"):
        Vocabulary(None, 9, frozenset()).encode("</think>")
    with pytest.raises(InvalidRequestError, match="has no token for '</think>'"):
        Vocabulary(Letters(), ord("t"), frozenset()).encode("</think>")


# -- the state


def ids(text: str) -> list[int]:
    return [ord(x) for x in text]


def follow(thinking: Thinking, text: str) -> str:
    """Take a model's wish, token by token, where none is forced; return the answer."""
    made: list[int] = []
    for wish in ids(text):
        while (forced := thinking.forced(made)) is not None:
            made.append(forced)
        made.append(wish)
    while (forced := thinking.forced(made)) is not None:
        made.append(forced)
    return "".join(map(chr, made))


@pytest.mark.parametrize(
    ("prompt", "wish", "want"),
    [
        ("<think>\n", "abcdefgh", "abcde</think>fgh"),
        ("x", "abcdefgh", "abcdefgh"),
        ("x", "<think>abcdefgh", "<think>abcde</think>fgh"),
        ("<think>\n", "ab</think>defgh", "ab</think>hink>defgh"),
        ("<think>\n", "abcdefgh<think>i", "abcde</think>fgh<think>i"),
        ("<think>\n", "abcde\n<think>i", "abcde</think>\n<think></think>i"),
        ("x", " \n<think>abcdefgh", " \n<think>abcde</think>fgh"),
        ("x", "Say <think>abcdefgh", "Say <think>abcdefgh"),
        ("x", "`<think>` and <think>", "`<think>` and <think>"),
        ("<think>x</think>", "abcdefgh", "abcdefgh"),
        ("<think>", "abc</tdefg", "abc</think>tdefg"),
        ("<think>", "ab</think>c<think>defghi", "ab</think>hink>c<think>defghi"),
        ("<think>", "ab</think> <think>defghi", "ab</think>hink> <think>defghi"),
    ],
)
def test_where_the_end_is_forced(prompt: str, wish: str, want: str) -> None:
    vocabulary = Vocabulary(Letters(), 256, frozenset())
    found = follow(Thinking(5, vocabulary, ids(prompt)), wish)
    assert found.startswith(want), found


class Tagged(Letters):
    """A tokenizer of which the tags are tokens too, and their letters are others."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {
        1: SimpleNamespace(content="<think>"),
        2: SimpleNamespace(content="</think>"),
    }

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": ids(text.replace("</think>", "\2").replace("<think>", "\1"))}

    def decode(self, ids: list[int], **_: Any) -> str:
        return super().decode(ids).replace("\1", "<think>").replace("\2", "</think>")


@pytest.mark.parametrize(
    ("prompt", "wish", "want"),
    [
        ("x", "\1abcdefgh", "\1abcde\2fgh"),
        ("x", "<think>abcdefgh", "<think>abcdefgh"),
        ("x", "<think>\1abcdefgh", "<think>\1abcdefgh"),
        ("x", "\1ab</think>cdefgh", "\1ab</t\2hink>cdefgh"),
        ("\1", "</think>fgh", "</thi\2nk>fgh"),
    ],
)
def test_of_a_tag_that_is_a_token_the_letters_are_no_tag(prompt: str, wish: str, want: str) -> None:
    vocabulary = Vocabulary(Tagged(), 256, frozenset())
    assert follow(Thinking(5, vocabulary, ids(prompt)), wish) == want
    whole = Thinking(12, vocabulary, ids("\1"))
    assert follow(whole, "a</think>bcdefgh") == "a</think>bcd\2efgh"


def test_the_state_is_a_function_of_the_tokens() -> None:
    vocabulary = Vocabulary(Letters(), 256, frozenset())
    text = ids("ab</think>c<think>defgh</think>i")
    one = Thinking(5, vocabulary, ids("<think>"))
    stepwise = [one.forced(text[:i]) for i in range(len(text))]
    again = [one.forced(text[:i]) for i in range(len(text))]
    fresh = [Thinking(5, vocabulary, ids("<think>")).forced(text[:i]) for i in range(len(text))]
    assert stepwise == again == fresh
    assert any(x is not None for x in fresh)
