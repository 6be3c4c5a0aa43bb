"""Lossy answers of a server: switches between tokens, audits, the bound, what an answer says."""

import asyncio
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from qllm import SamplingParams
from qllm.errors import ConfigError, InvalidRequestError, RequestFailedError
from qllm.fleet import lossy as fleet_lossy
from qllm.fleet.audit import choices
from qllm.fleet.choice import Candidate, Choice, Rules
from qllm.frontend.handle import Handle
from qllm.server.config import load_config
from qllm.server.requests import lossy as lossy_module
from qllm.server.requests.ask import Ask
from qllm.types import FinishReason, Priority, StructuredOutputs
from tests.support.engines import pid_of
from tests.support.files import ROOT
from tests.support.lossy import (
    CUT,
    DEEPER,
    NAMES,
    WHOLE,
    Script,
    alone,
    follow,
    parts_of,
    profile_of_tiny,
    serving_lossy,
)
from tests.support.replay import CHAT, COMPLETIONS, Client
from tests.support.serving import Serving, bodies, serving_models
from tests.support.waiting import wait_for

LOSSY = {"model": "auto", "lossy": True, "temperature": 0, "ignore_eos": True}
PLANS = [{k: n for k, n in zip(sorted(random.Random(seed).sample(range(40), 3)),
                               random.Random(seed).choices(NAMES, k=3), strict=True)}
         for seed in range(12)]  # fmt: skip
"""Three changes of the candidate in the first 40 tokens, drawn."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving_lossy(
        tmp_path_factory.mktemp("lossy"), max_disagreement=0.5, max_restarts=200
    ) as made:
        yield made


@pytest.fixture
def choice(served: Serving) -> Iterator[Choice]:
    """A new choice of the server's own candidates, with a bound that few cut tokens keep."""
    owner: Any = served.front.lossy
    before = owner._lossy._choice
    made = Choice(owner._kept, Rules(max_disagreement=0.5))
    follow(served, made)
    yield made
    wait_for(lambda: not owner._audits)
    follow(served, before)


def asked(text: str, num: int = 48, **more: Any) -> dict[str, Any]:
    return {**LOSSY, "prompt": text, "max_tokens": num, "return_token_ids": True, **more}


def open_all(choice: Choice) -> None:
    """Let audits of all candidates that are cut look perfect."""
    for name in NAMES[1:]:
        for _ in range(choice.rules.trials):
            choice.on_audit(name, 100, 0)


# -- switches


@pytest.mark.sampled(4)
@pytest.mark.parametrize("plan", PLANS)
def test_an_answer_is_what_its_candidates_give_alone(served: Serving, plan: dict[int, str]) -> None:
    script = Script(plan)
    follow(served, script)
    answer = served.post(COMPLETIONS, asked("def area("))
    said, models = answer.json(), answer.headers["x-qllm-models"]
    (only,) = said["choices"]
    assert len(parts_of(models)) > 1
    assert {name for name, *_ in parts_of(models)} <= set(plan.values()) | {WHOLE}
    assert only["token_ids"] == alone(served, models, only["prompt_token_ids"], 48)
    assert said["system_fingerprint"] == f"lossy:{models}"
    early = [(e or 48) - b for name, b, e in parts_of(models) if name != WHOLE]
    assert said["usage"]["early_exit_tokens"] == sum(early)
    assert said["usage"]["completion_tokens"] == 48
    assert [num for _, num, _ in script.heard] == [0], "its time tells no candidate's speed"


def test_the_candidates_give_other_tokens(served: Serving) -> None:
    """Otherwise no test here could tell them apart."""
    ids = list(range(20, 30))
    assert len({tuple(alone(served, f"{name}[0:]", ids, 24)) for name in NAMES}) == 3


