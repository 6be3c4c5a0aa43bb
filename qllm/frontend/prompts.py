"""Checks that turn the arguments of `submit` into token ids and sampling."""

import inspect
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from qllm.config import EngineConfig
from qllm.errors import ContextLengthError, InvalidRequestError, check_text, shown
from qllm.frontend.checks import is_int, longest, most_tokens
from qllm.frontend.detokenizer import decoded
from qllm.frontend.templates import check_all_shown, suited
from qllm.grammar import Vocabulary
from qllm.models.tokenizer import LONG_TEXT, ids_of, longest_token, renders_as_usual
from qllm.names import new_seed
from qllm.plan import ModelShape
from qllm.types import THOUGHT, Prompt, SamplingParams

SAMPLING_OPTIONS = frozenset(field.name for field in fields(SamplingParams))
"""Keywords of `submit`, `generate` and `chat` that go into SamplingParams."""
MARK = "\ue000\ue001\ue000"
"""Placeholder for the content of the last message, with characters that texts do not use."""
MOST_PREDICTED, CHARS_PER_TOKEN = 32_768, 8
"""Most tokens of a prediction that are used, and the characters per token that are read for it."""
MOST_STOP_IDS = 8
"""Most ids that end a request in a loop on a device (`qllm.device.serving`)."""


def check_sampling(
    sampling: SamplingParams,
    vocabulary: Vocabulary,
    tokenizer: Any,
    loop: str,
    max_tokens: int,
    has_reading: bool = False,
) -> frozenset[int]:
    """Check settings against a model and its engine.

    Args:
        sampling: Settings of one choice.
        vocabulary: Vocabulary of the model.
        tokenizer: Tokenizer of the model, or None.
        loop: The engine's setting `loop`.
        max_tokens: Largest number of tokens to produce.
        has_reading: True if the front end itself looks for `stop_token_ids`, outside reasoning.

    Returns:
        The ids that end the answer in the engine.

    Raises:
        InvalidRequestError: The engine cannot serve the settings; the message has the reason.
    """
    ids = (*sampling.stop_token_ids, *sampling.logit_bias, *(sampling.allowed_token_ids or ()))
    wrong = [i for i in ids if i >= vocabulary.vocab_size]
    if wrong:
        raise InvalidRequestError(
            f"token id {shown(wrong[0])} in sampling must be in [0, {vocabulary.vocab_size})"
        )
    if sampling.stop and tokenizer is None:
        raise InvalidRequestError("stop strings need a tokenizer; use stop_token_ids")
    stop_ids = frozenset(() if has_reading and tokenizer is not None else sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_ids |= frozenset(vocabulary.eos_token_ids)
    refuse_unserved(loop, sampling, len(stop_ids))
    check_limits(sampling, vocabulary, max_tokens)
    return stop_ids


def refuse_unserved(loop: str, sampling: SamplingParams, num_stop_ids: int) -> None:
    """Raise if an engine with this loop cannot sample with these settings (`EngineConfig.loop`).

    Raises:
        InvalidRequestError: The engine cannot; the message names the missing ability.
    """
    if loop == "host":
        return
    lacks = {
        "logprobs": sampling.logprobs is not None,
        "confidence": sampling.confidence,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "logit_bias": bool(sampling.logit_bias),
        "structured_outputs": sampling.structured_outputs is not None,
        "allowed_token_ids": sampling.allowed_token_ids is not None,
        "bad_words": bool(sampling.bad_words),
        "min_tokens": bool(sampling.min_tokens),
        "thinking_token_budget": sampling.thinking_token_budget is not None,
        "repetition_penalty": sampling.repetition_penalty != 1,
        "presence_penalty": sampling.presence_penalty != 0,
        "frequency_penalty": sampling.frequency_penalty != 0,
    }
    asked = [name for name, is_asked in lacks.items() if is_asked]
    if num_stop_ids > MOST_STOP_IDS:
        asked.append(f"{num_stop_ids} stop ids (at most {MOST_STOP_IDS})")
    if asked:
        raise InvalidRequestError(
            f"{', '.join(asked)}: not served by an engine with loop={loop!r}; leave it out, or use "
            "loop='host'"
        )


def with_prediction(
    sampling: SamplingParams, tokenizer: Any, config: EngineConfig
) -> SamplingParams:
    """Return the settings with the prediction as tokens, for an engine with these settings.

    At most the first `MOST_PREDICTED` tokens stay, and none if the engine drafts nothing.

    Raises:
        InvalidRequestError: The prediction is a text, and there is no tokenizer.
    """
    given = sampling.prediction
    if not given:
        return sampling
    if not config.has_drafts:
        return replace(sampling, prediction=())
    if isinstance(given, str):
        if tokenizer is None:
            raise InvalidRequestError("a prediction in text needs a tokenizer; give token ids")
        text = given[: MOST_PREDICTED * CHARS_PER_TOKEN]
        given = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    return replace(sampling, prediction=given[:MOST_PREDICTED])


def check_limits(sampling: SamplingParams, vocabulary: Vocabulary, max_tokens: int) -> None:
    """Raise if the model cannot obey the limits that a request sets.

    Raises:
        InvalidRequestError: The model cannot; the message has the reason, and the place in a
            schema.
    """
    if sampling.structured_outputs is not None:
        vocabulary.check(sampling.structured_outputs)
    vocabulary.split(sampling.bad_words)
    if sampling.thinking_token_budget is not None:
        vocabulary.encode(THOUGHT)
    if sampling.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens={sampling.min_tokens} must be at most max_tokens, here {max_tokens}"
        )


