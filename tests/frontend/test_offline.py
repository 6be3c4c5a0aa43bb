"""`generate`, `chat` and keywords of `submit`, as vLLM's users write them; what prints well."""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import qllm
from qllm import InvalidRequestError, QLLMEngine, Result, SamplingParams
from qllm.types import NUM_SEEDS, Priority
from tests.support.byte_models import TEMPLATE, engine_of, ids

HI = [{"role": "user", "content": "hi"}]
HOT = SamplingParams(temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def threaded() -> Iterator[QLLMEngine]:
    with engine_of() as made:
        yield made


def texts(results: list[Result]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


# -- generate


@pytest.mark.parametrize(
    "prompt", ["hello", HI, ids(9), tuple(ids(4))], ids=["text", "chat", "ids", "tuple"]
)
def test_one_prompt_is_one_request(threaded: QLLMEngine, prompt: Any) -> None:
    (result,) = threaded.generate(prompt, max_tokens=3, progress=False)
    alone = threaded.submit(prompt, "BE", 3).result(300)
    assert result.prompt_token_ids == alone.prompt_token_ids
    assert result.token_ids == alone.token_ids


def test_many_prompts_of_every_kind_keep_their_order(threaded: QLLMEngine) -> None:
    prompts = ["hello", HI, ids(9)]
    mixed = threaded.generate(iter(prompts), max_tokens=2, progress=False)
    alone = [threaded.submit(prompt, "BE", 2).result(300).prompt_token_ids for prompt in prompts]
    assert [result.prompt_token_ids for result in mixed] == alone
    assert threaded.generate((), progress=False) == []


def test_n_answers_lie_side_by_side_and_each_has_its_seed(threaded: QLLMEngine) -> None:
    found = threaded.generate(["abc", "de"], max_tokens=6, sampling=HOT, n=3, progress=False)
    alone = [
        threaded.submit(prompt, "BE", 6, sampling=HOT, seed=7 + i).result(300)
        for prompt, i in itertools.product(["abc", "de"], range(3))
    ]
    assert texts(found) == texts(alone)
    assert len(set(texts(found)[:3])) == 3
    assert (
        texts(
            threaded.generate(
                "abc",
                sampling=SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=6),
                progress=False,
            )
        )
        == texts(alone)[:3]
    )


def test_seeds_wrap_and_without_one_every_answer_differs(threaded: QLLMEngine) -> None:
    last = threaded.generate(
        "abc", seed=NUM_SEEDS - 1, n=2, temperature=1.0, max_tokens=6, progress=False
    )
    assert (
        last[1].token_ids
        == threaded.submit("abc", "BE", 6, seed=0, temperature=1.0).result(300).token_ids
    )
    free = threaded.generate(["abc"] * 2, n=2, temperature=1.0, max_tokens=8, progress=False)
    assert len(set(texts(free))) == 4


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"n": 0}, InvalidRequestError, r"n=0 must be an integer in \[1, 128\]"),
        ({"n": 129}, InvalidRequestError, r"n=129 must be"),
        ({"sampling": {}}, InvalidRequestError, r"sampling=\{\} must be SamplingParams"),
        ({"sampling_params": HOT}, TypeError, "unknown keyword 'sampling_params'; use sampling="),
        ({"temprature": 1}, TypeError, "unknown keyword 'temprature'; use temperature="),
        ({"zzz": 1}, TypeError, "unknown keyword 'zzz'; fields of SamplingParams are allowed_"),
        ({"priority": HOT, "sampling": HOT}, InvalidRequestError, "given twice, in the place of"),
    ],
)
def test_wrong_keywords_are_refused(
    threaded: QLLMEngine, kwargs: dict[str, Any], error: type[Exception], match: str
) -> None:
    for call in (threaded.generate, threaded.chat):
        with pytest.raises(error, match=match):
            call(HI, **{"progress": False, **kwargs})
    assert threaded.num_waiting == 0


