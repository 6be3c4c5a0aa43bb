"""Several models behind one server: each request is answered by the model that it names alone."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from qllm.config import engine_config
from qllm.errors import ConfigError
from qllm.fleet.models import (
    Candidate,
    Named,
    choose_model,
    parse_also,
    parse_engines,
    refuse_same_names,
)
from qllm.fleet.routes import Backlog, EngineView, RequestView, RouteCosts
from qllm.models.stored import stored_bytes
from qllm.server.config import load_config
from qllm.server.metrics import Metrics
from qllm.server.serve import make_engines
from qllm.several import refuse_too_large
from tests.support.batches import ended, line, records, start
from tests.support.engines import pid_of, save_model
from tests.support.replay import COMPLETIONS, SAMPLED, SETTINGS, Client, body
from tests.support.scheduling import BE, LS
from tests.support.serving import CHAT, Serving, bodies, serving_models
from tests.support.waiting import wait_for

NAMES = ("tiny", "tiny@2", "bytes")
"""A whole model, the same model cut after two layers, and a model with another tokenizer."""
ENGINE = {**SETTINGS, "max_kv_tokens": 4096}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("models") / "bytes")


@pytest.fixture(scope="module")
def several(place: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    also = ["tiny@2", f"bytes={place}"]
    folder = tmp_path_factory.mktemp("state")
    with serving_models(also=also, engine=ENGINE, threads=1, state_dir=folder) as made:
        yield made


def solo(served: Serving, model: str, prompt: Any, max_tokens: int = 8) -> Any:
    """Return the answer of the model's own engine, asked alone."""
    engine = served.front.of(model).engine
    return engine.submit(prompt, "LS", max_tokens, temperature=0).result(60)


@pytest.mark.parametrize("model", NAMES)
def test_each_route_is_answered_by_the_model_that_is_named(several: Serving, model: str) -> None:
    for path, asked in bodies(8).items():
        answer = several.post(path, {**asked, "model": model, "temperature": 0})
        said = answer.json()
        assert answer.status_code == 200, said
        assert said["model"] == model
        assert answer.headers["x-qllm-models"] == model
        own = solo(several, model, "a" if "completions" in path and "chat" not in path else CHAT)
        usage = said["usage"]
        took = usage.get("prompt_tokens") or usage["input_tokens"]
        if path != "/v1/responses":  # its input is a message too, with a role of its own
            assert took + usage.get("cache_read_input_tokens", 0) == len(own.prompt_token_ids)
        if path == COMPLETIONS:
            assert said["choices"][0]["text"] == own.text
        elif path == "/v1/chat/completions":
            assert (said["choices"][0]["message"]["content"] or "") in own.text


def test_answers_of_the_three_models_differ(several: Serving) -> None:
    """Otherwise no test here could tell them apart."""
    assert len({solo(several, name, "def area(").text for name in NAMES}) == 3


def test_a_request_without_a_model_is_for_the_first(several: Serving) -> None:
    said = several.post(COMPLETIONS, {"prompt": "def area(", "max_tokens": 8, "temperature": 0})
    assert said.json()["model"] == "tiny"
    assert said.json()["choices"][0]["text"] == solo(several, "tiny", "def area(").text


def test_models_are_listed_with_their_depths(several: Serving) -> None:
    found = {
        x["id"]: (x["depth"], x["whole_depth"]) for x in several.get("/v1/models").json()["data"]
    }
    whole = found["tiny"][0]
    assert tuple(found) == NAMES
    assert found["tiny"] == (whole, whole)
    assert found["tiny@2"] == (2, whole)
    assert several.get("/v1/models/tiny@2").json()["depth"] == 2


def test_an_unknown_model_gets_the_list(several: Serving) -> None:
    for path, asked in bodies(8).items():
        answer = several.post(path, {**asked, "model": "tiny@3"})
        assert answer.status_code == 404
        assert "use 'tiny', 'tiny@2', 'bytes'" in answer.json()["error"]["message"]


def test_tokens_are_those_of_the_models_tokenizer(several: Serving) -> None:
    """The long text is read in a process of its own, which has one tokenizer."""
    for text in ("def area(", "def area( " * 4000):
        num = {}
        for model in NAMES:
            said = several.post("/tokenize", {"model": model, "prompt": text}).json()
            num[model] = said["count"]
            tokens = {"model": model, "tokens": said["tokens"]}
            assert several.post("/detokenize", tokens).json()["prompt"] == text
        assert num["tiny"] == num["tiny@2"] != num["bytes"] == len(text)


