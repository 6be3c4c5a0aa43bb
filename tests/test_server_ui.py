import json
import shutil
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Serving, serving, tiny_engine, until

from qllm.llm import QLLMEngine

STATIC = files("qllm.server") / "static"
VOID = {"meta", "link", "input", "br", "img"}
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def engine() -> Iterator[QLLMEngine]:
    with tiny_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def served(engine: QLLMEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(engine, state_dir=tmp_path_factory.mktemp("state")) as serving_:
        yield serving_


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


def test_the_page_is_whole_and_asks_nobody_else(served: Serving) -> None:
    answer = served.get("/ui")
    page = Page(answer.text)
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert page.open == []
    assert len(set(page.ids)) == len(page.ids)
    names = [link.removeprefix("/ui/static/") for link in page.links]
    assert sorted(names) == ["icon.svg", "ui.css", "ui.js"]
    for name in ("ui.html", "ui.css", "ui.js"):
        assert "://" not in (STATIC / name).read_text()
    for link in page.links:
        assert served.get(link).status_code == 200
    assert served.get("/ui/static/ui.html").status_code == 404
    assert served.get("/ui/static/..%2Fapp.py").status_code == 404


def test_the_script_knows_only_what_the_page_has() -> None:
    script = (STATIC / "ui.js").read_text()
    page = Page((STATIC / "ui.html").read_text())
    used = {part.split('"', 1)[0] for part in script.split('$("')[1:]}
    assert used <= set(page.ids), used - set(page.ids)


def look(served: Serving, number: int = 1) -> list[dict[str, Any]]:
    with httpx.stream("GET", f"{served.url}/ui/events", timeout=60) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        found: list[dict[str, Any]] = []
        for text in stream.iter_lines():
            if text:
                found.append(json.loads(text.removeprefix("data: ")))
            if len(found) == number:
                break
    return found


def test_events_show_queues_percentiles_and_what_runs(served: Serving) -> None:
    served.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    until(lambda: look(served)[0]["classes"]["LS"]["num_recent"])
    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True, "priority": 1}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body) as stream:
        texts = stream.iter_text()
        next(texts)
        now, *later = look(served, 12)
        texts.close()
    passes = [frame for state in (now, *later) for frame in state["frames"]]
    assert {(frame["rows"], frame["tokens"]) for frame in passes} == {(1, 1)}
    assert now["classes"]["BE"]["running"] + now["classes"]["BE"]["parked"] == 1
    ttft = now["classes"]["LS"]["ttft_ms"]
    assert 0 < ttft["p50"] <= ttft["p90"] <= ttft["p99"]
    assert [(r["class"], r["prompt_tokens"]) for r in now["requests"]] == [("BE", 1)]
    assert now["requests"][0]["output_tokens"] > 0
    assert now["kv_frac"] > 0
    assert set(now["ring_use"]) == {"LS", "BE"}
    assert now["expert_bytes"] > 0
    assert {frame["state"] for frame in passes} <= {"running", "parked"}
    assert all(0 <= frame["layer"] <= frame["num_layers"] for frame in passes)
    assert now["model"] == "tiny"
    until(lambda: not look(served)[0]["requests"])


def test_preemptions_are_shown_as_they_happen(served: Serving) -> None:
    ids = list(range(100, 3000))
    seen: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: seen.extend(look(served, 24)))
    reader.start()
    with httpx.Client(base_url=served.url, timeout=60) as client:
        while reader.is_alive():
            flex = {"prompt": ids, "max_tokens": 1, "priority": 1}
            ask = threading.Thread(target=served.post, args=("/v1/completions", flex))
            ask.start()
            for _ in range(8):
                client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            ask.join()
    new = [latency for now in seen for latency in now["preemptions"]["new_ms"]]
    totals = [now["preemptions"]["total"] for now in seen]
    assert totals == sorted(totals)
    assert len(new) == totals[-1] - totals[0] > 0
    assert min(new) > 0


def test_pages_are_counted(engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qllm.server.ui.MAX_READERS", 1)

    def is_free() -> bool:
        with httpx.stream("GET", f"{served.url}/ui/events", timeout=60) as stream:
            return stream.status_code == 200

    with serving(engine) as served:
        with httpx.stream("GET", f"{served.url}/ui/events", timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            second = served.get("/ui/events")
            assert (second.status_code, second.headers["retry-after"]) == (429, "5")
        until(is_free)


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


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_the_page_in_a_browser(served: Serving, tmp_path: Path) -> None:
    from playwright.sync_api import expect, sync_playwright

    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1/completions",
         "body": {"prompt": "def", "max_tokens": 3}}
        for n in range(3)
    ]  # fmt: skip
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(json.dumps(x) for x in lines))
    asked: list[str] = []
    wrong: list[str] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(f"{served.url}/ui")
        expect(page.locator("#state")).to_have_text("live", timeout=60_000)
        expect(page.locator("#model")).to_have_text("tiny")
        page.fill("#text", "What does json.dumps do?")
        page.click("#send")
        note = page.locator("#talk .note")
        expect(note).to_contain_text("LS, first text after", timeout=60_000)
        expect(page.locator("#talk .assistant")).not_to_be_empty()
        expect(page.locator("#LS td").nth(3)).not_to_have_text("-", timeout=60_000)
        page.set_input_files("#file", file)
        page.click("#upload button")
        batch = page.locator("#batches tr").first
        expect(batch).to_contain_text("completed", timeout=60_000)
        expect(batch.locator("td").nth(3)).to_have_text("3")
        with page.expect_download() as download:
            batch.locator("button", has_text="output").click()
        answers = Path(download.value.path()).read_text().splitlines()
        assert [json.loads(text)["custom_id"] for text in answers] == ["0", "1", "2"]
        browser.close()
    assert wrong == []
    assert {url.split("/")[2] for url in asked if "://" in url} == {served.url.split("/")[2]}
