"""Many requests in one call, which waits for them: `generate` and `chat`, as in vLLM."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qllm.errors import InvalidRequestError, shown
from qllm.frontend.checks import is_int
from qllm.frontend.handle import Handle, Result
from qllm.frontend.prompts import render_chat
from qllm.types import NUM_SEEDS, Message, Priority, Prompt, SamplingParams


def run_all(
    submit: Callable[..., Handle],
    asked: Sequence[tuple[Prompt, SamplingParams]],
    max_waiting: int,
    progress: bool,
) -> list[Result]:
    """Submit requests and wait for all. If a request fails, cancel the other requests.

    Args:
        submit: `QLLMEngine.submit` with all arguments except the prompt and its sampling.
        asked: Prompts with their sampling.
        max_waiting: Number of requests that may be open at once.
        progress: True to show a progress bar.
    """
    from rich.progress import track

    handles: list[Handle] = []
    results: list[Result] = []
    try:
        for done in track(
            range(len(asked)), description="requests", transient=True, disable=not progress
        ):
            while len(handles) < len(asked) and len(handles) - done < max_waiting:
                prompt, sampling = asked[len(handles)]
                handles.append(submit(prompt, sampling=sampling))
            results.append(handles[done].result())
    finally:  # a request was refused or failed, so results of the other requests cannot be returned
        for handle in handles[len(results) :]:
            handle.cancel()
    return results


def render_chats(
    messages: Sequence[Message] | Iterable[Sequence[Message]],
    tokenizer: Any,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    **template: Any,
) -> list[list[int]]:
    """Render one conversation or several to token ids, with keywords of `render_chat`.

    Raises:
        InvalidRequestError: A conversation is not a list of messages, or the template refuses the
            conversation.
    """
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "continue_final_message=True and add_generation_prompt=True exclude each other; "
            "pass add_generation_prompt=False"
        )
    chats = _prompts_of(messages)
    wrong = next((chat for chat in chats if not _is_chat(chat)), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"messages={shown(wrong):.80} must be a list of messages with role and content; "
            "text goes to generate"
        )
    return [
        render_chat(
            chat,
            tokenizer,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **template,
        )
        for chat in chats
    ]


def class_and_sampling(
    priority: str | int | Priority | SamplingParams, sampling: SamplingParams | None, usual: str
) -> tuple[str | int | Priority, SamplingParams | None]:
    """Return class and sampling. As in vLLM, the class argument may be SamplingParams."""
    if not isinstance(priority, SamplingParams):
        return priority, sampling
    if sampling is not None:
        raise InvalidRequestError(
            "SamplingParams are given twice, in the place of priority and as sampling=; leave one "
            "out"
        )
    return usual, priority


def _prompts_of(prompts: Any) -> list[Any]:
    """Return a list of prompts. A single prompt becomes a list of one prompt."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        return [prompts]
    if isinstance(prompts, Mapping):
        raise InvalidRequestError(
            f"prompt={shown(prompts):.80} is one message; put it into a list of messages"
        )
    several = list(prompts)
    is_one = bool(several) and (isinstance(several[0], Mapping) or is_int(several[0]))
    return [several] if is_one else several


def each_answer(
    prompts: Prompt | Iterable[Prompt], sampling: SamplingParams
) -> list[tuple[Prompt, SamplingParams]]:
    """Return each prompt `n` times, each time with another seed."""
    seeds = (
        None if sampling.seed is None else (sampling.seed + i) % NUM_SEEDS
        for i in range(sampling.n)
    )
    answers = [replace(sampling, n=1, seed=seed) for seed in seeds]
    return [(prompt, answer) for prompt in _prompts_of(prompts) for answer in answers]


def _is_chat(prompt: Any) -> bool:
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes)
    return is_list and bool(prompt) and isinstance(prompt[0], Mapping)