def test_batch_lines_go_to_their_models(several: Serving) -> None:
    lines = [line(n, model=model, temperature=0) for n, model in enumerate((*NAMES, "none"))]
    with several.client() as client:
        batch = ended(client, start(client, lines).id)
        good = {r["custom_id"]: r["response"] for r in records(client, batch.output_file_id)}
        (bad,) = records(client, batch.error_file_id)
    for n, model in enumerate(NAMES):
        said = good[f"line-{n}"]["body"]
        assert said["model"] == model
        assert said["choices"][0]["text"] == solo(several, model, f"def f{n}(", 4).text
    assert bad["response"]["status_code"] == 404


def test_a_response_in_the_background_is_by_its_model(several: Serving) -> None:
    asked = {"model": "bytes", "input": "a", "max_output_tokens": 4, "background": True}
    name = several.post("/v1/responses", asked).json()["id"]
    wait_for(lambda: several.get(f"/v1/responses/{name}").json()["status"] != "queued")
    wait_for(lambda: several.get(f"/v1/responses/{name}").json()["status"] != "in_progress")
    said = several.get(f"/v1/responses/{name}").json()
    assert said["model"] == "bytes"
    assert said["usage"]["output_tokens"] == 4


def test_a_prompt_in_pieces_is_sent_to_the_model_that_it_was_opened_for(several: Serving) -> None:
    name = several.post("/v1/prompts", {"model": "bytes", "prompt": "def "}).json()["id"]
    several.post(f"/v1/prompts/{name}/append", {"append": "area("})
    asked = {"prompt_id": name, "max_tokens": 8, "temperature": 0}
    wrong = several.post(COMPLETIONS, asked)
    assert wrong.status_code == 400
    assert "was opened for the model 'bytes'" in wrong.json()["error"]["message"]
    said = several.post(COMPLETIONS, {**asked, "model": "bytes"}).json()
    assert said["choices"][0]["text"] == solo(several, "bytes", "def area(").text


def test_a_body_in_lines_goes_to_its_model(several: Serving) -> None:
    first = {"model": "bytes", "max_tokens": 8, "temperature": 0, "prompt": "def "}
    content = f"{json.dumps(first)}\n{json.dumps({'append': 'area('})}\n"
    headers = {"content-type": "application/x-ndjson"}
    said = httpx.post(f"{several.url}{COMPLETIONS}", content=content, headers=headers, timeout=60)
    assert said.json()["model"] == "bytes"
    assert said.json()["choices"][0]["text"] == solo(several, "bytes", "def area(").text


def test_open_requests_of_every_model_are_listed_and_changed(several: Serving) -> None:
    asks = {model: body(0, model=model, stream=True, request_id=f"r-{model}") for model in NAMES}
    clients = [Client(several, COMPLETIONS, ask) for ask in asks.values()]
    wait_for(lambda: all(client.has_begun for client in clients))
    mine = {x["id"] for x in several.get("/v1/requests").json()["data"]}
    for model in NAMES:
        name = f"cmpl-r-{model}"
        assert name in mine
        changed = httpx.patch(f"{several.url}/v1/requests/{name}", json={"priority": "BE"})
        assert changed.json()["priority"] == "BE", changed.json()
    for front in several.front.all:
        assert front._num_ls == 0
    for client in clients:
        client.answer()


def test_an_id_is_in_use_at_every_model(several: Serving) -> None:
    ask = body(0, model="tiny", stream=True, request_id="twice")
    client = Client(several, COMPLETIONS, ask)
    wait_for(lambda: client.has_begun)
    answer = several.post(COMPLETIONS, {**ask, "model": "bytes"})
    assert answer.status_code == 409
    client.answer()


def test_metrics_and_health_name_the_models(several: Serving) -> None:
    before = {
        m: several.metric("qllm:generation_tokens_total", m, **{"class": "LS"}) for m in NAMES
    }
    several.post(COMPLETIONS, {"model": "tiny@2", "prompt": "a", "max_tokens": 5})
    wait_for(
        lambda: (
            several.metric("qllm:generation_tokens_total", "tiny@2", **{"class": "LS"})
            == before["tiny@2"] + 5
        )
    )
    for model in ("tiny", "bytes"):
        found = several.metric("qllm:generation_tokens_total", model, **{"class": "LS"})
        assert found == before[model]
    assert [several.metric("qllm:engine_up", model) for model in NAMES] == [1, 1, 1]
    text = several.get("/metrics").text
    assert text.count("# TYPE qllm:engine_up gauge") == 1
    assert list(several.get("/health").json()["models"]) == list(NAMES)


