"""What a caller can do with kept KV."""

from qllm.frontend.checks import text_digest
from qllm.frontend.client import Client


class KeptKv:
    """What an engine can do with the KV that it keeps."""

    _client: Client

    def reset_prefix_cache(self) -> None:
        """Delete all kept KV, in RAM and in the file; requests in flight go on."""
        self._client.reset_prefix_cache()

    def delete_kv(self, cache_salt: str | None = None, cache_owner: str = "") -> int:
        """Delete kept KV of one salt, or all of an owner, in RAM and in the file.

        Requests of it in flight go on, and no more of their KV is kept.

        Args:
            cache_salt: As for `submit`; None is every salt of the owner.
            cache_owner: As for `submit`.

        Returns:
            The number of pages.

        Raises:
            InvalidRequestError: One is no text, or longer than 256 bytes.
        """
        tag = text_digest("cache_owner", cache_owner)
        if cache_salt is not None:
            tag += text_digest("cache_salt", cache_salt)
        return self._client.delete_kv(tag)
