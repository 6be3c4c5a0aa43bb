"""Conversions between texts, chats and token ids, for `qllm.server.requests.apart`.

The results are compact: arrays, and the JSON of an answer.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from qllm.errors import InvalidRequestError
from qllm.frontend.detokenizer import decoded
from qllm.frontend.prompts import flat_message, render_chat, to_token_ids
from qllm.server.http.errors import ApiError
from qllm.server.http.fields import Packed

MAX_TOKEN_ID = 2**31


def encoded(
    text: str, tokenizer: Any, vocab_size: int, most_tokens: int | None, special: bool | None
) -> "array[int]":
    """Return the token ids of a text. `to_token_ids` describes the arguments."""
    return array("q", to_token_ids(text, tokenizer, vocab_size, most_tokens, special=special))


def rendered(
    messages: Sequence[Mapping[str, Any]] | Packed,
    tokenizer: Any,
    template: Mapping[str, Any],
    most_tokens: int | None,
    special: bool,
) -> "array[int]":
    """Return the token ids of a chat.

    Args:
        messages: Messages of the chat.
        tokenizer: The model's tokenizer.
        template: Variables of the chat template, and options of rendering.
        most_tokens: Limit of tokens, as in `to_token_ids`.
        special: True to add special tokens, as in `render_chat`.

    Raises:
        ApiError: A message is wrong.
        InvalidRequestError: The chat template refuses the messages.
    """
    given = messages.opened() if isinstance(messages, Packed) else messages
    try:
        flat = [flat_message(message) for message in given]
    except InvalidRequestError as error:
        raise ApiError(400, str(error), param="messages") from error
    how = keywords_of(template)
    return array("q", render_chat(flat, tokenizer, most_tokens=most_tokens, special=special, **how))


def keywords_of(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of `render_chat`: options, and variables of the template."""
    variables = dict(template)
    names = ("tools", "add_generation_prompt", "continue_final_message")
    how = {name: variables.pop(name) for name in names if name in variables}
    return {**how, "variables": variables}


def tokenized(
    prompt: str | None,
    messages: Sequence[Any] | Packed | None,
    tokenizer: Any,
    template: Mapping[str, Any],
    special: bool | None,
    max_model_len: int,
) -> bytes:
    """Return the answer of `/tokenize`: the ids of a text, or of a rendered chat.

    Args:
        prompt: The text; None if there are messages.
        messages: Messages of a chat.
        tokenizer: The model's tokenizer.
        template: Keywords of `render_chat`.
        special: True to add special tokens, as in `to_token_ids`.
        max_model_len: Most tokens of a prompt and its answer.
    """
    if messages is None:
        ids = list(to_token_ids(prompt or "", tokenizer, MAX_TOKEN_ID, special=special))
    else:
        given = messages.opened() if isinstance(messages, Packed) else messages
        ids = render_chat(given, tokenizer, special=special is True, **template)
    return _json({"tokens": ids, "count": len(ids), "max_model_len": max_model_len})


def detokenized(tokens: Sequence[int], tokenizer: Any) -> bytes:
    """Return the answer of `/detokenize`: the text of ids.

    Raises:
        InvalidRequestError: The model has no tokenizer, or an id is not in its vocabulary.
    """
    if tokenizer is None:
        raise InvalidRequestError("the model came without a tokenizer")
    wrong = next((i for i in tokens if not 0 <= i < len(tokenizer)), None)
    if wrong is not None:
        raise InvalidRequestError(f"token id {wrong} must be in [0, {len(tokenizer)})")
    return _json({"prompt": decoded(tokenizer, tokens)})


def _json(answer: Any) -> bytes:
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
