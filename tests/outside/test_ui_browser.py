"""The live page in a real browser: it moves, fits, can be read and reached by everybody."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qllm.errors import EngineClosedError
from qllm.llm import QLLMEngine
from tests.support.browsing import axe_source, browser_path, loaded
from tests.support.serving import Serving, serving, tiny_engine
from tests.support.waiting import wait_for

BROWSER, AXE = browser_path(), axe_source()
WHY = "scripts/browser (of `make test-outside`) found no browser, or no axe-core, on npm"
pytestmark = pytest.mark.skipif(BROWSER is None or AXE is None, reason=WHY)
PATIENCE_MS = 60_000
SIZES = {"desktop": (1400, 1000), "phone": (390, 844)}
STILL = """() => { const c = document.getElementById("timeline");
  const { data } = c.getContext("2d").getImageData(0, 0, c.width, c.height);
  const picture = new Uint32Array(data.buffer);
  let sum = 7;
  for (let i = 0; i < picture.length; i += 1) sum = (sum * 31 + picture[i] + i) % 1000000007;
  return sum; }"""
"""A number that changes with the picture of the timeline."""
OUTSIDE = """() => [...document.body.querySelectorAll("*")].filter((e) => {
    const box = e.getBoundingClientRect();
    const isOut = box.right > innerWidth + 1 || box.left < -1;
    return box.width && isOut && !e.closest(".scroll, .skip");
  }).map((e) => e.outerHTML.slice(0, 80))"""
COVERED = """() => [...document.querySelectorAll("button, input, select, dfn")].filter((e) => {
    if (!e.offsetWidth || e.closest(".scroll, #tip, details")) return false;
    e.scrollIntoView({ block: "center" });
    const box = e.getBoundingClientRect();
    const top = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
    return !e.contains(top);
  }).map((e) => e.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def served(
    shared_engine: QLLMEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    with serving(shared_engine, state_dir=tmp_path_factory.mktemp("state")) as serving_:
        yield serving_


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page that is open, and what went wrong in it."""

    def __init__(self, chromium: Any, url: str, size: str, scheme: str, **more: Any) -> None:
        width, height = SIZES[size]
        view = {"width": width, "height": height}
        how = {"viewport": view, "color_scheme": scheme, "locale": "en-US"}  # not the machine's
        before = more.pop("before", None)
        self.context = chromium.new_context(**{**how, **more})
        if before is not None:
            self.context.add_init_script(before)
        self.context.set_default_timeout(PATIENCE_MS)
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.wrong: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", self._said)
        self.page.goto(f"{url}/ui")

    def _said(self, message: Any) -> None:
        if message.type == "error":
            self.wrong.append(message.text)

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def serious(self) -> list[str]:
        """What axe-core finds that is serious or critical."""
        self.page.evaluate(AXE)
        found = self.page.evaluate("axe.run({ resultTypes: ['violations'] })")
        assert len(found["passes"]) > 15, "axe-core looked at nothing"
        return [
            f"{x['id']}: {[node['html'][:120] for node in x['nodes']]}"
            for x in found["violations"]
            if x["impact"] in ("serious", "critical")
        ]


def live(page: Any) -> None:
    from playwright.sync_api import expect

    expect(page.locator("#state")).to_have_text("live")


def moves(page: Any) -> bool:
    """Whether the timeline shows something else after a while."""
    before = page.evaluate(STILL)
    page.wait_for_timeout(1200)
    return bool(page.evaluate(STILL) != before)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_moves_fits_and_can_be_read(
    served: Serving, chromium: Any, size: str, scheme: str
) -> None:
    with (
        loaded(served.url, be=1, longest=1500),
        Opened(chromium, served.url, size, scheme) as opened,
    ):
        page = opened.page
        live(page)
        page.wait_for_selector("#preemptions button")
        page.wait_for_selector("#requests td.name")
        page.wait_for_selector("#timeline-empty", state="hidden")
        for _ in range(3):
            page.wait_for_function(f"(before) => ({STILL})() !== before", arg=page.evaluate(STILL))
        page.click("#hold")
        wait_for(lambda: not moves(page))  # once the passes that ran then have ended
        page.click("#hold")
        wait_for(lambda: moves(page))
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(OUTSIDE) == []
        assert page.evaluate(COVERED) == []
        assert opened.serious() == []
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        level = sum(int(part) for part in background[4:-1].split(","))
        assert (level > 384) == (scheme == "light")
        assert opened.wrong == []
        assert {url.split("/")[2] for url in opened.asked} == {served.url.split("/")[2]}


def test_an_empty_page_says_what_to_do(chromium: Any) -> None:
    with tiny_engine() as engine, serving(engine) as served:
        for size in SIZES:
            with Opened(chromium, served.url, size, "light") as opened:
                live(opened.page)
                opened.page.wait_for_selector("#model b")
                assert opened.page.is_visible("#timeline-empty")
                assert "No open requests" in opened.page.inner_text("#requests")
                opened.page.wait_for_selector("#batches :text('--state-dir')")
                assert opened.page.evaluate(OUTSIDE) == []
                assert opened.serious() == []


def test_numbers_are_those_of_the_engine(
    served: Serving, chromium: Any, engine: QLLMEngine
) -> None:
    served.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
    body = {"prompt": "x" * 30, "max_tokens": 4000, "ignore_eos": True, "stream": True,
            "priority": 1, "request_id": "the-long-one", "slo": {"ttft_ms": 90_000}}  # fmt: skip
    import httpx

    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as stream:
        texts = stream.iter_text()
        next(texts)
        with Opened(chromium, served.url, "desktop", "light") as opened:
            page = opened.page
            row = page.locator("#requests tr", has_text="the-long-one")
            row.wait_for(timeout=60_000)
            cells = row.locator("td")
            assert cells.nth(1).inner_text() == "BE"
            assert cells.nth(2).inner_text() in ("running", "parked")
            assert cells.nth(5).inner_text() == "1 min 30 s met"
            assert int(cells.nth(7).inner_text()) > 0
            wait_for(lambda: float(page.inner_text("#rate-BE")) > 0)
            assert "1 running" in page.inner_text("#count-BE")
            assert "p99" in page.inner_text("#ttft-LS-more")
            wait_for(lambda: "passes of 0 LS and of" in page.inner_text("#timeline-now"))
            assert opened.wrong == []
        texts.close()


def test_the_keyboard_reaches_words_and_preemptions(served: Serving, chromium: Any) -> None:
    with (
        loaded(served.url, be=1, longest=1500),
        Opened(chromium, served.url, "desktop", "light") as opened,
    ):
        page = opened.page
        live(page)
        page.wait_for_selector("#preemptions button")
        seen: set[str] = set()
        where = "document.activeElement.id || document.activeElement.className"
        is_there = "document.getElementById('preemptions').contains(document.activeElement)"
        while not page.evaluate(is_there) and len(seen) < 60:
            page.keyboard.press("Tab")
            seen.add(page.evaluate(where))
        assert {"key", "theme", "hold", "skip"} <= seen
        page.keyboard.press("Enter")
        assert page.get_attribute("#hold", "aria-pressed") == "true"
        assert page.get_attribute('[data-span="1000"]', "aria-pressed") == "true"
        wait_for(lambda: not moves(page))
        assert page.is_hidden("#tip")
        page.focus('#timeline-section dfn[data-word="park"]')
        assert "same bits" in page.inner_text("#tip")
        assert page.get_attribute('dfn[data-word="park"]', "aria-describedby") == "tip"
        page.keyboard.press("Escape")
        assert page.is_hidden("#tip")
        page.hover('#timeline-section dfn[data-word="be"]')
        assert "best-effort" in page.inner_text("#tip")
        assert opened.wrong == []


def test_the_switch_of_the_theme_is_kept(served: Serving, chromium: Any) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with Opened(chromium, served.url, "desktop", "light") as opened:
        page = opened.page
        live(page)
        light = page.evaluate(ground)
        page.click("#theme")
        assert (page.inner_text("#theme"), page.evaluate(ground)) == ("Theme: light", light)
        page.click("#theme")
        dark = page.evaluate(ground)
        assert (page.inner_text("#theme"), dark != light) == ("Theme: dark", True)
        page.reload()
        assert (page.inner_text("#theme"), page.evaluate(ground)) == ("Theme: dark", dark)
        page.click("#theme")
        assert (page.inner_text("#theme"), page.evaluate(ground)) == ("Theme: automatic", light)
        page.emulate_media(color_scheme="dark")
        assert page.evaluate(ground) == dark


def test_a_stopped_engine_is_said_and_comes_back(
    served: Serving, chromium: Any, engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(since: int, whole: bool) -> dict[str, Any]:
        raise EngineClosedError("the engine process was killed")

    with Opened(chromium, served.url, "phone", "dark") as opened:
        page = opened.page
        live(page)
        assert page.is_hidden("#banner")
        with monkeypatch.context() as patch:
            patch.setattr(engine, "watch", gone)
            page.wait_for_selector("#banner", state="visible")
            assert "The engine process was killed." in page.inner_text("#banner")
            assert page.inner_text("#state") == "stopped"
            assert opened.serious() == []
            assert page.evaluate(OUTSIDE) == []
        live(page)
        assert page.is_hidden("#banner")
        assert opened.wrong == []


def test_a_key_is_asked_for(engine: QLLMEngine, chromium: Any) -> None:
    with (
        serving(engine, api_keys="sesame") as served,
        Opened(chromium, served.url, "desktop", "light") as opened,
    ):
        page = opened.page
        page.wait_for_selector("#banner", state="visible")
        assert "API key" in page.inner_text("#banner")
        assert page.inner_text("#state") == "needs a key"
        page.fill("#key", "sesame")
        page.keyboard.press("Enter")
        live(page)
        assert page.is_hidden("#banner")


def test_a_hidden_page_asks_for_nothing(
    served: Serving, chromium: Any, engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    watch = engine.watch

    def counting(since: int, whole: bool) -> dict[str, Any]:
        asked.append(since)
        return watch(since, whole)

    monkeypatch.setattr(engine, "watch", counting)
    hide = """(hidden) => {
      Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange")); }"""
    with Opened(chromium, served.url, "desktop", "light") as opened:
        live(opened.page)
        opened.page.evaluate(hide, True)

        def is_still() -> bool:
            before = len(asked)
            threading.Event().wait(1.5)
            return len(asked) == before

        wait_for(is_still)
        before = len(asked)
        opened.page.evaluate(hide, False)
        wait_for(lambda: len(asked) > before)
        assert opened.wrong == []


@pytest.mark.parametrize("language", [None, "en-US@posix", "C", "", "de-DE"])
def test_the_page_lives_in_any_locale(served: Serving, chromium: Any, language: str | None) -> None:
    """None is the machine's own, which on servers is often no language tag."""
    before = None
    if language is not None:
        getter = f"{{ get: () => {language!r}, configurable: true }}"
        before = f"Object.defineProperty(Navigator.prototype, 'language', {getter});"
    with Opened(chromium, served.url, "desktop", "light", locale=None, before=before) as opened:
        live(opened.page)
        assert opened.page.locator("#chart-rate canvas").count() == 1
        assert opened.page.is_hidden("#failed")
        assert opened.wrong == []


@pytest.mark.parametrize("part", ["uPlot.min.js", "marked.esm.js"])
def test_a_part_that_fails_is_said(served: Serving, chromium: Any, part: str) -> None:
    context = chromium.new_context()
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.route(f"**/{part}", lambda route: route.fulfill(status=404, body="gone"))
    page.goto(f"{served.url}/ui")
    page.wait_for_selector("#failed", state="visible")
    assert "failed" in page.inner_text("#failed")
    if part.startswith("uPlot"):
        live(page)  # without charts
        assert "No chart" in page.inner_text("#chart-rate")
        page.fill("#text", "hi")
        page.click("#send")
        page.wait_for_selector("#talk .note")
    context.close()


EVIL = """<script>window.evil = 1</script> <img src=x onerror="window.evil = 2">
[a](javascript:window.evil=3) [b](JaVaScRiPt:window.evil=4) 
[c](data:text/html,<script>window.evil=5</script>)
<b>bold</b> &lt;i&gt; ![d](https://example.invalid/track.png) <svg onload="window.evil=6">
<a href="javascript:window.evil=7">x</a>

<iframe srcdoc="<script>parent.evil = 8</script>"></iframe>

<style>body { display: none }</style>

| <img src=x onerror="window.evil=9"> | b |
|---|---|
| `<b>` | **fat** |

```html
<script>window.evil = 10</script>
```

1. one
2. *two* and [site](https://example.invalid/) and ~~gone~~

> quoted
"""


def test_markdown_of_an_answer_is_shown_and_never_run(served: Serving, chromium: Any) -> None:
    show = """async (text) => {
      const { show } = await import("/ui/static/markdown.js");
      const box = document.createElement("div");
      box.className = "assistant";
      document.getElementById("talk").append(box);
      for (let i = 1; i <= text.length; i += 1) show(box, text.slice(0, i)); // as it comes
      show(box, ">".repeat(20000) + "x");
      show(box, text);
      for (const link of box.querySelectorAll("a")) link.removeAttribute("target");
      const names = (e) => [...e.attributes].map((a) => a.name);
      return [...box.querySelectorAll("*")].map((e) => [e.localName, names(e)]); }"""
    with Opened(chromium, served.url, "desktop", "light") as opened:
        page = opened.page
        live(page)
        made = page.evaluate(show, EVIL)
        names = {name for name, _ in made}
        assert {
            "code",
            "pre",
            "strong",
            "em",
            "del",
            "ol",
            "li",
            "blockquote",
            "table",
            "a",
        } <= names
        assert not names & {
            "script",
            "img",
            "iframe",
            "svg",
            "style",
            "b",
            "object",
            "form",
            "input",
        }
        attributes = {x for _, found in made for x in found}
        assert attributes <= {"href", "rel", "tabindex", "start"}
        links = page.eval_on_selector_all("#talk a", "(all) => all.map((a) => a.protocol)")
        assert set(links) == {"https:"}
        shown = page.inner_text("#talk .assistant")
        for text in ("<script>window.evil = 1</script>", "<b>bold</b>", "window.evil = 10"):
            assert text in shown
        page.wait_for_timeout(200)
        assert page.evaluate("window.evil") is None
        assert [url for url in opened.asked if "example.invalid" in url] == []
        assert opened.serious() == []
        assert opened.wrong == []


def test_a_request_is_paused_and_changes_its_class(served: Serving, chromium: Any) -> None:
    from playwright.sync_api import expect

    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True,
            "priority": 1, "request_id": "changed"}  # fmt: skip
    import httpx

    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as stream:
        texts = stream.iter_text()
        next(texts)
        paused = httpx.patch(f"{served.url}/v1/requests/changed", json={"paused": True})
        assert paused.status_code == 200, paused.text  # it would end while the page is loaded
        with Opened(chromium, served.url, "desktop", "light") as opened:
            page = opened.page
            row = page.locator("#requests tr", has_text="changed")
            expect(row.locator("td").nth(2)).to_have_text("paused")
            row.locator("button", has_text="go on").click()
            row.locator("button", has_text="pause").click()
            expect(row.locator("td").nth(2)).to_have_text("paused")
            row.locator("button", has_text="to LS").click()
            expect(row.locator("td").nth(1)).to_have_text("LS")
            row.locator("button", has_text="to BE").click()
            expect(row.locator("td").nth(1)).to_have_text("BE")
            assert page.inner_text("#requests-state") == ""
            assert opened.serious() == []
            assert opened.wrong == []
        texts.close()


def test_tables_fit_a_small_desk_and_chat_comes_first(served: Serving, chromium: Any) -> None:
    view = {"width": 1280, "height": 900}
    with (
        loaded(served.url, be=1, longest=1500),
        Opened(chromium, served.url, "desktop", "light", viewport=view) as opened,
    ):
        page = opened.page
        live(page)
        page.wait_for_selector("#preemptions button")
        page.wait_for_selector("#requests td.name")
        wide = "(all) => all.map((e) => e.scrollWidth - e.clientWidth)"
        assert max(page.eval_on_selector_all(".scroll", wide)) <= 0
        first = page.get_attribute("main > section", "aria-labelledby")
        assert first == "chat-title"
        bottom = page.evaluate("document.getElementById('ask').getBoundingClientRect().bottom")
        assert bottom < view["height"]


def test_what_the_options_of_the_chat_say_is_asked(served: Serving, chromium: Any) -> None:
    from playwright.sync_api import expect

    with Opened(chromium, served.url, "phone", "light") as opened:
        page = opened.page
        live(page)
        asked: list[dict[str, Any]] = []

        def note(request: Any) -> None:
            if "chat/completions" in request.url:
                asked.append(json.loads(request.post_data))

        page.on("request", note)
        page.click(".options summary")
        page.fill("#system", "Be brief.")
        page.fill("#temperature", "0")
        page.fill("#text", "Hello")
        page.click("#send")
        expect(page.locator("#talk .note")).to_contain_text("tokens/s")
        assert asked[0]["temperature"] == 0
        assert [x["role"] for x in asked[0]["messages"]] == ["system", "user"]
        page.click("#clear")
        assert page.locator("#talk .user").count() == 0
        page.fill("#text", "Again")
        page.click("#send")
        expect(page.locator("#talk .note")).to_be_visible()
        assert [x["content"] for x in asked[1]["messages"]] == ["Be brief.", "Again"]
        assert opened.wrong == []


def test_a_chat_and_a_batch(served: Serving, chromium: Any, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    def line(n: int, body: dict[str, Any]) -> str:
        what = {"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": body}
        return json.dumps(what)

    good = tmp_path / "in.jsonl"
    good.write_text("\n".join(line(n, {"prompt": "def", "max_tokens": 3}) for n in range(3)))
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    with Opened(chromium, served.url, "desktop", "light") as opened:
        page = opened.page
        live(page)
        expect(page.locator("#model")).to_contain_text("tiny")
        page.fill("#text", "What does json.dumps do?")
        page.click("#send")
        note = page.locator("#talk .note")
        expect(note).to_contain_text("LS, first text after")
        expect(page.locator("#talk .assistant")).not_to_be_empty()
        expect(page.locator("#ttft-LS")).not_to_have_text("–")
        page.set_input_files("#file", good)
        page.click("#upload button")
        batch = page.locator("#batches tr").first
        expect(batch).to_contain_text("completed")
        expect(batch.locator("td").nth(2)).to_have_text("3 of 3")
        with page.expect_download() as download:
            batch.locator("button", has_text="output").click()
        answers = Path(download.value.path()).read_text().splitlines()
        assert [json.loads(text)["custom_id"] for text in answers] == ["0", "1", "2"]
        page.set_input_files("#file", bad)
        page.click("#upload button")
        expect(batch).to_contain_text("failed")
        expect(batch).to_contain_text("line 1")
        assert opened.serious() == []
        assert opened.wrong == []
