import json
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from html.parser import HTMLParser
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from qllm.errors import EngineClosedError
from qllm.llm import QLLMEngine
from qllm.server.page.feed import Feed
from qllm.server.page.ui import TYPES
from qllm.server.requests.front import Front
from tests.support.files import ROOT
from tests.support.serving import Serving, serving
from tests.support.waiting import wait_for

STATIC = files("qllm.server.page") / "static"
VOID = {"meta", "link", "input", "br", "img"}
LIBRARIES = {"uPlot": ("uPlot.min.js", "v1.6.32"), "marked": ("marked.esm.js", "v18.2.1")}
"""Scripts of others in the page: the file, and its release."""


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.links += [value for name in ("src", "href") if (value := found.get(name))]
        assert not [name for name in found if name.startswith("on")], "the page forbids inline code"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_asks_no_other_host(served: Serving) -> None:
    answer = served.get("/ui")
    page = Page(answer.text)
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert page.open == []
    assert len(set(page.ids)) == len(page.ids)
    names = [link.removeprefix("/ui/static/") for link in page.links]
    assert set(names) - {"#main"} <= set(TYPES)
    for name in ("ui.html", *TYPES):
        if not name.startswith((*LIBRARIES, "icon")):
            assert "://" not in (STATIC / name).read_text()
    for name in TYPES:
        answer = served.get(f"/ui/static/{name}")
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (
            200,
            TYPES[name],
        )
    assert served.get("/ui/static/ui.html").status_code == 404
    assert served.get("/ui/static/..%2Fapp.py").status_code == 404


def scripts() -> str:
    own = [name for name in TYPES if name.endswith(".js") and not name.startswith(tuple(LIBRARIES))]
    return "\n".join((STATIC / name).read_text() for name in own)


def test_the_scripts_know_only_what_the_page_has() -> None:
    page = Page((STATIC / "ui.html").read_text())
    used = {part.split('"', 1)[0] for part in scripts().split('$("')[1:]}
    assert used
    assert used <= set(page.ids), used - set(page.ids)


def test_every_word_is_explained() -> None:
    page = (STATIC / "ui.html").read_text()
    words = {part.split('"', 1)[0] for part in page.split('data-word="')[1:]}
    explained = (STATIC / "ui.js").read_text().split("const WORDS = {")[1].split("\n};")[0]
    names = {line.split(":")[0].strip() for line in explained.splitlines() if ": [" in line}
    assert {"ttft", "park", "preempt", "kv"} <= words <= names


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_has_its_licence(name: str) -> None:
    text = (STATIC / f"{name}.LICENSE").read_text()
    assert "Permission is hereby granted, free of charge" in text
    file, release = LIBRARIES[name]
    assert release in (STATIC / file).read_text()[:200]
    assert f"qllm/server/page/static/{name}.LICENSE" in (ROOT / "pyproject.toml").read_text()


def test_no_script_of_ours_reads_text_as_html() -> None:
    """Markdown of an answer becomes elements and text nodes, made one by one."""
    parsed = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|setHTML|srcdoc"
    )
    assert re.findall(parsed, scripts()) == []


def messages(served: Serving, since: int = 0) -> Iterator[dict[str, Any]]:
    """What a page is sent, as it comes."""
    url = f"{served.url}/ui/events?since={since}"
    with httpx.stream("GET", url, timeout=60) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        number = 0
        for line in stream.iter_lines():
            if line.startswith("id: "):
                number = int(line.removeprefix("id: "))
            elif line:
                yield {"id": number, **json.loads(line.removeprefix("data: "))}


LAST: dict[str, int] = {}
"""Per server, the number of the last message that `look` was sent."""


def look(served: Serving, number: int = 1, since: int | None = None) -> list[dict[str, Any]]:
    """The next messages of a page that was here before: a server may take it for open still."""
    since = LAST.get(served.url, 0) if since is None else since
    with closing(messages(served, since)) as found:
        told = list(islice(found, number))
    LAST[served.url] = told[-1]["id"]
    return told


def whole(served: Serving) -> dict[str, Any]:
    """The next message that lists the requests."""
    return next(message for message in look(served, 5) if "counts" in message)


