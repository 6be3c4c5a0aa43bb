"""Renew the pictures of the live page in docs/images: light and dark, desktop and phone.

    .venv/bin/python scripts/pictures.py

A small model is served under load, `talk` if it is installed; the pictures show its work.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from playwright.sync_api import sync_playwright  # noqa: E402

from qllm import QLLMEngine  # noqa: E402
from qllm.errors import EngineClosedError  # noqa: E402
from qllm.models.folders import best_local  # noqa: E402
from tests.support.browsing import browser_path, loaded  # noqa: E402 - of the tests
from tests.support.serving import serving  # noqa: E402

IMAGES = ROOT / "docs" / "images"
SIZES = {"": (1400, 1000), "-phone": (390, 844)}
BODY = {"prompt": "def", "max_tokens": 3}
LINES = [
    json.dumps({"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": BODY})
    for n in range(40)
]


def watch(browser: Any, url: str, size: str, scheme: str, seconds: float) -> Any:
    """Open the page for some seconds, and return it."""
    width, height = SIZES[size]
    view = {"width": width, "height": height}
    page = browser.new_page(
        viewport=view, color_scheme=scheme, device_scale_factor=1, locale="en-US"
    )
    page.goto(f"{url}/ui")
    page.wait_for_timeout(1000 * seconds)
    return page


def use(page: Any) -> None:
    """Chat, and run a batch."""
    page.fill("#text", "What does json.dumps do?")
    page.click("#send")
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("\n".join(LINES))
        file.flush()
        page.set_input_files("#file", file.name)
        page.click("#upload button")
        page.wait_for_timeout(3000)


def main() -> None:
    """Take the pictures."""
    folder, model = tempfile.mkdtemp(), best_local()
    with (
        QLLMEngine.from_pretrained(model, threads=1) as engine,
        serving(engine, model=model, state_dir=folder) as served,
        sync_playwright() as play,
    ):
        browser = play.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        with loaded(served.url):
            for scheme in ("light", "dark"):
                name = "ui" if scheme == "light" else "ui-dark"
                page = watch(browser, served.url, "", scheme, 5)
                use(page)
                page.wait_for_timeout(25_000)
                page.screenshot(path=IMAGES / f"{name}.png", full_page=True)
                page.close()
                page = watch(browser, served.url, "-phone", scheme, 8)
                page.screenshot(path=IMAGES / f"{name}-phone.png")
                page.close()
            page = watch(browser, served.url, "", "light", 12)

            def gone(since: int, whole: bool) -> dict[str, Any]:
                raise EngineClosedError("the engine process (pid 4321) was killed by SIGKILL")

            engine.watch = gone  # type: ignore[method-assign]
            page.wait_for_selector("#banner", state="visible")
            page.screenshot(path=IMAGES / "ui-stopped.png")
        browser.close()


if __name__ == "__main__":
    main()