def test_a_stream_names_its_candidates_in_the_last_chunks_alone(served: Serving) -> None:
    follow(served, Script({0: CUT, 7: DEEPER, 20: WHOLE}))
    client = Client(served, COMPLETIONS, asked("def area(", stream=True))
    client.answer()
    chunks = client.events[:-1]
    named = [x["system_fingerprint"] for x in chunks if "system_fingerprint" in x]
    assert "system_fingerprint" not in chunks[0]
    assert [x for x in chunks if "system_fingerprint" in x] == chunks[-2:]
    models = named[0].removeprefix("lossy:")
    assert named == [named[0]] * 2
    assert models == f"{CUT}[0:7],{DEEPER}[7:20],{WHOLE}[20:]"
    assert chunks[-1]["usage"]["early_exit_tokens"] == 20
    ids = [i for x in chunks for c in x["choices"] for i in c.get("token_ids", ())]
    prompt = next(c["prompt_token_ids"] for x in chunks for c in x["choices"])
    assert ids == alone(served, models, prompt, 48)


def test_the_request_of_the_guide_is_answered(served: Serving, choice: Choice) -> None:
    open_all(choice)
    text = (ROOT / "docs" / "guides" / "depths.md").read_text()
    (sent,) = re.findall(r"curl .*?(/v1/\S+) .*?-d '(.*?)'\n", text, re.DOTALL)
    answer = served.post(sent[0], json.loads(sent[1]))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-qllm-models"] == f"{CUT}[0:]"


def counted(served: Serving, what: str) -> list[float]:
    return [served.metric(f"qllm:lossy_{what}_total", name) for name in NAMES]


def test_metrics_count_tokens_and_switches_of_each_candidate(served: Serving) -> None:
    follow(served, Script({0: CUT, 7: DEEPER, 20: WHOLE}))
    names = ("requests", "tokens", "switches")
    before = {what: counted(served, what) for what in names}
    served.post(COMPLETIONS, asked("def area("))
    wait_for(lambda: counted(served, "requests") != before["requests"])
    grew = {
        what: [after - old for after, old in zip(counted(served, what), before[what], strict=True)]
        for what in names
    }
    assert grew == {"requests": [1, 0, 0], "tokens": [28, 7, 13], "switches": [1, 0, 1]}


def test_a_request_that_moved_counts_at_its_last_candidate(served: Serving) -> None:
    follow(served, Script({0: CUT, 7: WHOLE}))
    label = {"class": "LS", "finished_reason": "length"}

    def ended() -> list[float]:
        return [served.metric("qllm:request_success_total", name, **label) for name in NAMES]

    before = ended()
    served.post(COMPLETIONS, asked("def area("))
    wait_for(lambda: ended() != before)
    assert [now - old for now, old in zip(ended(), before, strict=True)] == [1, 0, 0]


def test_a_candidate_computes_no_request_that_has_left_it(served: Serving) -> None:
    follow(served, Script({0: CUT, 5: WHOLE}))
    handle, course = begun(served, CUT, "def area(", 2000)
    wait_for(lambda: len(course.spans) == 2)
    wait_for(lambda: served.front.of(CUT).engine.stats()["num_live"] == 0)
    assert not handle.has_ended
    handle.cancel()
    wait_for(lambda: idle(served))


def test_an_answer_whose_last_token_asks_for_a_change_stays_and_counts(served: Serving) -> None:
    script = Script({0: CUT, 8: WHOLE})
    follow(served, script)
    before = counted(served, "tokens"), counted(served, "switches")
    answer = served.post(COMPLETIONS, asked("def area(", 8))
    assert answer.headers["x-qllm-models"] == f"{CUT}[0:]"
    wait_for(lambda: counted(served, "tokens")[1] == before[0][1] + 8)
    assert counted(served, "switches") == before[1]
    assert [(name, num) for name, num, _ in script.heard] == [(CUT, 8)]


