"""The tokenizer of a front end that has no model of its own."""

from typing import Any

from qllm.errors import ConfigError
from qllm.frontend.client import Client
from qllm.models.tokenizer import load_tokenizer, longest_token, vocabulary_of


def tokenizer_of(client: Client, where: str, trust_remote_code: bool) -> Any:
    """Load a front end's tokenizer. If that fails, close the client."""
    try:
        tokenizer = load_tokenizer(where, trust_remote_code=trust_remote_code)
        if client.info.vocabulary and vocabulary_of(tokenizer) not in (
            None,
            client.info.vocabulary,
        ):
            raise ConfigError(
                f"the tokenizer at {where!r} has another vocabulary than that of the engine's "
                f"model {client.info.name!r}; give tokenizer= a copy of the engine's files"
            )
        return tokenizer
    except BaseException:
        client.close()
        raise


def prepare(tokenizer: Any) -> None:
    """Compute the longest token now, so that the first long text does not wait for it."""
    longest_token(tokenizer)
