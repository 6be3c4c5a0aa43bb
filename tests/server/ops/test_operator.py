"""What an operator relies on: TLS, probes, logs, counters per key, and how the server leaves."""

import asyncio
import hashlib
import json
import logging
import re
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
import trustme

from qllm.errors import ConfigError
from qllm.llm import QLLMEngine
from qllm.server.api.answers import Whole
from qllm.server.config import ENGINE_ROLES, ServerConfig, load_config
from qllm.server.http import access
from qllm.server.http.tls import ssl_context
from qllm.server.ops.banner import banner, is_loopback, shown_bytes, warnings
from qllm.server.ops.supervisor import Supervisor
from tests.support.serving import serving
from tests.support.waiting import wait_for

ASK = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}


# -- TLS


class Certificates:
    """An authority, and files of a server's certificate and a client's."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.folder = folder
        self.ca = folder / "ca.pem"
        self.authority.cert_pem.write_to_path(self.ca)
        self.certfile, self.keyfile = self.make("127.0.0.1", "server")

    def make(self, name: str, file: str) -> tuple[Path, Path]:
        made = self.authority.issue_cert(name)
        cert, key = self.folder / f"{file}.pem", self.folder / f"{file}.key"
        made.cert_chain_pems[0].write_to_path(cert)
        made.private_key_pem.write_to_path(key)
        return cert, key

    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca))


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def test_a_certificate_makes_it_https(engine: QLLMEngine, certificates: Certificates) -> None:
    files = {"ssl_certfile": certificates.certfile, "ssl_keyfile": certificates.keyfile}
    with serving(engine, **files) as served:
        url = served.url.replace("http:", "https:")
        with httpx.Client(verify=certificates.trusting(), timeout=60) as client:
            answer = client.post(f"{url}/v1/completions", json=ASK, timeout=60)
            assert answer.json()["usage"]["completion_tokens"] == 3
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health", timeout=60)
        with pytest.raises(httpx.HTTPError):
            served.get("/health")  # no plain HTTP beside it


def test_clients_may_need_a_certificate(engine: QLLMEngine, certificates: Certificates) -> None:
    settings = {
        "ssl_certfile": certificates.certfile, "ssl_keyfile": certificates.keyfile,
        "ssl_ca_certs": certificates.ca, "ssl_cert_reqs": "required",
    }  # fmt: skip
    with serving(engine, **settings) as served:
        url = served.url.replace("http:", "https:")
        context = certificates.trusting()
        with httpx.Client(verify=context, timeout=60) as client, pytest.raises(httpx.HTTPError):
            client.get(f"{url}/health")
        context = certificates.trusting()
        context.load_cert_chain(*certificates.make("client.example", "client"))
        with httpx.Client(verify=context, timeout=60) as client:
            assert client.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ssl_certfile": "/nothing.pem"}, "ssl_certfile='/nothing.pem'.*No such file"),
        ({"ssl_certfile": __file__}, "needed are PEM files"),
        ({"ssl_keyfile": "key.pem"}, "ssl_keyfile needs ssl_certfile"),
        ({"ssl_cert_reqs": "required"}, "needs ssl_certfile"),
        ({"ssl_certfile": "cert", "ssl_cert_reqs": "optional"}, "needs ssl_ca_certs"),
    ],
)
def test_wrong_files_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ssl_context(load_config(None, {}, {"model": "tiny", **settings}))


# -- pages and probes


def test_probes_answer_head_and_the_root_leads_to_the_page(engine: QLLMEngine) -> None:
    with serving(engine, api_keys="key") as served:
        for path in ("/health", "/ready", "/docs"):
            answer = httpx.head(f"{served.url}{path}", timeout=60)
            assert (answer.status_code, answer.content) == (200, b"")
        answer = served.get("/")
        assert (answer.status_code, answer.headers["location"]) == (307, "/ui")


def test_the_docs_page_names_every_route_and_field_and_loads_nothing_from_elsewhere(
    engine: QLLMEngine,
) -> None:
    with serving(engine) as served:
        page, schema = served.get("/docs"), served.get("/openapi.json").json()
        assert served.get("/docs/static/docs.css").headers["content-type"].startswith("text/css")
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    for path in schema["paths"]:
        assert path in page.text
    for field in schema["components"]["schemas"]["ChatRequest"]["properties"]:
        assert f"<code>{field}</code>" in page.text
    assert not re.findall(r"<script|https?://|style=", page.text)


# -- logs


def access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [r.fields for r in caplog.records if r.name == "qllm.server.http.access"]  # type: ignore[attr-defined]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Records reach pytest although the server's loggers do not propagate."""
    monkeypatch.setattr("qllm.server.ops.run.log_config", lambda _: None)
    logging.getLogger("qllm.server.http.access").setLevel(logging.INFO)
    yield
    logging.getLogger("qllm.server.http.access").setLevel(logging.NOTSET)