def test_sampling_params_in_second_place_are_taken_as_in_vllm(threaded: QLLMEngine) -> None:
    for call, priority, prompt in ((threaded.generate, "BE", "abc"), (threaded.chat, "LS", HI)):
        (found,) = call(prompt, HOT, 6, progress=False)
        (named,) = call(prompt, max_tokens=6, sampling=HOT, progress=False)
        assert found.token_ids == named.token_ids
        assert found.metrics.priority == Priority[priority]
    with pytest.raises(InvalidRequestError, match="pass sampling="):
        threaded.submit("abc", HOT)  # type: ignore[arg-type]


def test_a_result_prints_its_answer_and_what_it_cost(threaded: QLLMEngine) -> None:
    (result,) = threaded.generate("abc", max_tokens=64, progress=False)
    assert str(result) == f"{result.text}\n\n{result.metrics}"
    assert str(list(result.token_ids))[1:-1] not in str(result)


def test_what_is_public_is_listed() -> None:
    assert set(dir(qllm)) == {*qllm.__all__, "__version__"}
    assert all(hasattr(qllm, name) for name in dir(qllm))


def test_one_message_alone_is_refused_with_what_to_do(threaded: QLLMEngine) -> None:
    with pytest.raises(InvalidRequestError, match="is one message; put it into a list"):
        threaded.generate(HI[0], progress=False)
    with pytest.raises(InvalidRequestError, match="prompt=b'abc' must be"):
        threaded.generate(b"abc", progress=False)
    with pytest.raises(InvalidRequestError, match="prompt=5 must be"):
        threaded.generate(5, progress=False)


# -- chat


def test_chat_answers_one_conversation_or_several(threaded: QLLMEngine) -> None:
    more = [*HI, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "no"}]
    (one,) = threaded.chat(HI, max_tokens=3)
    both = threaded.chat([HI, more], max_tokens=3)
    assert (
        one.token_ids
        == both[0].token_ids
        == threaded.submit(HI, max_tokens=3).result(300).token_ids
    )
    assert both[1].prompt_token_ids == tuple(b"u:hi|a:yes|u:no|a:")
    assert one.metrics.priority == 0
    assert threaded.generate(HI, max_tokens=1, progress=False)[0].metrics.priority == 10


def test_chat_leaves_the_last_message_open_or_unanswered(threaded: QLLMEngine) -> None:
    (bare,) = threaded.chat(HI, max_tokens=1, add_generation_prompt=False)
    assert bare.prompt_token_ids == tuple(b"u:hi|")
    open_one = [*HI, {"role": "assistant", "content": "ye"}]
    (goes_on,) = threaded.chat(
        open_one, max_tokens=1, add_generation_prompt=False, continue_final_message=True
    )
    assert goes_on.prompt_token_ids == tuple(b"u:hi|a:ye")
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        threaded.chat(HI, continue_final_message=True)


def test_chat_passes_tools_and_variables_to_the_template(threaded: QLLMEngine) -> None:
    threaded.tokenizer.chat_template = TEMPLATE + "{{ tools[0].name }}{{ mood }}"
    try:
        (result,) = threaded.chat(
            HI, max_tokens=1, tools=[{"name": "f"}], chat_template_kwargs={"mood": "!"}
        )
    finally:
        threaded.tokenizer.chat_template = TEMPLATE
    assert result.prompt_token_ids == tuple(b"u:hi|a:f!")


@pytest.mark.parametrize("messages", ["hi", ids(3), [], [[]], ["hi"], [ids(2)]])
def test_chat_refuses_what_is_no_conversation(threaded: QLLMEngine, messages: Any) -> None:
    if messages == []:
        assert threaded.chat(messages) == []
        return
    with pytest.raises(InvalidRequestError, match="must be a list of messages"):
        threaded.chat(messages)


def test_content_parts_are_joined_and_other_parts_refused(threaded: QLLMEngine) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (result,) = threaded.chat([{"role": "user", "content": parts}], max_tokens=1)
    assert result.prompt_token_ids == tuple(b"u:a\nb|a:")
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(InvalidRequestError, match="type 'image_url' is not supported; only text"):
        threaded.submit([{"role": "user", "content": image}])
    with pytest.raises(InvalidRequestError, match="type None is not supported"):
        threaded.submit([{"role": "user", "content": ["a"]}])