def asked_sampling(
    sampling: SamplingParams | None, options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> SamplingParams:
    """Combine the sampling settings of a caller.

    Args:
        sampling: Settings from the caller; None is greedy sampling with `defaults`.
        options: Fields of SamplingParams by name, in place of those in `sampling`.
        defaults: Keywords of SamplingParams, from the model's generation config.

    Raises:
        InvalidRequestError: A value has another type or is out of its range.
        TypeError: An option has no such name; the message suggests one.
    """
    wrong = next((name for name in options if name not in SAMPLING_OPTIONS), None)
    if wrong is not None:
        raise TypeError(f"unknown keyword {wrong!r}; {_meant(wrong)}")
    if sampling is None:
        return SamplingParams(**{"temperature": 0.0, **defaults, **options})
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequestError(f"sampling={shown(sampling)} must be SamplingParams, or None")
    return replace(sampling, **options) if options else sampling


def to_sampling(
    sampling: SamplingParams, stop: str | Sequence[str] | None = None
) -> SamplingParams:
    """Add the stop strings, and a random seed if there is no seed."""
    if stop is not None:
        if not isinstance(stop, str | Sequence):
            raise InvalidRequestError(f"stop={shown(stop)} must be a string or a list of them")
        more = (stop,) if isinstance(stop, str) else stop
        sampling = replace(sampling, stop=(*sampling.stop, *more))
    return sampling if sampling.seed is not None else _with_seed(sampling, new_seed())


def _with_seed(sampling: SamplingParams, seed: int) -> SamplingParams:
    """Return the settings with an allowed seed. Other values are not checked again."""
    made = object.__new__(SamplingParams)
    for name in SamplingParams.__slots__:
        object.__setattr__(made, name, getattr(sampling, name))
    object.__setattr__(made, "seed", seed)
    return made


def _meant(name: str) -> str:
    if name == "sampling_params":
        return "use sampling="
    near = get_close_matches(name, SAMPLING_OPTIONS, 1)
    known = ", ".join(sorted(SAMPLING_OPTIONS))
    return f"use {near[0]}=" if near else f"fields of SamplingParams are {known}"


def for_one(
    sampling: SamplingParams, max_tokens: int | str | None
) -> tuple[SamplingParams, int | str | None]:
    """Separate the sampling of one request from its largest number of tokens.

    Args:
        sampling: Settings from the caller.
        max_tokens: Limit from the caller; None takes the limit in `sampling`.

    Raises:
        InvalidRequestError: Several answers are requested, or two different `max_tokens`.
    """
    if sampling.n != 1:
        raise InvalidRequestError(
            f"n={sampling.n}: a request has one answer; use generate or chat, or submit several"
        )
    most = sampling.max_tokens
    if most is None:
        return sampling, max_tokens
    if max_tokens is not None and max_tokens != most:
        raise InvalidRequestError(
            f"max_tokens={shown(max_tokens)} and max_tokens={most} in SamplingParams differ; give "
            "one of them"
        )
    return replace(sampling, max_tokens=None), most


def to_token_ids(
    prompt: Prompt,
    tokenizer: Any,
    vocab_size: int,
    most_tokens: int | None = None,
    *,
    special: bool | None = None,
) -> tuple[int, ...]:
    """Encode text, render chat messages with the model's template, or check ids.

    Args:
        prompt: Text, a list of messages (`role`, `content`), or a list of token ids.
        tokenizer: A transformers tokenizer, or None if the model came without one.
        vocab_size: Number of token ids: each id must be in [0, vocab_size).
        most_tokens: Limit in tokens. A text that must exceed the limit is refused before it is
            encoded.
        special: True to add the tokenizer's special tokens; None adds special tokens to a text, not
            to a chat.

    Raises:
        InvalidRequestError: The prompt is empty, has another shape, cannot be encoded, or contains
            an unknown id.
        ContextLengthError: The text must have more than `most_tokens`.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequestError("the prompt is empty; pass at least one character")
        check_text("the prompt", prompt)
        ids = _encoded(_needed(tokenizer), prompt, most_tokens, special=special is not False)
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray) and prompt:
        first = prompt[0]
        if isinstance(first, Mapping):
            ids = render_chat(prompt, tokenizer, most_tokens=most_tokens, special=special is True)
        else:
            ids = _checked(prompt)
    else:
        raise InvalidRequestError(
            f"prompt={shown(prompt):.80} must be a non-empty string, list of messages or list of "
            "token ids"
        )
    if not ids:
        raise InvalidRequestError("the prompt has no tokens; pass some text")
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"token id {shown(wrong)} must be in [0, {vocab_size}), the vocabulary"
        )
    return tuple(ids)


def ids_that_fit(
    prompt: Prompt, tokenizer: Any, config: EngineConfig, shape: ModelShape
) -> tuple[int, ...]:
    """Return the token ids of a prompt.

    A prompt that is too long is refused before it is encoded.
    """
    if isinstance(prompt, array):
        most_tokens(len(prompt), None, config, shape)
    return to_token_ids(prompt, tokenizer, shape.vocab_size, longest(config, shape))


def _encoded(tokenizer: Any, text: str, most_tokens: int | None, *, special: bool) -> list[int]:
    """Encode a text, if it may fit into `most_tokens` tokens."""
    if most_tokens is not None and len(text) >= LONG_TEXT:
        most = most_tokens * longest_token(tokenizer)
        if 0 < most < len(text):
            raise ContextLengthError(
                f"the prompt has {len(text)} characters; {most_tokens} tokens, the longest prompt "
                f"with its answer, have at most {most}; make it shorter"
            )
    return ids_of(tokenizer, text, special=special)


def _needed(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise InvalidRequestError("the model came without a tokenizer; pass a list of token ids")
    return tokenizer


def _checked(prompt: Sequence[Any]) -> list[int]:
    if isinstance(prompt, array):
        return prompt.tolist()
    for item in prompt:
        if not is_int(item):
            raise InvalidRequestError(
                f"prompt holds {shown(item):.60}; a list must hold only token ids, or only "
                "messages with role and content"
            )
    return [int(item) for item in prompt]


def render_chat(
    messages: Sequence[Any],
    tokenizer: Any,
    *,
    tools: Sequence[Any] | None = None,
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    most_tokens: int | None = None,
    special: bool = False,
) -> list[int]:
    """Render messages with the model's chat template and encode them.

    Args:
        messages: Mappings with `role` and `content`.
        tokenizer: A transformers tokenizer, or None if the model came without one.
        tools: JSON schemas of functions, for templates that support tools.
        variables: Further variables of the template.
        add_generation_prompt: True to begin the assistant's answer.
        continue_final_message: True to leave the last message open, so that the answer continues
            this message.
        most_tokens: Limit as for `to_token_ids`, for the rendered text.
        special: True to add the tokenizer's special tokens.

    Raises:
        InvalidRequestError: A message has another shape or cannot be encoded, or the template
            refuses it.
        ContextLengthError: The text must have more than `most_tokens`.
    """
    for name, value in (("messages", messages), ("tools", tools), ("variables", variables)):
        check_text(name, value)
    messages = [flat_message(x) if isinstance(x, Mapping) else x for x in messages]
    for message in messages:
        _check_message(message)
    if continue_final_message:
        _check_last(messages)
    if _needed(tokenizer).chat_template is None:
        raise InvalidRequestError(
            "the model's tokenizer has no chat template; pass a string or token ids"
        )
    known = inspect.signature(tokenizer.apply_chat_template).parameters
    wrong = next((name for name in variables or () if name in known), None)
    if wrong is not None:
        raise InvalidRequestError(f"{wrong!r} is no variable of a chat template; leave it out")
    is_usual = renders_as_usual(tokenizer)
    if special and not is_usual:
        raise InvalidRequestError(
            "add_special_tokens=True: the tokenizer of this model makes the tokens of a chat "
            "itself; leave it out"
        )
    messages = suited(messages, tokenizer)
    try:
        rendered = tokenizer.apply_chat_template(
            list(messages),
            tools=None if tools is None else list(tools),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=not is_usual,
            return_dict=not is_usual,
            **(variables or {}),
        )
    except Exception as error:
        raise InvalidRequestError(f"the chat template refuses the messages: {error}") from error
    check_all_shown(
        messages,
        tokenizer,
        bool(tools),
        variables or {},
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    if is_usual:
        return _encoded(tokenizer, rendered, most_tokens, special=special)
    return list(rendered["input_ids"])


def template_head(
    messages: Sequence[Any],
    tokenizer: Any,
    options: Mapping[str, Any] | None = None,
    most_tokens: int | None = None,
) -> str:
    """Return the text that a chat template puts before the content of the last message.

    Args:
        messages: Messages as for `render_chat`.
        tokenizer: Tokenizer as for `render_chat`.
        options: Keywords of `render_chat`.
        most_tokens: Limit as for `to_token_ids`.

    Raises:
        InvalidRequestError: `render_chat` raised it.
        ContextLengthError: The text has more than `most_tokens`.
    """
    marked = [*messages[:-1], {**messages[-1], "content": MARK}]
    rendered = render_chat(marked, tokenizer, most_tokens=most_tokens, **(options or {}))
    if most_tokens is not None and len(rendered) > most_tokens:
        raise ContextLengthError(
            f"the prompt begins with {len(rendered)} tokens, and at most {most_tokens} can be "
            "served; make it shorter"
        )
    return decoded(tokenizer, rendered).partition(MARK)[0]


def _check_message(message: Any) -> None:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise InvalidRequestError(
            f"message {shown(message):.80} must be a mapping with role and content"
        )
    if not isinstance(message["role"], str) or not isinstance(message["content"], str):
        raise InvalidRequestError(
            f"message {shown(message):.80} must have a string as role, and a string or a list "
            "of parts as content"
        )


def _check_last(messages: Sequence[Any]) -> None:
    """Refuse text that the template would render after the message that the answer continues."""
    if messages and messages[-1].get("tool_calls"):
        raise InvalidRequestError(
            "continue_final_message goes on with the text of the last message, which calls tools "
            "behind it; leave tool_calls out, or append their results and begin a new answer"
        )


def flat_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message in the shape that every template supports.

    The content becomes one string, and arguments of tool calls become objects.

    Args:
        message: Message whose content is text, or a list of parts `{"type": "text", "text": ...}`,
            which are joined by line breaks. Content of the assistant and of tools may be missing or
            null.

    Raises:
        InvalidRequestError: A part is not a text, or arguments of a call are not JSON.
    """
    content = message.get("content")
    calls = message.get("tool_calls")
    if content is None and (message.get("role") in ("assistant", "tool") or calls):
        message = {**message, "content": ""}
    if "tool_calls" in message and not calls:  # templates test if the key exists
        message = {name: x for name, x in message.items() if name != "tool_calls"}
    elif calls:
        if not isinstance(calls, list):
            raise InvalidRequestError(f"tool_calls={shown(calls):.80} must be a list of calls")
        message = {**message, "tool_calls": [_flat_call(call) for call in calls]}
    return {**message, "content": _joined(content)} if isinstance(content, list) else message


def _joined(parts: Sequence[Any]) -> str:
    return "\n".join(map(_text_of, parts))


def _text_of(part: Any) -> str:
    """Return the text of a content part: of a text, or of an earlier refusal."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "refusal"):
        raise InvalidRequestError(
            f"a content part of type {shown(kind):.40} is not supported; only text and refusal are"
        )
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"a content part of type {kind!r} has {kind}={shown(text):.80}; give a string"
        )
    return text


def _flat_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            'an entry of tool_calls must be {"function": {"name": ..., "arguments": ...}}'
        )
    try:
        given = function.get("arguments") or "{}"
        arguments = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"arguments of a call of {function['name']!r:.80} are no JSON: {error}; if it was cut "
            "off, leave it out or go on from before it"
        ) from error
    return {**call, "function": {**function, "arguments": arguments}}