@pytest.mark.usefixtures("heard")
def test_a_request_is_one_line_with_class_ttft_and_tokens(
    engine: QLLMEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(engine, api_keys="secret", max_ls=2) as served:
        key = {"Authorization": "Bearer secret", "x-request-id": "mine\t1"}
        body = {**ASK, "n": 2, "priority": 1}
        answer = served.post("/v1/completions", body, headers=key)
        del (plain := dict(key))["x-request-id"]
        stream = served.post("/v1/completions", {**ASK, "stream": True}, headers=plain)
        demoted = served.post("/v1/completions", {**ASK, "n": 3}, headers=key)
        served.post("/v1/completions", {"prompt": 3.5}, headers=key)
        served.post("/v1/completions", ASK)
        for path in ("/health", "/metrics", "/ready"):
            served.get(path)
        wait_for(lambda: len(access_lines(caplog)) >= 5)
    lines = sorted(access_lines(caplog), key=lambda line: (line["status"], line.get("ms", 0)))
    assert len(lines) == 5, "one line per request, and none for a probe"
    good = {line["id"]: line for line in lines if line["status"] == 200}
    assert set(good) >= {answer.json()["id"], demoted.json()["id"]}
    assert stream.headers["x-request-id"] in good
    first = good[answer.json()["id"]]
    assert (first["class"], first["output_tokens"], first["finish"]) == ("BE", 6, "length")
    assert first["ttft_ms"] > 0
    assert first["key"] == hashlib.sha256(b"secret").hexdigest()[:16]
    assert first["x_request_id"] == "mine%091"
    assert good[stream.headers["x-request-id"]]["class"] == "LS"
    assert good[demoted.json()["id"]]["demoted"] is True
    assert sorted(line["status"] for line in lines) == [200, 200, 200, 400, 401]
    assert "secret" not in caplog.text


@pytest.mark.usefixtures("heard")
def test_no_name_of_a_caller_looks_like_a_field(
    engine: QLLMEngine, caplog: pytest.LogCaptureFixture
) -> None:
    names = ['a status=200 key="x"', "b\t200", "d\xe9'", "ok-1._~:/+=@", 'c"\\u0020']
    with serving(engine) as served:
        for name in names:
            headers = {b"x-request-id": name.encode("latin-1")}
            answer = served.post("/v1/completions", ASK, headers=headers)
            assert answer.headers["x-request-id"] == name
        named = served.post("/v1/completions", {**ASK, "request_id": 'x"status=404'})
        assert named.status_code == 200
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as sock:
            sock.sendall(b'GET /q"200 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n')
            while sock.recv(4096):
                pass
        wait_for(lambda: len(access_lines(caplog)) == len(names) + 2)
    said = [r.getMessage() for r in caplog.records if r.name == "qllm.server.http.access"]
    given = re.compile(r'"[A-Z]+ [-.~:/+=@%\w]+" \d+( \w+=[-.~:/+=@%\w]+)+', re.ASCII)
    for line in said:
        assert given.fullmatch(line), line
    for line, name in zip(said, names, strict=False):
        fields = [part.partition("=") for part in line.split()[3:]]
        assert unquote(next(x for key, _, x in fields if key == "x_request_id")) == name
        assert len({key for key, _, _ in fields}) == len(fields), "no field twice"
    assert '"GET /q%22200" 404' in said[-1]


@pytest.mark.usefixtures("heard")
def test_the_access_log_can_be_off(engine: QLLMEngine, caplog: pytest.LogCaptureFixture) -> None:
    with serving(engine, access_log=False) as served:
        served.post("/v1/completions", ASK)
    assert access_lines(caplog) == []


@pytest.mark.usefixtures("heard")
def test_a_line_comes_after_its_answer_and_the_last_ones_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def talk() -> None:
        log = access.Log()
        for number in range(3):
            access.Exchange("", log, f"GET /{number}").ended(200)
        await asyncio.sleep(0)
        assert access_lines(caplog) == [], "what is to be sent in this turn goes first"
        while not access_lines(caplog):
            await asyncio.sleep(0.001)
        assert [line["request"] for line in access_lines(caplog)] == ["GET /0", "GET /1", "GET /2"]
        access.Exchange("", log, "GET /last").ended(200)
        log.write()

    asyncio.run(talk())
    assert [line["request"] for line in access_lines(caplog)][3:] == ["GET /last"]


@pytest.mark.parametrize("fails", [False, True])
def test_an_answer_is_closed_once_it_is_sent_or_cannot_be(fails: bool) -> None:
    said: list[str] = []

    async def send(message: Any) -> None:
        said.append(message["type"])
        if fails:
            raise OSError("gone")

    async def never() -> Any:
        raise AssertionError

    answer = Whole({"a": 1}, lambda: said.append("closed"), {})
    sent = answer({"type": "http", "method": "POST", "headers": []}, never, send)
    with pytest.raises(OSError, match="gone") if fails else nullcontext():
        asyncio.run(sent)
    begun = ["http.response.start"]
    assert said == begun + ["http.response.body"] * (not fails) + ["closed"]


def test_the_start_says_what_serves_and_with_what(engine: QLLMEngine) -> None:
    config = load_config(None, {}, {"model": "tiny", "max_ls": 7})
    text = "\n".join(banner(engine, config, 1.25))
    for part in ("tiny", "MB of weights", "loaded in 1.2 s", engine.kernels["experts"], "65,536",
                 "qllm2", "LS and BE", "at most 7", "fast", "parts    known by their source: layer",
                 "prefix cache: 16,384 tokens", "memory   KV at most ", "cached KV ",
                 "were free after loading", "chosen by the engine: no size"):  # fmt: skip
        assert part in text, part
    with QLLMEngine.from_pretrained("tiny", kernels="reference", conformance=False) as other:
        said = "\n".join(banner(other, config, 1.25))
    assert "prefix cache: off, because not every layer runs on our kernels" in said
    assert "cached KV" not in said
    assert "longest segment 5 ms; it stops between ops (nominal " in said
    assert engine.stats()["weight_bytes"] > 1_000_000


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"draft": "auto"}, ["drafts   auto, at most 4 tokens per step"]),
        ({"draft": "auto", "draft_tokens": 0}, []),
        ({}, []),
    ],
)
def test_the_start_says_who_drafts(
    settings: dict[str, Any], said: list[str], engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QLLMEngine, "config", replace(engine.config, **settings))
    lines = banner(engine, load_config(None, {}, {"model": "tiny"}), 1.25)
    assert [line for line in lines if line.startswith("drafts")] == said