def test_an_answer_that_changes_twice_before_its_handle_knows_harms_no_other(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token of an engine may come before the handle has its id at that engine."""
    move = Handle.move

    def late(handle: Handle, *args: Any) -> None:
        time.sleep(0.1)
        move(handle, *args)

    monkeypatch.setattr(Handle, "move", late)
    exact = SamplingParams(temperature=0, ignore_eos=True)
    whole: Any = served.front.of(WHOLE)
    others = [whole.engine.submit(f"def f{n}(", Priority.BE, 200, sampling=exact) for n in range(8)]
    engines = [front.engine for front in served.front.all]
    follow(served, Script({0: CUT, 5: WHOLE, 6: DEEPER, 7: WHOLE}))
    handle, course = begun(served, CUT, "def area(", 40)
    result = handle.result(60)
    assert str(course) == f"{CUT}[0:5],{WHOLE}[5:6],{DEEPER}[6:7],{WHOLE}[7:]"
    assert list(result.token_ids) == alone(served, str(course), result.prompt_token_ids, 40)
    assert all(len(other.result(60).token_ids) == 200 for other in others)
    assert [front.engine for front in served.front.all] == engines, "no engine was given up"


def test_a_chat_may_be_lossy(served: Serving) -> None:
    follow(served, Script({0: CUT, 5: WHOLE}))
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, **LOSSY}
    answer = served.post(CHAT, chat)
    assert answer.headers["x-qllm-models"] == f"{CUT}[0:5],{WHOLE}[5:]"
    assert answer.json()["usage"]["early_exit_tokens"] == 5


def test_a_stop_string_ends_an_answer_across_a_switch(served: Serving) -> None:
    follow(served, Script({0: CUT, 4: WHOLE}))
    whole = served.post(COMPLETIONS, asked("def area(", 24)).json()["choices"][0]["text"]
    follow(served, Script({0: CUT, 4: WHOLE}))
    stop = whole[6:9]
    said = served.post(COMPLETIONS, asked("def area(", 24, stop=stop)).json()["choices"][0]
    assert said["text"] == whole[: whole.index(stop)]
    assert said["finish_reason"] == "stop"


def begun(served: Serving, name: str, text: str, num: int = 400) -> tuple[Handle, Any]:
    """Submit a lossy request at a candidate; return its handle and its course."""
    params = SamplingParams(temperature=0, ignore_eos=True, confidence=True)
    front: Any = served.front.of(name)
    handle = front.engine.submit(text, Priority.LS, num, sampling=params)
    owner: Any = front.lossy
    owner.begin(handle, Ask(answer_id="a", max_tokens=num), front)
    return handle, handle.log


def idle(served: Serving) -> bool:
    return all(front.engine.stats()["num_live"] == 0 for front in served.front.all)


def test_requests_that_are_cancelled_paused_and_moved_at_random_lose_nothing(
    served: Serving,
) -> None:
    rng = random.Random(5)
    follow(served, Script({k: rng.choice(NAMES) for k in range(5, 4000, 7)}))
    open_ones = [begun(served, rng.choice(NAMES), f"def f{n}(", 90) for n in range(24)]
    for handle, _ in rng.sample(open_ones, 12):
        handle.pause()
        threading.Timer(rng.random() / 4, handle.resume).start()
    dropped = rng.sample(open_ones, 4)
    for handle, _ in dropped:
        handle.cancel()
    moved = 0
    for handle, course in open_ones:
        result = handle.result(60)
        if (handle, course) in dropped:
            assert result.finish_reason is FinishReason.CANCELLED
            continue
        moved += len(course.spans) - 1
        assert len(result.confidences or ()) == 90
        assert list(result.token_ids) == alone(served, str(course), result.prompt_token_ids, 90)
    assert moved > 20
    wait_for(lambda: idle(served))


def test_a_paused_request_moves_with_its_first_token_afterwards(served: Serving) -> None:
    owner = follow(served, Script({0: CUT}))
    handle, course = begun(served, CUT, "def area(", 200)
    wait_for(lambda: len(handle.token_ids) > 3)
    handle.pause()
    wait_for(lambda: handle.status.value == "paused")
    course.wanted = WHOLE
    num = len(handle.token_ids)
    handle.update(paused=True)  # reported to the course by this thread, which delivers no tokens
    assert len(course.spans) == 1
    handle.resume()
    result = handle.result(60)
    assert [span.name for span in course.spans] == [CUT, WHOLE]
    assert course.spans[1].begin >= num
    assert list(result.token_ids) == alone(served, str(course), result.prompt_token_ids, 200)
    wait_for(lambda: course not in owner._courses)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("after", range(1, 60, 2))
def test_kill_9_of_the_engine_that_answers_keeps_what_the_answer_says(
    served: Serving, after: int
) -> None:
    """Kill the engine that has the request once it has `after` tokens."""
    plan = {0: CUT, 20: DEEPER, 40: WHOLE}
    follow(served, Script(plan))
    handle, course = begun(served, plan[0], "def area(", 60)
    wait_for(lambda: len(handle.token_ids) >= after)
    front: Any = served.front.of(course.name)
    engine = front.engine
    os.kill(pid_of(engine), signal.SIGKILL)
    result = handle.result(120)
    assert result.finish_reason is FinishReason.LENGTH
    wait_for(lambda: front.engine is not engine and front.unavailable() is None, 60)
    assert [span.name for span in course.spans] == list(plan.values())
    assert list(result.token_ids) == alone(served, str(course), result.prompt_token_ids, 60)


def test_a_candidate_that_dies_gets_the_request_when_it_is_back(served: Serving) -> None:
    """The request is moved to an engine that has just been killed."""
    follow(served, Script({0: CUT, 30: WHOLE}))
    handle, course = begun(served, CUT, "def area(", 60)
    wait_for(lambda: len(handle.token_ids) >= 1)
    os.kill(pid_of(served.front.of(WHOLE).engine), signal.SIGKILL)
    result = handle.result(120)
    assert str(course) == f"{CUT}[0:30],{WHOLE}[30:]"
    wait_for(lambda: served.front.of(WHOLE).unavailable() is None, 60)
    assert list(result.token_ids) == alone(served, str(course), result.prompt_token_ids, 60)


def test_lossy_neighbours_change_no_exact_answer(served: Serving) -> None:
    exact = {"model": WHOLE, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    texts = [f"def f{n}(" for n in range(6)]
    before = [served.post(COMPLETIONS, {**exact, "prompt": x}).json()["choices"] for x in texts]
    rng = random.Random(2)
    follow(served, Script({k: rng.choice(NAMES) for k in range(3, 4000, 5)}))
    others = [begun(served, rng.choice(NAMES), f"class C{n}:", 120)[0] for n in range(10)]
    beside = [Client(served, COMPLETIONS, {**exact, "prompt": x}) for x in texts]
    for client in beside:
        client.join(60)
    assert [client.events[0]["choices"] for client in beside] == before
    for handle in others:
        handle.result(60)


# -- the bound


def test_a_closed_candidate_never_answers(served: Serving, choice: Choice) -> None:
    for n in range(3):
        answer = served.post(COMPLETIONS, asked(f"def f{n}(", 8))
        assert answer.headers["x-qllm-models"] == f"{WHOLE}[0:]"
        assert answer.json()["usage"]["early_exit_tokens"] == 0


def test_audits_open_a_candidate_and_count_what_the_whole_model_would_choose(
    served: Serving, choice: Choice
) -> None:
    """The counts equal those of the whole model's own log-probabilities, position by position."""
    owner: Any = served.front.lossy
    before = {n: served.metric("qllm:lossy_differing_tokens_total", n) for n in NAMES}
    tokens = {n: served.metric("qllm:lossy_audited_tokens_total", n) for n in NAMES}
    params = SamplingParams(temperature=0, prompt_logprobs=1)
    expected = dict.fromkeys(NAMES, 0)
    for n in range(4):
        said = served.post(COMPLETIONS, asked(f"def f{n}(", 30)).json()["choices"][0]
        wait_for(lambda: not owner._audits)
        prompt, ids = said["prompt_token_ids"], said["token_ids"]
        chosen = {}
        for name in NAMES:
            engine = served.front.of(name).engine
            read = engine.submit([*prompt, *ids], Priority.LS, 1, sampling=params).result(60)
            chosen[name] = choices(read.prompt_logprobs, len(prompt))
        assert chosen[WHOLE] == ids, "the whole model agrees with itself"
        for name in (CUT, DEEPER):
            expected[name] += sum(a != b for a, b in zip(chosen[name], ids, strict=True))
    for name in NAMES:
        found = served.metric("qllm:lossy_differing_tokens_total", name) - before[name]
        assert found == expected[name]
        audited = served.metric("qllm:lossy_audited_tokens_total", name) - tokens[name]
        assert audited == (0 if name == WHOLE else 120)
        assert choice.estimate(name).num_differing == expected[name]
    assert expected[CUT] > expected[DEEPER] > 0


def test_an_audit_counts_only_the_tokens_that_the_candidate_chose(
    served: Serving, choice: Choice
) -> None:
    owner: Any = served.front.lossy
    open_all(choice)
    follow(served, Script({0: CUT, 10: WHOLE}))
    handle, course = begun(served, CUT, "def area(", 40)
    handle.result(60)
    follow(served, choice)
    before = choice.estimate(CUT)
    asyncio.run_coroutine_threadsafe(owner._audit(course), owner._loop).result(60)
    after = choice.estimate(CUT)
    assert after.num_positions - before.num_positions == 10
    assert 0 < after.num_differing - before.num_differing <= 10


def test_audits_are_best_effort_and_come_after_the_answer(
    served: Serving, choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner: Any = served.front.lossy
    seen: list[Any] = []
    engine = served.front.of(WHOLE).engine
    submit = engine.submit

    def watched(ids: Any, priority: Any, *args: Any, **more: Any) -> Any:
        if str(more.get("request_id", "")).startswith("audit-"):
            seen.append((priority, course.has_ended))
        return submit(ids, priority, *args, **more)

    monkeypatch.setattr(engine, "submit", watched)
    handle, course = begun(served, WHOLE, "def area(", 20)
    handle.result(60)
    wait_for(lambda: seen and not owner._audits)
    assert seen == [(Priority.BE, True)]


def test_an_audit_leaves_no_kv(
    served: Serving, choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner: Any = served.front.lossy
    open_all(choice)
    monkeypatch.setattr(owner, "_share", 1.0)
    engine, before = served.front.of(WHOLE).engine, choice.estimate(CUT).num_positions
    engine.reset_prefix_cache()
    handle, _ = begun(served, CUT, "def area(", 150)
    handle.result(60)
    wait_for(lambda: choice.estimate(CUT).num_positions == before + 150)
    assert engine.stats()["prefix_cache"]["kept_tokens"] == 0


def test_a_candidate_over_the_bound_is_left_by_open_answers_at_once(
    served: Serving, choice: Choice
) -> None:
    open_all(choice)
    assert choice.current == CUT
    owner: Any = served.front.lossy
    handle, course = begun(served, CUT, "def area(", 300)
    wait_for(lambda: len(handle.token_ids) > 4)
    owner._lossy.audited(CUT, 1000, 900)
    num = len(handle.token_ids)
    result = handle.result(60)
    assert [span.name for span in course.spans] == [CUT, DEEPER], "the next depth is the nearest"
    assert course.spans[1].begin <= num + 2
    assert list(result.token_ids) == alone(served, str(course), result.prompt_token_ids, 300)
    assert CUT not in choice.open


def test_open_answers_leave_a_closed_candidate_that_gets_no_new_requests(
    served: Serving, choice: Choice
) -> None:
    open_all(choice)
    owner: Any = served.front.lossy
    handle, course = begun(served, DEEPER, "def area(", 300)
    wait_for(lambda: len(handle.token_ids) > 4)
    owner._lossy.audited(DEEPER, 1000, 900)
    result = handle.result(60)
    assert [span.name for span in course.spans] == [DEEPER, CUT]
    assert list(result.token_ids) == alone(served, str(course), result.prompt_token_ids, 300)


def test_a_request_for_a_candidate_that_closes_meanwhile_leaves_it(
    served: Serving, choice: Choice
) -> None:
    handle, course = begun(served, CUT, "def area(", 40)  # it is closed from the start
    handle.result(60)
    assert [span.name for span in course.spans] == [CUT, WHOLE]
    assert course.spans[1].begin <= 2


def test_an_audit_that_fails_counts_all_tokens_as_different(
    served: Serving, choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner: Any = served.front.lossy
    open_all(choice)

    async def fails(*_: Any) -> Any:
        raise RequestFailedError("the engine died too often")

    monkeypatch.setattr(owner, "_read", fails)
    before = choice.estimate(CUT).num_differing
    monkeypatch.setattr(owner, "_share", 1.0)
    said = served.post(COMPLETIONS, asked("def area(", 20)).json()
    wait_for(lambda: not owner._audits and choice.estimate(CUT).num_differing > before)
    assert said["usage"]["early_exit_tokens"] == 20
    assert choice.estimate(CUT).num_differing == before + 20


def test_a_closed_candidate_that_cannot_read_harms_no_open_one(
    served: Serving, choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner: Any = served.front.lossy
    for _ in range(choice.rules.trials):
        choice.on_audit(CUT, 100, 0)
    read = owner._read

    async def fails(front: Any, *args: Any) -> Any:
        if front.model_name == DEEPER:
            raise RequestFailedError("the engine died too often")
        return await read(front, *args)

    monkeypatch.setattr(owner, "_read", fails)
    before = choice.estimate(CUT)
    handle, _ = begun(served, CUT, "def area(", 20)
    handle.result(60)
    wait_for(lambda: choice.estimate(CUT).num_positions == before.num_positions + 20)
    assert choice.estimate(CUT).num_differing - before.num_differing < 20
    assert choice.estimate(DEEPER).num_positions == 0
    assert CUT in choice.open


def test_an_audit_waits_for_a_whole_model_that_is_down(
    served: Serving, choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner: Any = served.front.lossy
    monkeypatch.setattr(owner, "_share", 0.0)  # the audit below is the only one
    open_all(choice)
    handle, course = begun(served, CUT, "def area(", 20)
    handle.result(60)
    wait_for(lambda: not owner._audits)
    engine = served.front.of(WHOLE).engine
    os.kill(pid_of(engine), signal.SIGKILL)
    wait_for(lambda: served.front.of(WHOLE).unavailable() is not None)
    before = choice.estimate(CUT).num_positions
    asyncio.run_coroutine_threadsafe(owner._audit(course), owner._loop).result(120)
    assert choice.estimate(CUT).num_positions == before + 20


def test_a_whole_model_answers_while_audits_are_behind(
    served: Serving, choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_all(choice)
    first = served.post(COMPLETIONS, asked("def area(", 8))
    assert parts_of(first.headers["x-qllm-models"])[0][0] == CUT
    monkeypatch.setattr(lossy_module, "MOST_AUDITS", 0)
    second = served.post(COMPLETIONS, asked("def area(", 8))
    assert parts_of(second.headers["x-qllm-models"])[0][0] == WHOLE


def test_the_share_of_audits_once_all_candidates_are_known(served: Serving, choice: Choice) -> None:
    open_all(choice)
    picked = [choice.is_audited(f"cmpl-{n}-0", 0.05) for n in range(4000)]
    assert 140 < sum(picked) < 260


# -- lengths and refusals


def test_a_prompt_that_is_cut_to_fit_fits_every_candidate(served: Serving) -> None:
    follow(served, Script({}))
    owner: Any = served.front.lossy
    prompt = [20] * 2 * owner.longest
    answer = served.post(COMPLETIONS, asked("", 8, prompt=prompt, truncate_prompt_tokens=-1))
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"][0]["prompt_token_ids"]) == owner.longest - 8


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"temperature": 1}, "temperature=1"),
        ({"n": 2}, r"2 answers"),
        ({"prompt": ["a", "b"]}, r"2 answers"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 1}, "presence_penalty=1"),
        ({"min_tokens": 3}, "min_tokens=3"),
        ({"guided_regex": "a+"}, "structured_outputs"),
        ({"model": "tiny"}, "model must be 'auto'"),
        ({"model": None}, "model must be 'auto'"),
        ({"max_tokens": 0, "echo": True}, "needs max_tokens of at least 1"),
        ({"max_tokens": 4096}, "that every candidate of lossy answers can hold"),
    ],
)
def test_requests_that_no_audit_could_judge(
    served: Serving, more: dict[str, Any], text: str
) -> None:
    answer = served.post(COMPLETIONS, {**asked("a", 4), **more})
    assert answer.status_code == 400, answer.text
    assert text in answer.json()["error"]["message"]
    wait_for(lambda: idle(served))


def test_routes_without_lossy_answers_say_so(served: Serving) -> None:
    for path, body in bodies(4).items():
        if "completions" not in path:
            answer = served.post(path, {**body, "model": "auto", "lossy": True})
            assert answer.status_code == 400
            assert "/v1/completions alone" in json.dumps(answer.json())


def test_a_prompt_in_pieces_cannot_be_lossy(served: Serving) -> None:
    name = served.post("/v1/prompts", {"model": "auto", "prompt": "def "}).json()["id"]
    answer = served.post(COMPLETIONS, {**LOSSY, "prompt_id": name, "max_tokens": 4})
    assert answer.status_code == 400, answer.text
    served.post(COMPLETIONS, {"model": "auto", "prompt_id": name, "max_tokens": 4})


def test_settings_of_sampling_that_change_a_choice() -> None:
    greedy = partial(SamplingParams, temperature=0)
    fleet_lossy.check_sampling(greedy(stop=("a",), seed=3, top_k=5, logprobs=2, draft_tokens=1))
    for wrong in (
        {"repetition_penalty": 1.1}, {"bad_words": ("a",)}, {"allowed_token_ids": (1,)},
        {"thinking_token_budget": 3}, {"structured_outputs": StructuredOutputs(choice=("a",))},
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
            fleet_lossy.check_sampling(greedy(**wrong))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lossy": True}, "give auto=True too"),
        ({"lossy": True, "auto": True, "engine_address": "a:1"}, "role='frontend'"),
        ({"lossy": True, "auto": True, "max_replays": 0}, "max_replays of at least 1"),
        ({"max_disagreement": 0.1}, "max_disagreement is a setting of lossy answers"),
        (
            {"lossy": True, "auto": True, "also": ["tiny@2"], "max_disagreement": 0},
            "greater than 0",
        ),
        ({"lossy": True, "auto": True, "also": ["tiny@2"], "max_disagreement": 1}, "less than 1"),
        ({"lossy": True, "auto": True, "also": ["tiny@2"], "audit_share": 0}, "greater than 0"),
        ({"lossy": True, "auto": True, "also": ["tiny@2"], "audit_share": 2}, "less than or equal"),
    ],
)
def test_settings_that_do_not_go_with_lossy_answers(settings: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(None, {}, {"model": "tiny", **settings})


@pytest.mark.parametrize(
    ("depths", "also", "text"),
    [
        ((), ["tiny@2"], "make it with qllm profile tiny --depths"),
        ((3, 4), ["tiny@2"], "has no depth 2, which 'tiny@2' has; it has 3, 4"),
    ],
)
def test_a_profile_that_is_missing_is_named_at_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    depths: tuple[int, ...],
    also: list[str],
    text: str,
) -> None:
    given: dict[str, Any] = {"also": also, "auto": True, "lossy": True}
    if depths:
        given["depth_profile"] = file = tmp_path / "depths.json"
        file.write_text(profile_of_tiny(depths).text())
    monkeypatch.setattr("qllm.server.serve.make_engine", None)  # refused before a load
    with pytest.raises(ConfigError, match=text), serving_models(**given, threads=1):
        pass


def test_the_log_at_the_start_names_the_candidates_and_the_bound(
    served: Serving, choice: Choice
) -> None:
    owner: Any = served.front.lossy
    (line,) = owner.lines()
    assert f"{WHOLE} (whole), {CUT} (99.0% agree), {DEEPER} (99.0% agree)" in line
    assert "at most 50.0% of the tokens may differ, and 5% of the answers are audited" in line


def test_the_live_page_gets_the_standing_of_each_candidate(served: Serving, choice: Choice) -> None:
    open_all(choice)
    before = served.front.lossy.told()[CUT]["tokens"]
    served.post(COMPLETIONS, asked("def area(", 8))
    owner: Any = served.front.lossy
    wait_for(lambda: owner.told()[CUT]["tokens"] == before + 8)
    with httpx.stream("GET", f"{served.url}/ui/events", timeout=60) as answer:
        data = next(x for x in answer.iter_lines() if x.startswith("data: "))
    said = json.loads(data.removeprefix("data: "))["lossy"]
    assert said[WHOLE]["open"]
    assert said[WHOLE]["bound"] == 0
    assert said[CUT]["open"]
    assert 0 < said[CUT]["bound"] < 0.5


def test_the_standing_of_a_whole_model_has_no_loss(served: Serving, choice: Choice) -> None:
    owner: Any = served.front.lossy
    found = owner._lossy.standing()
    assert found[WHOLE] == (True, 0.0)
    assert found[CUT] == (False, 1.0)
    assert Candidate(WHOLE, "tiny", 4, True, 800.0, 1.0, 0.0)._replace(low=0).is_whole