def test_messages_show_queues_percentiles_and_what_runs(served: Serving) -> None:
    served.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    wait_for(lambda: whole(served)["ttft_ms"]["LS"])
    body = {
        "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True, "priority": 1,
        "slo": {"ttft_ms": 3e5},
    }  # fmt: skip
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as stream:
        texts = stream.iter_text()
        next(texts)
        told = look(served, 12)
        texts.close()
    now = next(message for message in told if message.get("requests"))
    assert now["counts"]["BE"]["running"] + now["counts"]["BE"]["parked"] == 1
    assert sum(now["counts"]["LS"].values()) == 0
    ttft = now["ttft_ms"]["LS"]
    assert 0 < ttft["p50"] <= ttft["p90"] <= ttft["p99"]
    [row] = now["requests"]
    assert (row["class"], row["prompt_tokens"], row["ttft_target_ms"]) == ("BE", 1, 3e5)
    assert 0 < row["ttft_ms"] < row["age_ms"]
    assert row["output_tokens"] > 0
    assert row["name"].startswith(row["id"]), "the id by which it is changed"
    assert 0 < now["kv_blocks_used"] < now["kv_blocks"]
    assert set(now["ring_use"]) == {"LS", "BE"}
    assert now["expert_bytes"] > 0
    assert (now["model"], now["policy"]) == ("tiny", "qllm2")
    runs = [e for message in told for e in message["entries"] if e[0] == "run"]
    assert {run[3] for run in runs} == {"BE"}
    assert all(0 <= run[4] <= run[5] <= now["num_layers"] for run in runs)
    assert sum(run[6] for run in runs) > len(runs)  # small passes are drawn together
    assert told[-1]["output_tokens"]["BE"] > told[1]["output_tokens"]["BE"]
    wait_for(lambda: not whole(served)["requests"])


def preempted(seen: list[dict[str, Any]]) -> list[Any]:
    entries = [entry for message in seen for entry in message["entries"]]
    return [entry for entry in entries if entry[0] == "preempted" and entry[3] == "BE"]


def test_preemptions_are_shown_as_they_happen(served: Serving) -> None:
    ids = list(range(100, 3000))
    seen: list[dict[str, Any]] = []

    def read() -> None:
        with closing(messages(served)) as found:
            for message in found:
                seen.append(message)
                if len(seen) >= 24 and preempted(seen) and "num_preemptions" in message:
                    return

    reader = threading.Thread(target=read)
    reader.start()
    with httpx.Client(base_url=served.url, timeout=60) as client:
        while reader.is_alive():
            flex = {"prompt": ids, "max_tokens": 1, "priority": 1, "request_id": "long"}
            ask = threading.Thread(target=served.post, args=("/v1/completions", flex))
            ask.start()
            for n in range(8):
                short = {"prompt": "a", "max_tokens": 1, "request_id": f"short-{n}"}
                client.post("/v1/completions", json=short)
            ask.join()
    entries = [entry for message in seen for entry in message["entries"]]
    for _, _, latency, _, layer, rows, names, of, name in preempted(seen):
        assert latency > 0
        assert 0 <= layer <= seen[0]["num_layers"]
        assert (rows, of) == (1, "LS")
        assert "long" in names[0]
        assert "short" in name
    held = [entry for entry in entries if entry[0] == "held" and entry[5]]
    assert all(entry[2] >= entry[1] for entry in held)
    first = next(i for i, message in enumerate(seen) if "num_preemptions" in message)
    grown = seen[-1]["num_preemptions"] - seen[first]["num_preemptions"]
    later = [e for message in seen[first + 1 :] for e in message["entries"] if e[0] == "preempted"]
    assert len(later) == grown


def test_a_page_that_comes_back_gets_what_it_has_missed(served: Serving) -> None:
    with httpx.stream("GET", f"{served.url}/ui/events", timeout=60) as other:
        lines = other.iter_lines()
        next(lines)
        first = look(served, 3)
        again = look(served, 1, since=first[1]["id"])
        assert again[0] == first[2]
        numbers = [message["id"] for message in look(served, 3, since=0)]
        assert numbers == sorted(numbers)
        assert numbers[0] <= first[0]["id"]
        ahead = look(served, 1, since=10**9)  # the number of another server
        assert ahead[0]["id"] <= numbers[-1] + 1
    assert served.get("/ui/events", params={"since": "x"}).status_code == 400