def test_the_start_says_what_a_draft_model_takes() -> None:
    with QLLMEngine.from_pretrained(
        "tiny", conformance=False, run_in="thread", draft="model:tiny", max_kv_tokens=4096
    ) as other:
        lines = banner(other, load_config(None, {}, {"model": "tiny"}), 1.25)
        each = other.stats()["drafts"]["model"]["token_bytes"]
        weights = shown_bytes(other.stats()["weight_bytes"])
    assert [line for line in lines if line.startswith("drafts")] == [
        f"drafts   model:tiny, at most 4 tokens per step; draft model: {weights} of weights, "
        f"KV at most {shown_bytes(4096 * each)}"
    ]


@pytest.mark.parametrize("role", ENGINE_ROLES)
def test_an_engine_without_http_says_at_its_start_what_others_say(
    engine: QLLMEngine, role: str
) -> None:
    config = load_config(None, {}, {"model": "tiny", "role": role, "listen": "127.0.0.1:7001"})
    *lines, classes = banner(engine, config, 1.25)
    *others, _, tools = banner(engine, load_config(None, {}, {"model": "tiny"}), 1.25)
    assert lines == others
    assert tools.startswith("tools ")  # front ends read the calls of answers
    assert shown_bytes(engine.stats()["weight_bytes"]) in lines[0]
    policy = "policy   qllm2, preempts at: expert, longest segment 5 ms"
    assert f"{policy}; it stops before every task of an op" in lines
    assert classes.endswith("from front ends at 127.0.0.1:7001")
    assert "--state-dir" not in classes  # it has no batches, whatever it is given


def test_bytes_are_shown_with_three_digits() -> None:
    assert [shown_bytes(n) for n in (0, 999, 1e3, 2.5e6, 60e9)] == [
        "0 B", "999 B", "1 kB", "2.5 MB", "60 GB",
    ]  # fmt: skip


def test_an_open_server_is_warned_about() -> None:
    def said(num_keys: int, **settings: Any) -> str:
        config = ServerConfig(model="tiny", **settings)
        return "".join(warnings(config, num_keys))

    assert "everybody who reaches 0.0.0.0" in said(0, host="0.0.0.0")
    assert "in clear text" in said(1, host="0.0.0.0")
    assert said(1, host="0.0.0.0", ssl_certfile="cert.pem") == ""
    assert said(0) == said(0, host="localhost") == said(0, host="::1") == ""
    assert not is_loopback("example.com")


# -- counters


