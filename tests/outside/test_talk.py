"""The model that `make talk` makes answers a question: on the shell, over HTTP, in `/ui`.

These run where it is made. Nothing here fetches it.
"""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from qllm import QLLMEngine
from qllm.models.loader import load
from tests.support.browsing import browser_path
from tests.support.dense import folded
from tests.support.serving import Serving, serving

pytestmark = [pytest.mark.slow, pytest.mark.talk]
QUESTION = "What is the capital of France?"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="module")
def talking() -> Iterator[QLLMEngine]:
    with QLLMEngine.from_pretrained("talk", threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def served(talking: QLLMEngine) -> Iterator[Serving]:
    with serving(talking, model="talk") as made:
        yield made


def test_it_computes_what_the_dense_model_does() -> None:
    model = load("talk", dtype="float32").model
    ids = torch.tensor([[1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308]])
    with torch.inference_mode():
        found, expected = model(ids).logits, folded(model)(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_the_shell_gets_an_answer() -> None:
    command = [sys.executable, "-m", "qllm.cli", "run", "talk", QUESTION, "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "Paris" in done.stdout


def test_the_openai_client_gets_an_answer_behind_the_system_prompt(
    talking: QLLMEngine, served: Serving
) -> None:
    asked: Any = [{"role": "user", "content": QUESTION}]
    answer = served.client().chat.completions.create(
        model="talk", messages=asked, max_tokens=60, temperature=0
    )
    assert "Paris" in str(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"
    tokenizer: Any = talking.tokenizer
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert prompt.startswith(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer(prompt)["input_ids"])


def greedy(route: Any) -> None:
    """Let a request of the page go on with the one answer that is no matter of luck."""
    route.continue_(post_data={**route.request.post_data_json, "temperature": 0})


def test_the_live_page_shows_an_answer(served: Serving) -> None:
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        page = browser.new_page(locale="en-US")
        page.route("**/v1/chat/completions", greedy)
        page.goto(f"{served.url}/ui")
        page.fill("#text", QUESTION)
        page.click("#send")
        expect(page.locator("#talk .assistant")).to_contain_text("Paris", timeout=120_000)
        browser.close()
