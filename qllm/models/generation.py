"""What a checkpoint says of answers: which tokens end one, and how it is sampled."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qllm.errors import InvalidRequestError, ModelError
from qllm.types import SamplingParams

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_PENALTIES = ("repetition_penalty",)
_ANSWER = "qllm"
"""An answer that is put into a chat template, to see what is behind it."""


def eos_token_ids(
    generation: Mapping[str, Any], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    """Every id that ends an answer: of the generation config, the config and the tokenizer."""
    return ids_in(
        generation.get("eos_token_id"),
        getattr(model.config, "eos_token_id", None),
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )


def ids_in(*sources: object) -> frozenset[int]:
    """The ids of some settings, each of which is an id, a list of ids, or nothing."""
    found: set[int] = set()
    for source in sources:
        ids: Iterable[object] = source if isinstance(source, list | tuple) else [source]
        found.update(i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0)
    return frozenset(found)


def unlisted_end(tokenizer: PreTrainedTokenizerBase | None, ends: Collection[int]) -> str | None:
    """The special token that the chat template writes behind an answer, if it ends none.

    None is also what a template gives that does not take a question and an answer.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return None
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(said, tokenize=False))
    except Exception:  # noqa: BLE001 - templates raise what they like
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
    """Keywords of SamplingParams that a generation config sets.

    Files that were published before transformers wrote `do_sample` have values without it, which
    are meant; with `do_sample` false they are not.

    Args:
        name: Of the model.
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