def test_keys_have_counters_by_their_digest(engine: QLLMEngine) -> None:
    with serving(engine, api_keys="alpha,beta") as served:
        for key, times in (("alpha", 2), ("beta", 1)):
            for _ in range(times):
                headers = {"Authorization": f"Bearer {key}"}
                served.post("/v1/completions", {**ASK, "priority": 1}, headers=headers)
        alpha = {"key": hashlib.sha256(b"alpha").hexdigest()[:16]}
        wait_for(
            lambda: (
                served.metric("qllm:key_generation_tokens_total", **alpha, **{"class": "BE"}) == 6
            )
        )
        assert served.metric("qllm:key_requests_total", **alpha, status="200") == 2
        prompt = served.metric("qllm:key_prompt_tokens_total", **alpha, **{"class": "BE"})
        num_prompt = len(engine.tokenizer("a").input_ids)
        assert prompt == 2 * num_prompt
        beta = {"key": hashlib.sha256(b"beta").hexdigest()[:16], "class": "LS"}
        body = {**ASK, "prompt": ["a", "a a"], "n": 3}
        served.post("/v1/completions", body, headers={"Authorization": "Bearer beta"})
        wait_for(lambda: served.metric("qllm:key_generation_tokens_total", **beta) == 18)
        want = num_prompt + len(engine.tokenizer("a a").input_ids)
        assert served.metric("qllm:key_prompt_tokens_total", **beta) == want, "not per choice"
        text = served.get("/metrics").text
    assert "alpha" not in text
    assert "beta" not in text


def test_processes_and_sizes_are_counted(engine: QLLMEngine) -> None:
    with serving(engine) as served:
        served.post("/v1/completions", ASK)
        wait_for(
            lambda: served.metric("qllm:request_generation_tokens_sum", **{"class": "LS"}) == 3
        )
        text = served.get("/metrics").text
    sizes = dict(re.findall(r"^(\w*process_resident_memory_bytes) (\S+)$", text, re.MULTILINE))
    assert set(sizes) == {
        "process_resident_memory_bytes",
        "qllm_engine_process_resident_memory_bytes",
    }
    assert min(map(float, sizes.values())) > 1e6
    assert (
        sizes["process_resident_memory_bytes"] != sizes["qllm_engine_process_resident_memory_bytes"]
    )


# -- the end, and a new engine


def test_a_server_that_leaves_is_not_ready_but_serves(engine: QLLMEngine) -> None:
    with serving(engine, shutdown_delay_s=3600) as served:
        assert served.get("/ready").status_code == 200
        served.server.handle_exit(signal.SIGTERM, None)
        answer = served.get("/ready")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert served.get("/health").status_code == 200
        for _ in range(3):
            assert served.post("/v1/completions", ASK).status_code == 200
        served.server.handle_exit(signal.SIGTERM, None)  # a second one does not wait


def test_an_interrupted_server_does_not_wait(engine: QLLMEngine) -> None:
    with serving(engine, shutdown_delay_s=3600) as served:
        served.server.handle_exit(signal.SIGINT, None)
        wait_for(lambda: served.front.draining.is_set())


def test_the_first_retry_after_is_the_load_time(engine: QLLMEngine) -> None:
    with serving(engine) as served:
        supervisor = Supervisor(served.front, lambda: engine, load_s=41.5)
        supervisor.expect(2.0)
        assert served.front.back_in_s is not None
        assert served.front.back_in_s() in (43, 44)
        served.front.back_in_s = None


def test_every_setting_is_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from qllm.cli import app

    seen: list[ServerConfig] = []
    monkeypatch.setattr("qllm.server.serve.serve", seen.append)
    line = "serve --max-ls 5 tiny --no-access-log --cors-origins=https://a,https://b --drain-s 7"
    result = CliRunner().invoke(app, [*line.split(), "--ssl-certfile", "c.pem"])
    assert result.exit_code == 0, result.output
    config = seen[0]
    assert (config.model, config.max_ls, config.access_log, config.drain_s) == ("tiny", 5, False, 7)
    assert config.cors_origins == ("https://a", "https://b")
    assert config.ssl_certfile == Path("c.pem")
    help_text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    for name in ServerConfig.model_fields:
        assert name in help_text, name


def test_json_logs_carry_the_fields() -> None:
    from qllm.logs import log_config

    record = logging.makeLogRecord({"name": "qllm.server.http.access", "msg": "x", "args": ()})
    record.fields = {"class": "LS", "ttft_ms": 1.5}
    found = json.loads(log_config("json")["formatters"]["ours"]["()"]().format(record))
    assert (found["class"], found["ttft_ms"]) == ("LS", 1.5)
