"""Streaming prompts: `QLLMEngine.open`, then pieces, then `send`.

prompt = engine.open(priority="LS")
for page in crawl(question):
    prompt.append(page)          # the engine computes it while the next page is fetched
print(prompt.send(max_tokens=200).result().text)
"""

import uuid
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from qllm.config import EngineConfig
from qllm.errors import (
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    QueueFullError,
    shown,
)
from qllm.frontend.checks import (
    check_room,
    check_timeout,
    longest,
    most_tokens,
    priority_class,
    salt_digest,
    slo_of,
)
from qllm.frontend.client import Client
from qllm.frontend.detokenizer import Detokenizer, MakeReading
from qllm.frontend.handle import Handle
from qllm.frontend.incremental_tokens import (
    IncrementalIds,
    IncrementalText,
    IncrementalTokens,
    common_prefix,
)
from qllm.frontend.prompts import (
    asked_sampling,
    check_sampling,
    for_one,
    render_chat,
    template_head,
    to_sampling,
    to_token_ids,
)
from qllm.grammar import Vocabulary
from qllm.ingress import Revision, Submission
from qllm.types import (
    NS_PER_S,
    Priority,
    Prompt,
    RequestId,
    SamplingParams,
    Slo,
)

PIECE_TOKENS = 16
"""Number of new tokens that are sent to the engine together."""
Piece = str | Sequence[int]
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
UNSAID = SamplingParams(temperature=0, seed=0)
"""Sampling of a streaming prompt before `send`. It is unused, because no token is sampled."""


@dataclass(frozen=True, slots=True)
class PromptEngine:
    """The members of an engine that a streaming prompt needs."""

    client: Client
    tokenizer: Any
    vocabulary: Vocabulary
    config: EngineConfig
    sampling_defaults: Mapping[str, Any]

    @property
    def most(self) -> int:
        """Largest number of prompt tokens."""
        return longest(self.config, self.client.info.shape) - 1