def test_a_page_tells_a_server_that_was_started_again(
    served: Serving, engine: QLLMEngine, tmp_path: Path
) -> None:
    """Each engine has a clock of its own: what a page has of another one cannot go on."""
    names = [message["engine"] for message in look(served, 3)]
    with serving(engine, state_dir=tmp_path) as other:
        others = [message["engine"] for message in look(other, 3)]
    assert [len(set(x)) for x in (names, others, names + others)] == [1, 1, 2]


def test_without_a_viewer_nothing_is_asked(
    engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    feeds: list[Feed] = []
    make = Feed.__init__

    def noting(feed: Feed, front: Front) -> None:
        feeds.append(feed)
        make(feed, front)

    monkeypatch.setattr(Feed, "__init__", noting)
    asked: list[int] = []
    watch = engine.watch

    def counting(since: int = 0, whole: bool = True) -> dict[str, Any]:
        asked.append(since)
        return watch(since, whole)

    monkeypatch.setattr(engine, "watch", counting)
    with serving(engine) as served:
        (feed,) = feeds
        with httpx.stream("GET", f"{served.url}/ui/events", timeout=60) as one:
            lines = one.iter_lines()
            next(lines)
            look(served, 6)
            assert feed._task is not None
            assert len(asked) >= 6
        wait_for(lambda: feed._task is None)
        before = len(asked)
        served.post("/v1/completions", {"prompt": "a", "max_tokens": 4})
        assert len(asked) == before


def test_one_look_serves_all_pages(
    served: Serving, engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with httpx.stream("GET", f"{served.url}/ui/events", timeout=60) as one:
        lines = one.iter_lines()
        next(lines)
        by_id: list[dict[int, Any]] = [{}, {}, {}]

        def read(mine: dict[int, Any]) -> None:
            with closing(messages(served)) as found:
                for message in found:
                    mine[message["id"]] = message
                    if len(set.intersection(*map(set, by_id))) >= 3:
                        return

        pages = [threading.Thread(target=read, args=(mine,)) for mine in by_id]
        for page in pages:
            page.start()
        for page in pages:
            page.join()
    common = set.intersection(*map(set, by_id))
    for number in common:
        assert by_id[0][number] == by_id[1][number] == by_id[2][number]


def test_an_engine_that_is_gone_says_why_and_the_page_stays(
    served: Serving, engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(since: int, whole: bool) -> dict[str, Any]:
        raise EngineClosedError("the engine was closed")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "watch", gone)
        wait_for(lambda: "down" in look(served)[0])  # a look may have been under way
        down = look(served, 2)
        assert [message["down"] for message in down] == ["the engine was closed"] * 2
    wait_for(lambda: "counts" in look(served)[0])


def test_no_prompt_and_no_answer_is_shown(served: Serving) -> None:
    body = {"prompt": "a secret sentence", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as stream:
        texts = stream.iter_text()
        next(texts)
        told = look(served, 6)
        texts.close()
    assert any(message.get("requests") for message in told)
    shown = json.dumps(told)
    assert "secret" not in shown
    assert not {"text", "prompt", "token_ids", "content"} & set(_keys(told))


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _keys(inner)


def test_pages_are_counted(engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qllm.server.page.ui.MAX_READERS", 1)

    def is_free() -> bool:
        with httpx.stream("GET", f"{served.url}/ui/events", timeout=60) as stream:
            return stream.status_code == 200

    with serving(engine) as served:
        with httpx.stream("GET", f"{served.url}/ui/events", timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            second = served.get("/ui/events")
            assert (second.status_code, second.headers["retry-after"]) == (429, "5")
        wait_for(is_free)


def test_an_open_page_does_not_hold_the_drain(engine: QLLMEngine) -> None:
    with (
        serving(engine) as served,
        httpx.stream("GET", f"{served.url}/ui/events", timeout=60) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        served.server.should_exit = True
        for _ in lines:
            pass