# -- submit


def test_options_of_submit_take_the_place_of_fields_in_sampling(threaded: QLLMEngine) -> None:
    want = threaded.submit("abc", "BE", 6, sampling=SamplingParams(temperature=2.0, seed=3)).result(
        60
    )
    assert (
        threaded.submit("abc", "BE", 6, temperature=2.0, seed=3).result(300).token_ids
        == want.token_ids
    )
    replaced = threaded.submit("abc", "BE", 6, sampling=HOT, temperature=2.0, seed=3).result(300)
    assert replaced.token_ids == want.token_ids
    greedy = threaded.submit("abc", "BE", 6).result(300)
    assert (
        threaded.submit("abc", "BE", 6, ignore_eos=False).result(300).token_ids == greedy.token_ids
    )


def test_most_tokens_come_from_either_place_but_agree(threaded: QLLMEngine) -> None:
    three = SamplingParams(temperature=0, ignore_eos=True, max_tokens=3)
    assert len(threaded.submit("abc", sampling=three).result(300).token_ids) == 3
    assert len(threaded.submit("abc", "LS", 3, sampling=three).result(300).token_ids) == 3
    with pytest.raises(
        InvalidRequestError, match="max_tokens=4 and max_tokens=3 in SamplingParams"
    ):
        threaded.submit("abc", "LS", 4, sampling=three)
    with pytest.raises(InvalidRequestError, match="max_tokens=0 must be an integer >= 1"):
        SamplingParams(max_tokens=0)


def test_submit_gives_one_answer(threaded: QLLMEngine) -> None:
    with pytest.raises(InvalidRequestError, match="n=2: a request has one answer; use generate"):
        threaded.submit("abc", n=2)


def test_a_wrong_option_leaves_nothing_behind(threaded: QLLMEngine) -> None:
    for wrong in ({"temperature": -1}, {"stop": 5}, {"top_p": 0}):
        with pytest.raises(InvalidRequestError):
            threaded.submit("abc", **wrong)
    assert threaded.stats()["num_live"] == 0


# -- what is exported, and what prints


def test_public_names_are_exported() -> None:
    assert qllm.QueueFull is qllm.QueueFullError
    assert sorted(qllm.__all__) == list(qllm.__all__)
    for name in qllm.__all__:
        assert getattr(qllm, name).__name__ in (name, "QueueFullError")


def test_metrics_print_as_five_lines(threaded: QLLMEngine) -> None:
    metrics = threaded.submit("abc", "BE", 3, request_id="mine").result(300).metrics
    lines = str(metrics).splitlines()
    assert lines[0] in ("mine: length, BE", "mine: stop, BE")
    assert lines[1].startswith("tokens    3 in (3 computed, 0 cached), ")
    assert [line.split()[0] for line in lines] == [
        "mine:",
        "tokens",
        "latency",
        "preempted",
        "evicted",
    ]
    cancelled = threaded.submit(ids(300), "BE", 100)
    cancelled.cancel()
    assert "TTFT" in str(cancelled.result(300).metrics)


def test_an_engine_says_what_it_serves() -> None:
    engine = engine_of()
    with engine:
        assert repr(engine) == f"QLLMEngine({engine.model_name!r}, 0 requests in flight)"
    assert repr(engine) == f"QLLMEngine({engine.model_name!r}, closed)"


def test_the_example_of_asyncio(threaded: QLLMEngine) -> None:
    async def main() -> tuple[str, Result]:
        batch = threaded.submit("Summarise", priority="BE", max_tokens=4)
        said = [piece.text async for piece in threaded.submit(HI, max_tokens=4)]
        return "".join(said), await batch

    said, result = asyncio.run(main())
    assert said == threaded.chat(HI, max_tokens=4)[0].text
    assert len(result.token_ids) <= 4
