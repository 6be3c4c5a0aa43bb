"""The live page in a real browser: it moves, fits, can be read and reached by everybody."""

import threading
from typing import Any

import pytest

from qllm.errors import EngineClosedError
from qllm.llm import QLLMEngine
from tests.support.browsing import NO_BROWSER, SIZES, Opened, has_browser, live, loaded
from tests.support.serving import Serving, serving, tiny_engine
from tests.support.waiting import wait_for

pytestmark = pytest.mark.skipif(not has_browser(), reason=NO_BROWSER)
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


def moves(page: Any) -> bool:
    """Whether the timeline shows something else after a while."""
    before = page.evaluate(STILL)
    page.wait_for_timeout(1200)
    return bool(page.evaluate(STILL) != before)


def test_the_page_shows_drafts_of_an_engine_that_drafts(chromium: Any) -> None:
    with (
        tiny_engine(draft="auto", conformance=False) as engine,
        serving(engine) as drafting,
        Opened(chromium, drafting.url, "desktop", "light") as opened,
    ):
        live(opened.page)
        body = {"prompt": "a a a a a a a a", "max_tokens": 60, "temperature": 0, "priority": 1}
        assert drafting.post("/v1/completions", body).status_code == 200
        opened.page.wait_for_function(
            r"""() => /drafted tokens \(auto\): LS 0; BE \d+, \d+ % accepted/.test(
                document.getElementById("engine-more").textContent)"""
        )


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
