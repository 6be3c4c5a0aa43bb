"""Many requests in one call that waits for them: `generate` and `chat`, as vLLM has them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qllm.config import EngineConfig
from qllm.errors import InvalidRequestError, shown
from qllm.frontend.checks import is_int
from qllm.frontend.handle import Handle, Result
from qllm.frontend.prompts import SAMPLING_OPTIONS, asked_sampling, render_chat
from qllm.types import NUM_SEEDS, Message, Priority, Prompt, SamplingParams


class Offline:
    """What an engine can do for a caller who waits for all answers."""

    config: EngineConfig
    tokenizer: Any
    sampling_defaults: dict[str, Any]

    def submit(self, prompt: Prompt, priority: Any, max_tokens: Any, **kwargs: Any) -> Handle:
        """Hand over one request."""
        raise NotImplementedError

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        priority: str | int | Priority | SamplingParams = "BE",
        max_tokens: int | None = None,
        *,
        sampling: SamplingParams | None = None,
        progress: bool = True,
        **kwargs: Any,
    ) -> list[Result]:
        """Run one prompt or many to their end, with a progress display.

        Args:
            prompts: One prompt (text, chat messages, token ids), or any number of them.
            priority: Their class, as for `submit`; in its place, as in vLLM, SamplingParams.
            max_tokens: Most tokens per answer, as for `submit`.
            sampling: How tokens are chosen. With `n`, each prompt has so many answers.
            progress: Whether a bar is shown.
            **kwargs: Further arguments of `submit`, or fields of SamplingParams.

        Returns:
            Results in the order of the prompts, those of one prompt side by side.

        Raises:
            InvalidRequestError: A prompt or setting is wrong; the requests before it are cancelled.
            RequestFailedError: A request ended in `error`; the others are cancelled.
        """
        priority, sampling = _class_and_sampling(priority, sampling, "BE")
        options = {name: kwargs.pop(name) for name in SAMPLING_OPTIONS & kwargs.keys() - {"stop"}}
        each = _answers(asked_sampling(sampling, options, self.sampling_defaults))
        asked = [(prompt, one) for prompt in _prompts_of(prompts) for one in each]
        return self._run(asked, priority, max_tokens, progress, kwargs)

    def chat(
        self,
        messages: Sequence[Message] | Iterable[Sequence[Message]],
        priority: str | int | Priority | SamplingParams = "LS",
        max_tokens: int | None = None,
        *,
        sampling: SamplingParams | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        progress: bool = False,
        **kwargs: Any,
    ) -> list[Result]:
        """Answer one conversation or several, and wait for the answers.

        Args:
            messages: One conversation (a list of messages), or any number of them.
            priority: Their class, as for `submit`; in its place, as in vLLM, SamplingParams.
            max_tokens: Most tokens per answer, as for `submit`.
            sampling: How tokens are chosen. With `n`, each conversation has so many answers.
            tools: JSON schemas of functions, for templates that know tools.
            chat_template_kwargs: Further variables of the model's chat template.
            add_generation_prompt: Begin the assistant's answer.
            continue_final_message: Let the answer go on with the last message; needs
                `add_generation_prompt=False`.
            progress: Whether a bar is shown.
            **kwargs: Further arguments of `submit`, or fields of SamplingParams.

        Raises:
            InvalidRequestError: A message or setting is wrong, or the template refuses it.
            RequestFailedError: A request ended in `error`; the others are cancelled.
        """
        priority, sampling = _class_and_sampling(priority, sampling, "LS")
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
        prompts = [
            render_chat(
                chat,
                self.tokenizer,
                tools=tools,
                variables=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for chat in chats
        ]
        return self.generate(
            prompts, priority, max_tokens, sampling=sampling, progress=progress, **kwargs
        )

    def _run(
        self,
        asked: Sequence[tuple[Prompt, SamplingParams]],
        priority: str | int | Priority,
        max_tokens: int | None,
        progress: bool,
        given: Mapping[str, Any],
    ) -> list[Result]:
        from rich.progress import track

        handles: list[Handle] = []
        results: list[Result] = []
        try:
            for done in track(
                range(len(asked)), description="requests", transient=True, disable=not progress
            ):
                while len(handles) < len(asked) and len(handles) - done < self.config.max_waiting:
                    prompt, sampling = asked[len(handles)]
                    handles.append(
                        self.submit(prompt, priority, max_tokens, sampling=sampling, **given)
                    )
                results.append(handles[done].result())
        finally:  # nobody will read the rest if one was refused or failed
            for handle in handles[len(results) :]:
                handle.cancel()
        return results


def _class_and_sampling(
    priority: str | int | Priority | SamplingParams, sampling: SamplingParams | None, usual: str
) -> tuple[str | int | Priority, SamplingParams | None]:
    """Read the second argument: a class, or, as in vLLM, how tokens are chosen."""
    if not isinstance(priority, SamplingParams):
        return priority, sampling
    if sampling is not None:
        raise InvalidRequestError(
            "SamplingParams are given twice, in the place of priority and as sampling=; leave one "
            "out"
        )
    return usual, priority


def _prompts_of(prompts: Any) -> list[Any]:
    """A list of prompts, of one prompt too."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        return [prompts]
    if isinstance(prompts, Mapping):
        raise InvalidRequestError(
            f"prompt={shown(prompts):.80} is one message; put it into a list of messages"
        )
    several = list(prompts)
    is_one = bool(several) and (isinstance(several[0], Mapping) or is_int(several[0]))
    return [several] if is_one else several


def _answers(sampling: SamplingParams) -> list[SamplingParams]:
    """How each answer to one prompt is sampled."""
    seeds = (
        None if sampling.seed is None else (sampling.seed + i) % NUM_SEEDS
        for i in range(sampling.n)
    )
    return [replace(sampling, n=1, seed=seed) for seed in seeds]


def _is_chat(prompt: Any) -> bool:
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes)
    return is_list and bool(prompt) and isinstance(prompt[0], Mapping)
