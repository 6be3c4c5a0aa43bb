"""The live page in a real browser: its chat, its buttons, and what it does where a part fails."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.browsing import NO_BROWSER, PATIENCE_MS, Opened, has_browser, live
from tests.support.serving import Serving

pytestmark = pytest.mark.skipif(not has_browser(), reason=NO_BROWSER)


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