def events(served: Serving, query: str) -> dict[str, Any]:
    with httpx.stream("GET", f"{served.url}/ui/events{query}", timeout=60) as answer:
        for text in answer.iter_lines():
            if text.startswith("data: "):
                found: dict[str, Any] = json.loads(text.removeprefix("data: "))
                return found
    raise AssertionError("no event")


def test_the_live_page_shows_one_model(several: Serving) -> None:
    assert events(several, "")["model"] == "tiny"
    assert events(several, "?model=bytes")["model"] == "bytes"
    assert several.get("/ui/events?model=none").status_code == 404


def ask_each(served: Serving) -> list[Client]:
    asks = [
        body(n, model=model, stream=True, **how)
        for model in NAMES
        for n, how in enumerate(({"temperature": 0}, {**SAMPLED, "service_tier": "flex"}))
    ]
    return [Client(served, COMPLETIONS, ask) for ask in asks]


@pytest.mark.parametrize("dies", NAMES)
def test_kill_9_of_any_engine_changes_no_answer(several: Serving, dies: str) -> None:
    """An answer of a model whose engine is gone waits for the next one, and is by no other."""
    expected = [client.answer() for client in ask_each(several)]
    front = several.front.of(dies)
    before = several.metric("qllm:requests_replayed_total", dies)
    others = {name: several.metric("qllm:requests_replayed_total", name) for name in NAMES}
    while several.metric("qllm:requests_replayed_total", dies) == before:  # until one is hit
        engine = front.engine
        clients = ask_each(several)
        wait_for(lambda asked=clients: all(client.has_begun for client in asked))
        os.kill(pid_of(engine), signal.SIGKILL)
        assert [client.answer() for client in clients] == expected
        wait_for(lambda old=engine: front.engine is not old and front.unavailable() is None, 60)
    for name in set(NAMES) - {dies}:
        assert several.metric("qllm:requests_replayed_total", name) == others[name]


def test_while_one_engine_is_down_the_others_serve(several: Serving) -> None:
    front = several.front.of("bytes")
    engine = front.engine
    os.kill(pid_of(engine), signal.SIGKILL)
    wait_for(lambda: front.unavailable() is not None)
    said = several.get("/health").json()
    if front.unavailable() is not None:  # it is not back yet
        assert said["models"]["tiny"]["status"] == "ok"
    assert several.get("/ready").status_code == 200
    assert several.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status_code == 200
    wait_for(lambda: front.engine is not engine and front.unavailable() is None, 60)


# -- how models are named


def test_spelling_of_further_models() -> None:
    assert parse_also("tiny@2") == Named("tiny@2", "tiny", 2)
    assert parse_also("org/model") == Named("org/model", "org/model", None)
    assert parse_also("small=org/model@12") == Named("small", "org/model", 12)
    assert parse_also("./a=b/c@d") == Named("./a=b/c@d", "./a=b/c@d", None)
    assert parse_engines(["b=h:1", "h:2", "b=h:3"]) == [Named("b", "h:1,h:3"), Named("", "h:2")]


@pytest.mark.parametrize("text", ["", "=tiny", "a=", " ", "a=@2"])
def test_wrong_spelling_of_further_models(text: str) -> None:
    if text != "a=@2":
        with pytest.raises(ConfigError, match="also="):
            parse_also(text)
    with pytest.raises(ConfigError, match="also="):
        parse_engines([text if text != "a=@2" else "a="])


