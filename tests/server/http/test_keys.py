"""API keys with a class and limits of their own."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qllm.errors import ConfigError
from qllm.llm import QLLMEngine
from qllm.server.config import load_config
from qllm.server.http.guard import Keys
from qllm.server.http.keys import FIELDS, Rule, caller_of, digest, read_rules
from qllm.server.serve import make_engine, serve
from qllm.types import Priority
from tests.support.serving import Serving, bodies, serving
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("engine")  # each test leaves the shared engine idle

SECRET = "sk-7h15-15-53cr37"
TEXT = f"""
[[key]]
name = "main"
key = "alpha"

[[key]]
name = "subagents"
sha256 = "{hashlib.sha256(b"beta").hexdigest()}"
max_priority = "be"

[[key]]
name = "jobs"
key = "gamma"
priority = "BE"

[[key]]
name = "one-by-one"
key = "epsilon"
max_priority = "BE"
max_concurrent = 1
"""
BODIES = bodies(1) | {"/v1/prompts": {"prompt": "x"}}


def written(path: Path, text: str = TEXT, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def served(
    shared_engine: QLLMEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """Serve four keys with rules, and one without."""
    file = written(tmp_path_factory.mktemp("keys") / "keys.toml")
    objectives = {"urgent": "LS"}
    with serving(shared_engine, keys_file=file, api_keys="delta", objectives=objectives) as made:
        yield made


def class_of(served: Serving, path: str, answer: httpx.Response, key: str) -> str:
    """Return the class that a request was served with; a streaming prompt is deleted."""
    assert answer.status_code == 200, answer.text
    if path != "/v1/prompts":
        return answer.headers["x-qllm-priority"]
    opened = answer.json()
    url = f"{served.url}{path}/{opened['id']}"
    assert httpx.delete(url, headers=bearer(key)).status_code == 200
    return str(opened["priority"])


def test_every_route_that_takes_a_class_is_asked_here(served: Serving) -> None:
    schema = served.server.config.app.openapi()
    parts = schema["components"]["schemas"]

    def takes_class(operation: dict[str, Any]) -> bool:
        content = operation.get("requestBody", {}).get("content", {}).values()
        text = json.dumps([parts.get(x["schema"].get("$ref", "/").rpartition("/")[2], x["schema"])
                           for x in content])  # fmt: skip
        return '"service_tier"' in text or '"priority"' in text

    found = {path for path, does in schema["paths"].items() if takes_class(does.get("post", {}))}
    counting = {"/v1/responses/input_tokens", "/v1/messages/count_tokens"}
    assert found - counting == set(BODIES), "counting has no class"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("key", "usual"), [("alpha", "LS"), ("beta", "BE"), ("gamma", "BE"), ("delta", "LS")]
)
def test_a_request_without_a_class_has_that_of_its_key(
    served: Serving, path: str, key: str, usual: str
) -> None:
    answer = served.post(path, BODIES[path], headers=bearer(key))
    assert class_of(served, path, answer, key) == usual
    assert "x-qllm-demoted" not in answer.headers


WAYS: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"x-qllm-priority": "LS"}, {}),
    ({"x-gateway-inference-objective": "urgent"}, {}),
    ({"x-dynamo-request-priority": "3"}, {}),
    ({}, {"priority": 0}),
    ({}, {"service_tier": "priority"}),
    ({}, {"service_tier": "default"}),
]
ASKED = [(path, *way) for path in BODIES for way in WAYS if path != "/v1/messages" or not way[1]]
"""Every way to ask for LS on every route; the tiers of messages name no class of ours."""


@pytest.mark.parametrize(("path", "headers", "fields"), ASKED)
def test_no_way_of_asking_gets_more_than_the_best_class_of_a_key(
    served: Serving, path: str, headers: dict[str, str], fields: dict[str, Any]
) -> None:
    body = {**BODIES[path], **fields}
    for key, usual in (("beta", "BE"), ("alpha", "LS")):
        answer = served.post(path, body, headers={**bearer(key), **headers})
        assert class_of(served, path, answer, key) == usual
        is_told = key == "beta" and path != "/v1/prompts"
        assert answer.headers.get("x-qllm-demoted") == ("1" if is_told else None)


def test_a_key_whose_usual_class_is_be_may_ask_for_ls(served: Serving) -> None:
    body = {**BODIES["/v1/completions"], "priority": 0}
    answer = served.post("/v1/completions", body, headers=bearer("gamma"))
    assert answer.headers["x-qllm-priority"] == "LS"


def test_an_open_request_is_not_raised_above_the_best_class(served: Serving) -> None:
    body = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    body["request_id"] = "long"
    mine = bearer("epsilon")
    how: dict[str, Any] = {"json": body, "headers": mine, "timeout": 60}
    with httpx.stream("POST", f"{served.url}/v1/completions", **how) as stream:
        lines = stream.iter_lines()
        next(lines)
        url = f"{served.url}/v1/requests/long"
        refused = httpx.patch(url, json={"priority": "LS"}, headers=mine, timeout=60)
        assert refused.status_code == 403
        assert "one-by-one) is BE (max_priority)" in refused.json()["error"]["message"]
        same = httpx.patch(url, json={"priority": "BE"}, headers=mine, timeout=60)
        assert same.status_code == 200, same.text
        assert same.json()["priority"] == "BE"
        over = served.post("/v1/completions", BODIES["/v1/completions"], headers=mine)
        assert (over.status_code, over.json()["error"]["code"]) == (429, "concurrency_limit")
        assert "max_concurrent=1" in over.json()["error"]["message"]
        for other in ("alpha", "beta", "delta"):
            asked = served.post("/v1/completions", BODIES["/v1/completions"], headers=bearer(other))
            assert asked.status_code == 200
    wait_for(lambda: not served.front.answers)


def test_metrics_name_the_keys_of_the_file_and_no_others(served: Serving) -> None:
    text = served.get("/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("qllm:key_info{")]
    for name, key in (("main", "alpha"), ("subagents", "beta"), ("one-by-one", "epsilon")):
        assert any(f'name="{name}"' in x and caller_of(digest(key)) in x for x in lines)
    assert len(lines) == 4
    assert not any(key in text for key in ("alpha", "beta", "gamma"))


WRONG: list[tuple[str, str]] = [
    ("", r"must hold tables \[\[key\]\], 1 to 1000"),
    ("key = 5", r"must hold tables \[\[key\]\]"),
    (f'other = "{SECRET}"', r"must hold tables \[\[key\]\].*and nothing else"),
    (f'[[key]]\nname = "a"\nkey = "{SECRET}', r"is not TOML \(at (line 3, column \d+|end .*)\)"),
    (f"{SECRET}", r"is not TOML \(at .*\)"),
    (f'[[key]]\nkey = "{SECRET}"', "key 1: name must be 1 to 64 letters"),
    (f'[[key]]\nname = "{SECRET}"\nkey = "{SECRET}"', "key 1: name must .* and not the key"),
    (f'[[key]]\nname = "a b"\nkey = "{SECRET}"', "key 1: name must be"),
    (f'[[key]]\nname = "a"\n"{SECRET}" = 1', "key 1: a field is unknown; known: name, key,"),
    ('[[key]]\nname = "a"', r"key 1 \(a\): give one of key and sha256"),
    (
        f'[[key]]\nname = "a"\nkey = "{SECRET}"\nsha256 = "{"0" * 64}"',
        r"key 1 \(a\): give one of key and sha256",
    ),
    (f'[[key]]\nname = "a"\nsha256 = "{SECRET}"', r"key 1 \(a\): sha256 must be the 64 hex"),
    (f'[[key]]\nname = "a"\nkey = " {SECRET}"', r"key 1 \(a\): key must be text"),
    ('[[key]]\nname = "a"\nkey = ""', r"key 1 \(a\): key must be text"),
    ('[[key]]\nname = "a"\nkey = 5', r"key 1 \(a\): key must be text"),
    (
        f'[[key]]\nname = "a"\nkey = "{SECRET}"\npriority = "URGENT"',
        r"key 1 \(a\): priority must be one of LS, BE",
    ),
    (
        f'[[key]]\nname = "a"\nkey = "{SECRET}"\nmax_priority = 0',
        r"key 1 \(a\): max_priority must be one of LS, BE",
    ),
    (
        f'[[key]]\nname = "a"\nkey = "{SECRET}"\npriority = "LS"\nmax_priority = "BE"',
        r"key 1 \(a\): priority=LS is better than max_priority=BE",
    ),
    *(
        (
            f'[[key]]\nname = "a"\nkey = "{SECRET}"\nmax_concurrent = {count}',
            r"key 1 \(a\): max_concurrent must be an integer >= 1",
        )
        for count in ("0", "-1", "1.5", "true", '"4"')
    ),
    (
        f'[[key]]\nname = "a"\nkey = "{SECRET}"\n[[key]]\nname = "b"\nkey = "{SECRET}"',
        "a and b have the same key",
    ),
    (
        f'[[key]]\nname = "a"\nkey = "{SECRET}"\n[[key]]\nname = "a"\nkey = "x"',
        "names a twice",
    ),
]


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_a_wrong_file_is_refused_by_place_and_shows_no_key(
    text: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        read_rules(written(tmp_path / "keys.toml", text))
    assert SECRET not in str(refused.value)


@given(st.text(max_size=60), st.sampled_from(["", '[[key]]\nname = "a"\nkey = "', "[[key]]\n"]))
def test_any_text_gives_rules_or_an_error_without_that_text(text: str, start: str) -> None:
    class File(type(Path())):  # type: ignore[misc]
        def read_bytes(self) -> bytes:
            return (start + SECRET + text).encode("utf-8", "surrogatepass")

        def stat(self, **_: Any) -> Any:
            return type("", (), {"st_mode": 0o600})

    try:
        rules = read_rules(File("keys.toml"))
    except ConfigError as error:
        assert SECRET not in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert rules


def test_a_file_that_others_can_read_is_reported_if_it_holds_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hashed = f'[[key]]\nname = "a"\nsha256 = "{"ab" * 32}"'
    for text, mode, is_told in ((TEXT, 0o644, True), (TEXT, 0o600, False), (hashed, 0o644, False)):
        caplog.clear()
        assert read_rules(written(tmp_path / "keys.toml", text, mode))
        assert ("can be read by other users (mode 644)" in caplog.text) is is_told
    with pytest.raises(ConfigError, match=r"keys_file='.*none': No such file"):
        read_rules(tmp_path / "none")


def test_a_key_is_named_once_among_all_sources() -> None:
    rule = Rule("main", digest("alpha"), Priority.LS, Priority.LS, None)
    assert Keys(["beta"], rules=[rule]).caller("Bearer alpha") == rule.caller
    with pytest.raises(ConfigError, match="the key of main in keys_file is also in api_key_file"):
        Keys(["alpha"], rules=[rule])


def test_a_wrong_file_ends_the_server_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{serve.__module__}.{make_engine.__name__}", lambda _: 1 / 0)
    file = written(tmp_path / "keys.toml", "[[key]]")
    config = load_config(None, {}, {"model": "tiny", "port": 0, "keys_file": str(file)})
    with pytest.raises(ConfigError, match="key 1: name must be"):
        serve(config)


def test_the_fields_are_those_of_a_rule() -> None:
    assert set(FIELDS) == {"name", "key", "sha256", "priority", "max_priority", "max_concurrent"}
