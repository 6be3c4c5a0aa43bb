"""A model object serves one engine at a time: none takes the model away from another."""

import copy
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import qllm.engine.build
import qllm.frontend.thread
from qllm import QLLMEngine, SamplingParams
from qllm.errors import ModelError
from qllm.ingress import Call
from qllm.plan import Plan
from qllm.policy import View
from qllm.types import Cap
from tests.support.families import make_model
from tests.support.waiting import wait_for

PROMPT = list(range(5, 45))
GREEDY = SamplingParams(temperature=0, logprobs=0, ignore_eos=True)
REFUSED = r"another engine serves this model object.*close that engine first"


def engine_of(model: Any, **settings: Any) -> QLLMEngine:
    defaults = {"max_kv_tokens": 512, "conformance": False, "threads": 1}
    return QLLMEngine.from_model(model, **{**defaults, **settings})


def answer(engine: QLLMEngine) -> tuple[Any, ...]:
    result = engine.submit(PROMPT, max_tokens=8, sampling=GREEDY).result(300)
    return result.token_ids, result.logprobs


def attention_of(model: Any) -> set[str]:
    return {layer.self_attn.config._attn_implementation for layer in model.model.layers}


@pytest.fixture(scope="module", params=["reference", "fast"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("mixtral", num_layers=2)


@pytest.fixture(scope="module")
def expected(model: Any, kernels: str) -> tuple[Any, ...]:
    with engine_of(model, kernels=kernels) as engine:
        return answer(engine)


@pytest.fixture(autouse=True)
def _the_model_comes_back(model: Any) -> Iterator[None]:
    yield
    wait_for(lambda: "qllm" not in attention_of(model), 20)


@pytest.mark.sampled
@pytest.mark.parametrize("conformance", [False, True])
def test_a_second_engine_is_refused_and_the_first_serves_on(
    model: Any, kernels: str, expected: tuple[Any, ...], conformance: bool
) -> None:
    with engine_of(model, kernels=kernels, conformance=conformance) as engine:
        with pytest.raises(ModelError, match=REFUSED):
            engine_of(model, kernels=kernels, conformance=conformance)
        assert answer(engine) == expected


def test_another_model_around_the_same_decoder_is_refused_too(model: Any) -> None:
    with engine_of(model), pytest.raises(ModelError, match=REFUSED):
        engine_of(copy.copy(model))


@pytest.mark.sampled
@pytest.mark.parametrize("conformance", [False, True])
def test_an_engine_closed_again_leaves_the_model_to_the_next(
    model: Any, kernels: str, expected: tuple[Any, ...], conformance: bool
) -> None:
    first = engine_of(model, kernels=kernels, conformance=conformance)
    first.close()
    with engine_of(model, kernels=kernels, conformance=conformance) as second:
        first.close()
        assert answer(second) == expected
        del first
        gc.collect()
        assert answer(second) == expected
        assert attention_of(model) == {"qllm"}


def test_a_cell_that_is_run_again_is_told_to_close(
    model: Any, kernels: str, expected: tuple[Any, ...]
) -> None:
    engine = engine_of(model, kernels=kernels)
    with pytest.raises(ModelError, match=REFUSED):
        engine = engine_of(model, kernels=kernels)
    assert answer(engine) == expected
    engine.close()
    engine = engine_of(model, kernels=kernels)
    assert answer(engine) == expected
    engine.close()


@pytest.mark.sampled
@pytest.mark.parametrize("conformance", [False, True])
def test_an_engine_that_is_garbage_gives_way(
    model: Any, kernels: str, expected: tuple[Any, ...], conformance: bool
) -> None:
    engine: Any = engine_of(model, kernels=kernels, conformance=conformance)
    thread = engine._client._thread
    engine.itself = engine
    gc.disable()
    try:
        del engine
        with engine_of(model, kernels=kernels, conformance=conformance) as second:
            thread.join(120)
            gc.collect()
            assert answer(second) == expected
            assert attention_of(model) == {"qllm"}
    finally:
        gc.enable()


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["collected", "closed"])
def test_a_new_engine_waits_for_the_one_that_is_being_closed(
    model: Any, expected: tuple[Any, ...], kernels: str, how: str
) -> None:
    engine: Any = engine_of(model, kernels=kernels)
    client, go_on, made = engine._client, threading.Event(), []
    client.ingress.put(Call(lambda: go_on.wait(60), lambda *_: None))
    if how == "closed":
        threading.Thread(target=engine.close).start()
        wait_for(lambda: client.is_leaving)
    del engine
    making = threading.Thread(target=lambda: made.append(engine_of(model, kernels=kernels)))
    making.start()
    making.join(0.3)
    assert making.is_alive()
    go_on.set()
    making.join(60)
    with made.pop() as second:
        assert not client._thread.is_alive()
        assert answer(second) == expected
        assert attention_of(model) == {"qllm"}


def test_of_two_that_are_made_at_once_one_serves(model: Any, expected: tuple[Any, ...]) -> None:
    made: list[QLLMEngine] = []
    refused: list[ModelError] = []
    start = threading.Barrier(2)

    def make() -> None:
        start.wait(60)
        try:
            made.append(engine_of(model))
        except ModelError as error:
            refused.append(error)

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(made) == len(refused) == 1
    with made.pop() as engine:
        assert answer(engine)[0] == expected[0]


class Crash:
    """Ends the loop at the first request."""

    needs = Cap.NONE

    def plan(self, view: View) -> Plan:
        raise KeyboardInterrupt("enough")


def test_an_engine_that_crashed_gives_way(
    model: Any, kernels: str, expected: tuple[Any, ...]
) -> None:
    crashed = engine_of(model, kernels=kernels, policy=Crash())
    crashed.submit(PROMPT, max_tokens=8)
    wait_for(lambda: crashed.failure)
    with engine_of(model, kernels=kernels) as engine:
        crashed.close()
        assert answer(engine) == expected


def test_what_is_loaded_is_frozen_while_an_engine_runs(
    monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    """A full collection would stop every thread for as long as it looks at all of torch."""
    done: list[str] = []
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: done.append(name))
    with engine_of(model):
        assert done == ["collect", "freeze"]
    assert done == ["collect", "freeze", "unfreeze"]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (qllm.engine.build, "check_conformance"),
        (qllm.engine.build, "EngineLoop"),
        (qllm.frontend.thread, "EngineCore"),
        (qllm.frontend.thread, "freeze_garbage"),
    ],
)
def test_an_engine_that_cannot_be_made_gives_the_model_back(
    monkeypatch: pytest.MonkeyPatch, model: Any, module: Any, name: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(module, name, fail)
        with pytest.raises(MemoryError, match="no room"):
            engine_of(model, conformance=True)
    assert "qllm" not in attention_of(model)
    with engine_of(model) as engine:
        assert len(answer(engine)[0]) == 8


def test_packed_experts_are_waited_for_too() -> None:
    model = make_model("mixtral", torch.bfloat16, num_layers=2)
    with engine_of(model) as engine:
        expected = answer(engine)
    engine = engine_of(model)
    del engine
    with engine_of(model) as engine:
        assert answer(engine) == expected