def config_of(**settings: Any) -> Any:
    return load_config(None, {}, {"model": "tiny", **settings})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"also": ["tiny"]}, "two models are called 'tiny'"),
        ({"also": ["b=tiny@2", "b=tiny@3"]}, "two models are called 'b'"),
        ({"also": ["tiny@2"], "role": "engine", "listen": "127.0.0.1:1"}, "serves one model"),
        ({"also": ["tiny@2"], "ray": {}}, "serves one model"),
        ({"also": ["tiny@2"], "engine": {"kv_dir": "/x"}}, "the file of one model"),
    ],
)
def test_settings_that_do_not_go_with_several_models(settings: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config_of(**settings)


def test_a_model_has_the_settings_of_all_but_not_the_depth() -> None:
    config = config_of(also=["tiny@2", "x=tiny"], engine={"depth": 3, "max_num_seqs": 7})
    assert [c.engine for c in config.further] == [
        {"max_num_seqs": 7, "depth": 2},
        {"max_num_seqs": 7},
    ]
    assert [c.model_names for c in config.further] == [("tiny@2",), ("x",)]


# -- memory


def test_bytes_of_a_checkpoint_by_depth(place: str) -> None:
    whole, cut = stored_bytes("tiny"), stored_bytes("tiny", 2)
    assert 0 < cut < whole
    assert stored_bytes("tiny", 99) == whole
    assert stored_bytes(place, dtype="bfloat16") * 2 == stored_bytes(place)


def test_models_that_do_not_fit_are_refused_with_the_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = [stored_bytes("tiny"), stored_bytes("tiny", 2)]
    loads: list[str] = []
    monkeypatch.setattr("qllm.server.serve.make_engine", lambda c: loads.append(c.model))
    monkeypatch.setattr("qllm.several.free_bytes", lambda: sum(sizes) - 1)
    with pytest.raises(ConfigError, match=rf"= {sum(sizes)} bytes, and {sum(sizes) - 1} bytes"):
        make_engines(config_of(also=["tiny@2"]))
    assert loads == []
    models = [Named("tiny", "tiny"), Named("tiny@2", "tiny", 2)]
    monkeypatch.setattr("qllm.several.free_bytes", lambda: sum(sizes))
    refuse_too_large(models, engine_config({}))
    monkeypatch.setattr("qllm.several.memory_bytes", lambda: 1999)
    with pytest.raises(ConfigError, match=r"together 2000 bytes.*give at most 999"):
        refuse_too_large(models, engine_config({"memory": 1000}))
    refuse_too_large(models, engine_config({"memory": 999}))


def test_an_engine_that_fails_closes_those_that_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Made:
        fleet = object()

        def __init__(self, name: str) -> None:
            self.close: Callable[[], None] = lambda: closed.append(name)

    def make(config: Any) -> Any:
        if config.model_name == "tiny@2":
            raise ConfigError("it does not load")
        return Made(config.model_name)

    monkeypatch.setattr("qllm.server.serve.make_engine", make)
    with pytest.raises(ConfigError, match="it does not load"):
        make_engines(config_of(also=["tiny@2"]))
    assert closed == ["tiny"]


def test_names_are_refused_once_more_where_engines_name_themselves() -> None:
    with pytest.raises(ConfigError, match="two models are called 'a'"):
        refuse_same_names(["a", "b", "a"])


def test_metrics_of_two_models_share_their_collectors() -> None:
    first = Metrics("a")
    second = Metrics("b", beside=first)
    second.demoted.inc()
    assert 'qllm:requests_demoted_total{model_name="b"} 1.0' in first.render().decode()
    assert 'qllm:requests_demoted_total{model_name="a"} 0.0' in second.render().decode()


# -- model="auto"


def view_of(name: str, ls_tokens: int = 0, be_tokens: int = 0, token_s: float = 1e-3) -> EngineView:
    return EngineView(
        name,
        costs=RouteCosts(token_s, 1e-3, 1e-3),
        ls=Backlog(int(ls_tokens > 0), prompt_tokens=ls_tokens),
        be=Backlog(int(be_tokens > 0), prompt_tokens=be_tokens),
    )


def candidate(name: str, *, longest: int = 1000, whole: bool = True, **load: Any) -> Candidate:
    return Candidate(name, view_of(name, **load), longest, whole)


def chosen(models: list[Candidate], tokens: int = 10, priority: int = LS, most: int = 1) -> Any:
    found = choose_model(RequestView(priority, tokens, most), models)
    return found and found.name


def test_auto_prefers_the_first_model_that_begins_in_time() -> None:
    small = candidate("small", token_s=1e-5)
    assert chosen([candidate("big"), small]) == "big"
    assert chosen([candidate("big", ls_tokens=980), small]) == "big"
    assert chosen([candidate("big", ls_tokens=1_000), small]) == "small"
    assert chosen([candidate("big", be_tokens=9_000), small]) == "big", "LS goes before BE"
    assert chosen([candidate("big", ls_tokens=5_000), small], priority=BE) == "big"
    assert chosen([candidate("big", be_tokens=60_000), small], priority=BE) == "small"
    late = candidate("small", ls_tokens=4_000)
    assert chosen([candidate("big", ls_tokens=5_000), late]) == "small"
    assert chosen([late, candidate("big", ls_tokens=5_000)]) == "small"


def test_auto_counts_the_length_of_the_prompt() -> None:
    models = [candidate("slow", longest=10_000), candidate("quick", longest=10_000, token_s=1e-6)]
    assert chosen(models, tokens=1_000) == "slow"
    assert chosen(models, tokens=1_001) == "quick"
    assert chosen([candidate("a", longest=100), candidate("b")], tokens=99) == "a"
    assert chosen([candidate("a", longest=100), candidate("b")], tokens=99, most=2) == "b"
    assert chosen([candidate("a", longest=100)], tokens=100) is None


def test_auto_never_takes_a_cut_model_or_one_that_is_down() -> None:
    cut = candidate("cut", whole=False, token_s=1e-9)
    assert chosen([cut, candidate("whole", ls_tokens=90_000)]) == "whole"
    assert chosen([cut]) is None
    down = candidate("down")._replace(serves=False)
    assert chosen([down, candidate("up", ls_tokens=90_000)]) == "up"


@pytest.fixture(scope="module")
def with_auto() -> Iterator[Serving]:
    with serving_models(also=["tiny@2", "other=tiny"], auto=True, engine=ENGINE, threads=1) as made:
        yield made


def test_auto_answers_by_a_whole_model_and_says_which(with_auto: Serving) -> None:
    for path, asked in bodies(4).items():
        answer = with_auto.post(path, {**asked, "model": "auto"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == answer.headers["x-qllm-models"] == "tiny"
    os.kill(pid_of(with_auto.front.engine), signal.SIGKILL)
    wait_for(lambda: with_auto.front.unavailable() is not None)
    answer = with_auto.post(COMPLETIONS, {"model": "auto", "prompt": "a", "max_tokens": 4})
    assert answer.status_code == 200
    assert answer.json()["model"] in ("other", "tiny")  # tiny if it is back already
    long = with_auto.post(COMPLETIONS, {"model": "auto", "prompt": "a " * 20_000, "max_tokens": 4})
    assert long.status_code == 400
    assert "no whole model" in long.json()["error"]["message"]
    wait_for(lambda: with_auto.front.unavailable() is None, 60)


def test_lossy_answers_are_refused(several: Serving) -> None:
    for path, asked in bodies(4).items():
        answer = several.post(path, {**asked, "model": "tiny", "lossy": True})
        assert answer.status_code == 400
        is_served = "completions" in path
        text = "does not allow lossy answers" if is_served else "/v1/completions alone"
        assert text in answer.json()["error"]["message"]
        plain = several.post(path, {**asked, "model": "tiny", "lossy": False})
        assert plain.status_code == 200
        assert "x-qllm-ignored" not in plain.headers


def test_auto_is_no_name_where_it_is_off(several: Serving) -> None:
    answer = several.post(COMPLETIONS, {"model": "auto", "prompt": "a"})
    assert answer.status_code == 404
    assert "start the server with --auto true" in answer.json()["error"]["message"]


def test_auto_between_other_tokenizers_is_refused_at_the_start(place: str) -> None:
    settings = {"also": [f"bytes={place}"], "auto": True, "engine": ENGINE, "threads": 1}
    with ExitStack() as stack, pytest.raises(ConfigError, match="they have another vocabulary"):
        stack.enter_context(serving_models(**settings))


@pytest.mark.parametrize(
    ("settings", "text"),
    [({}, "name further ones as also"), ({"also": ["auto=tiny@2"]}, "cannot be called 'auto'")],
)
def test_settings_that_do_not_go_with_auto(settings: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config_of(auto=True, **settings)


def test_engines_of_one_server_share_their_cores(with_auto: Serving) -> None:
    groups = {front.engine.config.shared_cores for front in with_auto.front.all}
    assert len(groups) == 1
    assert None not in groups
    for front in with_auto.front.all:
        wait_for(lambda front=front: front.engine.stats()["pressure"]["met"] == 2)
