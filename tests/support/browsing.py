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