class StreamingPrompt:
    """A prompt that the engine computes while its pieces arrive. Safe to use from any thread.

    At the end of a `with` (or `async with`) block, a prompt that was not sent is cancelled.

    Args:
        handle: Handle of the prompt's request.
        engine: Engine that has the request.
        priority: Integer class.
        salt: Digests of the prompt's cache salt and owner.
    """

    def __init__(self, handle: Handle, engine: PromptEngine, priority: int, salt: bytes) -> None:
        self.handle = handle
        """The handle of the answer. It has no token before `send`."""
        self._engine, self._priority, self._salt = engine, priority, salt
        self._tokens: IncrementalTokens | None = None
        self._told: list[int] = []
        """Tokens that were sent to the engine."""
        self._is_sent = False

    def __repr__(self) -> str:
        state = "sent" if self._is_sent else "open" if self.is_open else "ended"
        return f"StreamingPrompt({self.handle.request_id!r}, {state}, {self.num_tokens} tokens)"

    @property
    def is_open(self) -> bool:
        """True while more pieces may arrive."""
        return not self._is_sent and self.handle.finish_reason is None

    @property
    def is_sent(self) -> bool:
        """True once the prompt is whole and the engine makes the answer."""
        return self._is_sent

    @property
    def num_bytes(self) -> int:
        """Bytes that arrived so far: UTF-8 bytes, or 4 per token id.

        In a chat only the last message counts.
        """
        tokens = self._tokens
        return 0 if tokens is None else tokens.num_bytes

    @property
    def num_tokens(self) -> int:
        """Number of tokens that arrived so far. Later pieces may change the last tokens."""
        with self.handle.prompt_lock:
            if self._tokens is None:
                return 0
            if not self._is_sent:
                self._tokens.look()
            return len(self._tokens.token_ids)

    def num_bytes_before(self, from_token: int) -> int:
        """Return the size of the first `from_token` tokens, in bytes as for `num_bytes`.

        Raises:
            InvalidRequestError: An error of `replace`.
        """
        with self.handle.prompt_lock:
            return 0 if self._tokens is None else self._tokens.num_bytes_before(from_token)

    def begin(self, prompt: Prompt, template: Mapping[str, Any] = NO_OPTIONS) -> None:
        """Take the beginning of the prompt. In a chat, the last message receives the later pieces.

        Args:
            prompt: Text, token ids or messages. It may be empty.
            template: Keywords of `render_chat`.

        Raises:
            InvalidRequestError: The prompt has another shape, or cannot be encoded.
        """
        engine = self._engine
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            chat = [dict(message) for message in prompt]  # type: ignore[arg-type]
            last = chat[-1].get("content")
            if not isinstance(last, str):
                raise InvalidRequestError(
                    f"the content of the last message, {shown(last):.60}, must be a string: it "
                    "grows"
                )

            def render(text: str) -> list[int]:
                messages = [*chat[:-1], {**chat[-1], "content": text}]
                return render_chat(messages, engine.tokenizer, most_tokens=engine.most, **template)

            head = template_head(chat, engine.tokenizer, template, engine.most)
            self._tokens = IncrementalText(engine.tokenizer, render, head)
            prompt = last
        if prompt:
            self.append(prompt)  # type: ignore[arg-type]

    def append(self, piece: Piece) -> None:
        """Append text, or token ids if the prompt began with token ids.

        The engine computes the piece after this call returns, while the caller makes the next
        piece.

        Raises:
            InvalidRequestError: The prompt was sent, or the piece is not a text (not token ids).
            ContextLengthError: The prompt is too long now. The caller may replace a part of the
                prompt, or cancel.
            RequestFailedError: The request was cancelled, or its engine has ended.
        """
        with self.handle.prompt_lock:
            tokens = self._of(piece)
            tokens.append(piece)
            self._tokens = tokens
            self._tell()

    def replace(self, from_token: int, piece: Piece) -> None:
        """Replace everything after the first `from_token` tokens with a piece.

        Computed KV stays valid for the tokens that the new prompt has in common with the old
        prompt.

        Raises:
            InvalidRequestError: An error of `append`; or the prompt has fewer tokens
                (`num_tokens`).
            ContextLengthError: An error of `append`.
            RequestFailedError: An error of `append`.
        """
        with self.handle.prompt_lock:
            tokens = self._of(piece)
            tokens.replace(from_token, piece)
            self._tokens = tokens
            self._tell()

    async def extend(self, pieces: AsyncIterable[Piece]) -> Self:
        """Append each piece that an asynchronous iterator yields."""
        async for piece in pieces:
            self.append(piece)
        return self

    def _of(self, piece: Any) -> IncrementalTokens:
        """Return the tokens that a piece extends. The first piece decides between text and ids."""
        self._raise_if_sent()
        if self._tokens is not None:
            return self._tokens
        engine = self._engine
        vocab_size = engine.client.info.shape.vocab_size
        if not isinstance(piece, str):
            return IncrementalIds(vocab_size)
        if engine.tokenizer is None:
            raise InvalidRequestError(
                "the model came without a tokenizer; append lists of token ids"
            )

        def encode(text: str) -> Sequence[int]:
            return to_token_ids(text, engine.tokenizer, vocab_size, engine.most)

        return IncrementalText(engine.tokenizer, encode)

    def _raise_if_sent(self) -> None:
        if self._is_sent:
            raise InvalidRequestError(
                f"prompt {self.handle.request_id} was sent: nothing can be added or replaced; open "
                "another one"
            )

    def _tell(self) -> None:
        """Send the engine tokens that are not expected to change, once there are enough."""
        tokens, told = self._tokens, self._told
        assert tokens is not None
        most = self._engine.most
        sure = min(tokens.num_sure, most)
        same = min(tokens.num_same, len(told), sure)
        keep = same + common_prefix(told[same:], tokens.token_ids[same:sure])
        if keep < len(told) or sure >= keep + PIECE_TOKENS:
            new = tokens.token_ids[keep:sure]
            try:
                self.handle.revise(Revision(keep, self._rest(tuple(new))))
            except QueueFullError:
                pass  # the next piece sends these tokens too
            else:
                told[keep:] = new
                tokens.num_same = len(tokens.token_ids)
        else:
            self.handle.raise_if_ended()
        if len(tokens.token_ids) > most:
            raise ContextLengthError(
                f"the prompt has {len(tokens.token_ids)} tokens so far, and at most {most} can be "
                "served; replace a part of it, or cancel it"
            )

    def _rest(self, token_ids: tuple[int, ...]) -> Submission:
        """Return the submission that adds tokens to the prompt and leaves it open."""
        return Submission(
            request_id=self.handle.number,
            name=self.handle.request_id,
            priority=self._priority,
            token_ids=token_ids,
            sampling=UNSAID,
            stop_ids=frozenset(),
            max_tokens=1,
            slo=Slo(),
            arrival_ns=0,
            deadline_ns=None,
            cache_salt=self._salt,
            is_open=True,
        )

    def send(
        self,
        max_tokens: int | str | None = None,
        *,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] | None = None,
        slo: Slo | None = None,
        timeout_s: float | None = None,
        cache_ttl_s: float | None = None,
        reading: MakeReading | None = None,
        **options: Any,
    ) -> Handle:
        """Declare the prompt whole and request its answer, with the arguments of `submit`.

        The answer equals that of a request with the whole prompt. The prompt's tokens are those
        that the tokenizer makes of the whole text. Targets and `timeout_s` count from now.

        Raises:
            InvalidRequestError: An argument is wrong; the prompt stays open.
            QueueFullError: The engine has no room for the request now; the prompt stays open.
            RequestFailedError: The request has ended.
            TypeError: A keyword is unknown.
        """
        engine = self._engine
        with self.handle.prompt_lock:
            self._raise_if_sent()
            asked = asked_sampling(sampling, options, engine.sampling_defaults)
            params, max_tokens = for_one(to_sampling(asked, stop), max_tokens)
            if self._tokens is None:
                raise InvalidRequestError("the prompt is empty; append something first")
            ids = self._tokens.finish()
            if not ids:
                raise InvalidRequestError("the prompt has no tokens; append something first")
            shape = engine.client.info.shape
            most = most_tokens(len(ids), max_tokens, engine.config, shape)
            check_timeout("timeout_s", timeout_s)
            check_timeout("cache_ttl_s", cache_ttl_s)
            keep = common_prefix(self._told, ids)
            rest = Submission(
                request_id=self.handle.number,
                name=self.handle.request_id,
                priority=self._priority,
                token_ids=tuple(ids[keep:]),
                sampling=params,
                stop_ids=check_sampling(
                    params,
                    engine.vocabulary,
                    engine.tokenizer,
                    engine.config.loop,
                    most,
                    reading is not None,
                ),
                max_tokens=most,
                slo=slo_of(slo, engine.config.default_slo(self._priority)),
                arrival_ns=0,
                deadline_ns=None if timeout_s is None else int(timeout_s * NS_PER_S),
                cache_salt=self._salt,
                cache_ttl_s=cache_ttl_s,
            )
            eos_token_ids = engine.vocabulary.eos_token_ids
            detokenizer = Detokenizer.of(engine.tokenizer, params, ids, eos_token_ids, reading)
            self.handle.sent(tuple(ids), detokenizer)
            self.handle.revise(Revision(keep, rest))
            self._is_sent, self._told, self._tokens.token_ids = True, [], ids
        return self.handle

    def cancel(self) -> None:
        """End the request, whether the prompt was sent or not. Idempotent."""
        self.handle.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_sent:
            self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()


