"""A headless browser for the tests of the live page, and a load that preempts."""

import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

FOLDER = Path(__file__).resolve().parents[2] / ".venv" / "browser"
"""What scripts/browser fills."""


def browser_path() -> str | None:
    """A Chromium of the machine, or the one of npm; None if there is none."""
    ours = FOLDER / "chromium"
    found = shutil.which("chromium") or shutil.which("google-chrome")
    return found or (str(ours) if ours.exists() else None)


def axe_source() -> str | None:
    """The script of axe-core; None if it is not installed."""
    path = FOLDER / "node_modules" / "axe-core" / "axe.min.js"
    return path.read_text() if path.exists() else None


NO_BROWSER = "scripts/browser (of `make test-outside`) found no browser, or no axe-core, on npm"


def has_browser() -> bool:
    """Whether the page can be opened, and looked at with axe-core."""
    return browser_path() is not None and axe_source() is not None


@contextmanager
def loaded(url: str, rate: float = 6.0, be: int = 2, longest: int = 2900) -> Iterator[None]:
    """Long BE prompts and LS requests at a rate, while the context is open."""
    over = threading.Event()

    def ask(rng: random.Random, name: str, num_tokens: int, max_tokens: int, **more: Any) -> None:
        prompt = [rng.randrange(10, 500) for _ in range(num_tokens)]
        named = {"prompt": prompt, "request_id": f"{name}-{rng.randrange(1000)}", **more}
        body = {"max_tokens": max_tokens, "ignore_eos": True, **named}
        httpx.post(f"{url}/v1/completions", json=body, timeout=120)

    def work(seed: int, is_ls: bool) -> None:
        rng = random.Random(seed)
        while not over.is_set():
            if is_ls:
                ask(rng, "chat", rng.randrange(5, 60), rng.randrange(3, 12), slo={"ttft_ms": 250})
                over.wait(rng.expovariate(rate / 3))
            else:
                long = rng.randrange(longest // 3, longest)
                ask(rng, "summary", long, rng.randrange(10, 60), priority=1)

    kinds = [(n, n < 3) for n in range(3 + be)]
    threads = [threading.Thread(target=work, args=kind) for kind in kinds]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


AXE = axe_source()
PATIENCE_MS = 60_000
SIZES = {"desktop": (1400, 1000), "phone": (390, 844)}


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
