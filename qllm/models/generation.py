"""A checkpoint's settings for answers: the tokens that end one, and the sampling."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qllm.errors import InvalidRequestError, ModelError
from qllm.types import SamplingParams

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_PENALTIES = ("repetition_penalty",)
_ANSWER = "qllm"
"""A sample answer put into a chat template, to find the text after it."""


def eos_token_ids(
    generation: Mapping[str, Any], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    """Return every id that ends an answer, from generation config, config and tokenizer."""
    return ids_in(
        generation.get("eos_token_id"),
        getattr(model.config, "eos_token_id", None),
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )


def ids_in(*sources: object) -> frozenset[int]:
    """Return the ids of some settings, each of which is an id, a list of ids, or nothing."""
    found: set[int] = set()
    for source in sources:
        ids: Iterable[object] = source if isinstance(source, list | tuple) else [source]
        found.update(i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0)
    return frozenset(found)


def unlisted_end(tokenizer: PreTrainedTokenizerBase | None, ends: Collection[int]) -> str | None:
    """Return the special token that the chat template writes after an answer, if it is no end id.

    Also return None for a template that does not accept a question and an answer.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return None
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(said, tokenize=False))
    except Exception:  # noqa: BLE001 - templates may raise anything
        return None
    _, found, behind = text.rpartition(_ANSWER)
    behind = behind.lstrip()
    special = {
        str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    starts = [token for token in special if behind.startswith(token)]
    if not found or not starts:
        return None
    token = max(starts, key=len)
    return None if special[token] in ends else token


def sampling_defaults(name: str, generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of SamplingParams that a generation config sets.

    Values count in files published before transformers wrote `do_sample`, which lack it. With
    `do_sample` false they do not count.

    Args:
        name: Name of the model.
        generation: The config.

    Raises:
        ModelError: A value is out of range.
    """
    is_greedy = generation.get("do_sample") is False
    names = _PENALTIES if is_greedy else (*_SAMPLING, *_PENALTIES)
    defaults = {key: generation[key] for key in names if generation.get(key) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise ModelError(f"generation config of model {name!r}: {error}") from error
    return defaults