def open_prompt(
    engine: PromptEngine,
    make_handle: Callable[[RequestId, str, tuple[int, ...], SamplingParams], Handle],
    priority: str | int | Priority,
    prompt: Prompt,
    *,
    request_id: str | None,
    cache_salt: str,
    cache_owner: str,
    template: Mapping[str, Any],
) -> StreamingPrompt:
    """Open a streaming prompt. `QLLMEngine.open` describes the arguments and errors."""
    client, config = engine.client, engine.config
    client.raise_if_closed()
    if config.loop != "host":
        raise ConfigError(
            f"an engine with loop={config.loop!r} takes whole prompts only; use "
            "loop='host' for prompts that are still coming"
        )
    level, salt = priority_class(priority), salt_digest(cache_salt, cache_owner)
    with client.admission_lock:
        client.raise_if_closed()
        check_room(client.num_waiting, config.max_waiting)
        number = client.new_number()
        handle = make_handle(number, request_id or f"prompt-{uuid.uuid4().hex[:12]}", (), UNSAID)
        opened = StreamingPrompt(handle, engine, level, salt)
        first = opened._rest(())
        client.submit(_arriving(first, client.now_ns()), handle)
    try:
        opened.begin(prompt, template)
    except BaseException:
        opened.cancel()
        raise
    return opened


def _arriving(first: Submission, now_ns: int) -> Submission:
    return Revision(0, first).put_at(first.request_id, now_ns).rest
