"""`QLLMEngine`: a model, a policy and a loop, behind `submit`.

with QLLMEngine.from_pretrained("tiny") as engine:
    batch = engine.submit("Summarise: ...", priority="BE", max_tokens=256)
    chat = engine.submit([{"role": "user", "content": "Hi"}], priority="LS")
    for piece in chat:
        print(piece.text, end="")
    print(batch.result(timeout=60).metrics)
"""

import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from qllm.config import EngineConfig, check_bool, engine_config, named_device, named_dtype
from qllm.cores import Threads, num_threads
from qllm.errors import ConfigError, EngineClosedError, RequestFailedError
from qllm.fleet.client import meet
from qllm.frontend.checks import (
    check_request_id,
    check_room,
    check_timeout,
    most_tokens,
    priority_class,
    salt_digest,
    slo_of,
)
from qllm.frontend.client import Client, ManyClient, close_collected
from qllm.frontend.detokenizer import Detokenizer, MakeReading
from qllm.frontend.handle import Handle
from qllm.frontend.kept import KeptKv
from qllm.frontend.offline import Offline
from qllm.frontend.process import ProcessClient
from qllm.frontend.prompts import (
    asked_sampling,
    check_sampling,
    for_one,
    ids_that_fit,
    to_sampling,
)
from qllm.frontend.saved_request import SavedRequest
from qllm.frontend.streaming_prompt import Opens
from qllm.frontend.tokenizer import tokenizer_of
from qllm.grammar import Vocabulary
from qllm.ingress import Submission
from qllm.ingress.messages import Start
from qllm.ingress.remote.meeting import Meeting
from qllm.plugins import load_policy, pickled_policy
from qllm.record.trace import Trace
from qllm.types import NS_PER_S, Priority, Prompt, RequestId, RequestStatus, SamplingParams, Slo

PLACES = ("process", "thread")


class QLLMEngine(Offline, KeptKv, Opens):
    """Serves one model to requests of several classes. Make it with a `from_` method.

    Use it as a context manager, or call `close`. An engine that is collected without it is closed
    then, although handles may still be held: those of requests in flight end as `cancelled`.

    In a child of `os.fork` the engine stays the parent's: handles that were open end in `error`,
    calls raise EngineClosedError, and neither `close` nor the child's end touches it.
    The class is large because everything that callers do with an engine is found here.
    """

    def __init__(self, client: Client, tokenizer: Any, policy: Any, config: EngineConfig) -> None:
        self.model_name = client.info.name
        self.tokenizer = tokenizer
        self.config = config
        self.policy = policy
        """As it was given. An engine in a process of its own serves a copy of a policy object."""
        self.sampling_defaults = client.info.sampling_defaults
        """Keywords of SamplingParams for requests without any, from the generation config."""
        info = client.info
        self.vocabulary = Vocabulary(tokenizer, info.shape.vocab_size, info.eos_token_ids)
        """What structured outputs are checked with."""
        self._client = client
        self.fleet = client if isinstance(client, ManyClient) else None
        collected = weakref.finalize(self, close_collected, client)
        collected.atexit = False  # the client closes itself then

    # -- making one

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        policy: str | Any = "qllm2",
        policy_settings: Mapping[str, Any] | None = None,
        device: str = "cpu",
        dtype: Any = None,
        trust_remote_code: bool = False,
        load_format: str = "auto",
        threads: Threads = None,
        run_in: str = "process",
        listen: str | None = None,
        meeting: Meeting | None = None,
        takes_digest: bool = False,
        **settings: Any,
    ) -> Self:
        """Load a model and start to serve it.

        Args:
            name_or_path: An alias ("tiny", ...), a folder of `save_pretrained`, or a hub id.
            policy: A policy's name (see `qllm policies`) or object.
            policy_settings: Parameters of a policy given by name.
            device: Where the model runs: "cpu", or "cuda" where torch sees a GPU.
            dtype: Of the weights; None keeps the checkpoint's.
            trust_remote_code: Run modelling code that comes with the checkpoint.
            load_format: "auto" reads weights; "dummy" makes seeded random ones.
            threads: To compute with; "auto" is the cores this process may use, None torch's choice.
            run_in: "process", one of its own, for which latency bounds are promised, or "thread".
            listen: Path of a Unix socket at which further processes `attach`; needs a process.
            meeting: Where front ends of other hosts may `connect`; needs a process.
            takes_digest: Read all weights once, to tell engines apart; always if others meet it.
            **settings: Fields of `EngineConfig`.

        Raises:
            ConfigError: A setting, alias, policy or device is unknown; known ones are listed.
            ModelError: The model cannot be found, loaded or driven safely.
        """
        config = engine_config(settings)
        count, made = num_threads(threads), load_policy(policy, policy_settings)
        device, dtype = named_device(device), named_dtype(dtype)
        if str(device) != "cpu":
            from qllm.models.loader import check_device

            check_device(device)
        check_bool("trust_remote_code", trust_remote_code)
        if run_in not in PLACES:
            raise ConfigError(f"run_in={run_in!r} is unknown; use one of {', '.join(PLACES)}")
        if not isinstance(listen, str | None):
            raise ConfigError(f"listen={listen!r} must be the path of a Unix socket, or None")
        if run_in != "process" and (listen is not None or meeting is not None or takes_digest):
            what = "a meeting" if meeting else f"{listen=}" if listen else f"{takes_digest=}"
            raise ConfigError(f"{what} needs run_in='process'")
        config.check_place(run_in, str(device))
        how = {"dtype": dtype, "device": device, "load_format": load_format}
        how |= {"trust_remote_code": trust_remote_code, "expert_weights": config.expert_weights}
        if run_in == "thread":
            from qllm.frontend.thread import ThreadClient
            from qllm.models.loader import load

            loaded = load(name_or_path, **how)
            return cls(ThreadClient(loaded, made, config, count), loaded.tokenizer, made, config)
        bars = sys.modules.get("transformers.utils.logging")  # nobody said no before an import
        start = Start(
            model=os.fspath(name_or_path),
            load=how,
            policy=policy if isinstance(policy, str) else pickled_policy(policy),
            policy_settings=policy_settings,
            config=config,
            threads=count,
            listen=listen,
            quiet=bars is not None and not bars.is_progress_bar_enabled(),
            meeting=meeting,
            takes_digest=takes_digest or listen is not None or meeting is not None,
        )
        return cls._over_rings(ProcessClient.spawn(start), made)

    @classmethod
    def attach(cls, path: str) -> Self:
        """Become a further front end of an engine that was made with `listen=path`.

        It tokenises here, has rings of its own, and its requests end when it is closed or its
        process ends; the engine stays.

        Raises:
            ConfigError: No engine listens there, or it is of another release.
        """
        return cls._over_rings(ProcessClient.attach(path), None)

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        profile: str = "tcp",
        secret_file: str | os.PathLike[str] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        trust_remote_code: bool = False,
        **fleet: Any,
    ) -> Self:
        """Become a front end of an engine on another host; it tokenises here, without weights.

        Several addresses with commas between are a fleet: see docs/fleet.md.

        Requests end when this is closed, its process ends, or the connection does. `call`,
        `checkpoint`, `restore` and `trace` are for the engine's own host.

        Args:
            address: HOST:PORT of the engine's `meeting`; in a fleet also a path (`listen`).
            profile: What the rings go over, the same on both sides: "tcp", "shm" or "rdma".
            secret_file: Holds the secret of both sides; needed unless the address is loopback.
            tokenizer: Where the tokenizer is, as `from_pretrained` takes it; by default where the
                engine found its model.
            trust_remote_code: Run code that comes with the tokenizer.
            **fleet: Arguments of `FleetClient.connect`, such as `route` (a name or function).

        Raises:
            ConfigError: A secret, NIXL, the tokenizer or a device is missing; sides differ.
            EngineClosedError: Nobody answers there, or who answers is not the engine.
        """
        check_bool("trust_remote_code", trust_remote_code)
        client = meet(address, profile, secret_file, fleet)
        where = client.hello.model if tokenizer is None else os.fspath(tokenizer)
        policy, config = client.hello.trace_meta["policy"], client.hello.config
        return cls(client, tokenizer_of(client, where, trust_remote_code), policy, config)

    @classmethod
    def _over_rings(cls, client: ProcessClient, policy: Any) -> Self:
        hello = client.hello
        tokenizer = tokenizer_of(client, hello.model, hello.trust_remote_code)
        return cls(client, tokenizer, policy, hello.config)

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any = None,
        *,
        policy: str | Any = "qllm2",
        policy_settings: Mapping[str, Any] | None = None,
        threads: Threads = None,
        **settings: Any,
    ) -> Self:
        """Serve a Hugging Face model that is already loaded, on a thread; it is not copied.

        A model object serves one engine at a time. An engine of it that was collected, is being
        closed or has crashed is waited for.

        Raises:
            ConfigError: A setting or policy is unknown; known ones are listed.
            ModelError: The model cannot be driven safely, or another engine serves it: close that
                one first, or load the model once more.
        """
        from qllm.frontend.thread import ThreadClient
        from qllm.models.loader import wrap

        config, made = engine_config(settings), load_policy(policy, policy_settings)
        thread = ThreadClient(wrap(model, tokenizer), made, config, num_threads(threads))
        return cls(thread, tokenizer, made, config)

    def now_ns(self) -> int:
        """The engine's clock: nanoseconds since it was made."""
        return self._client.now_ns()

    # -- requests

    def submit(
        self,
        prompt: Prompt,
        priority: str | int | Priority = "LS",
        max_tokens: int | str | None = None,
        *,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] | None = None,
        slo: Slo | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        cache_salt: str = "",
        cache_owner: str = "",
        cache_ttl_s: float | None = None,
        reading: MakeReading | None = None,
        **options: Any,
    ) -> Handle:
        """Hand over one request and return at once. Callable from any thread.

        Args:
            prompt: Text, a list of chat messages, or a list of token ids.
            priority: "LS", "BE" or an integer class; smaller is sooner (LS = 0, BE = 10).
            max_tokens: Most tokens to produce, and never more than fit; by default
                `default_max_tokens`; "fit" takes what fits where that setting is not made.
            sampling: How tokens are chosen; by default as the model's generation config says.
            stop: Strings that end the answer, beside those in `sampling`.
            slo: Latency targets of this request; by default `ls_slo`, if it is LS.
            timeout_s: Ends it with `timeout` when this has passed.
            request_id: A name for it in results and traces.
            cache_salt: Kept KV is shared only between requests of one salt (docs/kv.md).
            cache_owner: And of one owner, whose kept KV can be deleted (`delete_kv`).
            cache_ttl_s: Its kept KV is not displaced for so long, for the turns that follow.
            reading: Knows where the answer reasons; no stop string or stop id ends it there.
            **options: Fields of SamplingParams (`temperature=0.8`) in place of those in `sampling`.

        Raises:
            InvalidRequestError: Something about the request is wrong; nothing was submitted.
            QueueFullError: `max_waiting` requests wait already.
            EngineClosedError: The engine was closed or has crashed.
            TypeError: A keyword is unknown.
        """
        self._client.raise_if_closed()
        shape = self._client.info.shape
        token_ids = ids_that_fit(prompt, self.tokenizer, self.config, shape)
        asked = asked_sampling(sampling, options, self.sampling_defaults)
        params, max_tokens = for_one(to_sampling(asked, stop), max_tokens)
        level = priority_class(priority)
        most = most_tokens(len(token_ids), max_tokens, self.config, shape)
        targets = slo_of(slo, self.config.default_slo(level))
        check_timeout("timeout_s", timeout_s)
        check_timeout("cache_ttl_s", cache_ttl_s)
        salt = salt_digest(cache_salt, cache_owner)
        stop_ids = check_sampling(
            params, self.vocabulary, self.tokenizer, self.config.loop, most, reading is not None
        )
        with self._client.admission_lock:
            self._client.raise_if_closed()
            check_room(self.num_waiting, self.config.max_waiting)
            number = self._client.new_number()
            handle = self._handle(number, request_id, token_ids, params, reading)
            now = self.now_ns()
            deadline = None if timeout_s is None else now + int(timeout_s * NS_PER_S)
            submission = Submission(
                request_id=number,
                name=handle.request_id,
                priority=level,
                token_ids=token_ids,
                sampling=params,
                stop_ids=stop_ids,
                max_tokens=most,
                slo=targets,
                arrival_ns=now,
                deadline_ns=deadline,
                cache_salt=salt,
                cache_ttl_s=cache_ttl_s,
            )
            self._client.submit(submission, handle)
        return handle

    def check(
        self, token_ids: Sequence[int], max_tokens: int | str, params: SamplingParams
    ) -> None:
        """Refuse a prompt with its sampling as `submit` would, and submit nothing.

        Raises:
            InvalidRequestError: Something about them is wrong.
        """
        shape = self._client.info.shape
        most = most_tokens(len(token_ids), max_tokens, self.config, shape)
        check_sampling(params, self.vocabulary, self.tokenizer, self.config.loop, most)

    def replay(self, request: SavedRequest) -> None:
        """Go on with a request that another engine has left unfinished (see `RequestLog`)."""
        self._client.replay(request)

    def _handle(
        self,
        number: RequestId,
        request_id: str | None,
        token_ids: tuple[int, ...],
        params: SamplingParams,
        reading: MakeReading | None = None,
    ) -> Handle:
        check_request_id(request_id)
        return Handle(
            number=number,
            request_id=request_id or f"request-{number}",
            prompt_token_ids=token_ids,
            detokenizer=Detokenizer.of(
                self.tokenizer, params, token_ids, self.vocabulary.eos_token_ids, reading
            ),
            cancel=self._client.cancel,
            status=self._client.status,
            update=self._client.update,
            revise=self._client.revise,
        )

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the engine's thread, between two programs, and return its result.

        It is pickled for an engine in a process of its own, and so are its result and error.
        """
        return self._client.call(function)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no new requests and wait for the open ones; False if time ran out first.

        From now on `submit` raises EngineClosedError, here and at every other front end.
        """
        self._client.drain()
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        for handle in self._client.open_handles():
            left = deadline - time.monotonic()
            try:
                handle.result(None if left == math.inf else max(0.0, left))
            except TimeoutError:
                return False
            except RequestFailedError:
                continue
        return True

    def end_if_stuck(self, after_s: float) -> None:
        """Kill the engine's process once it has work and has not come round for so long.

        Its requests end in `error` and `failure` says why. It comes round between two passes, so
        leave more time than the longest takes. Time in which this process stands still too (a
        suspended machine) does not count.

        Raises:
            ConfigError: The engine has no process that is ours.
        """
        self._client.end_if_stuck(after_s)

    def close(self) -> None:
        """Stop serving. Requests in flight end as `cancelled`. Twice is once.

        An engine's process that does not end in time is killed; calls that wait for it raise
        EngineClosedError. In a child of `os.fork` this does nothing.
        """
        self._client.close()

    def __repr__(self) -> str:
        try:
            self._client.raise_if_closed()
            state = f"{len(self._client.open_handles())} requests in flight"
        except EngineClosedError:
            state = "closed"
        return f"{type(self).__name__}({self.model_name!r}, {state})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- checkpoints

    def checkpoint(self, path: str | os.PathLike[str]) -> int:
        """Write every unfinished request, mid-pass and KV included, to one safetensors file.

        The requests go on. Returns how many were written.
        """
        return self._client.checkpoint(path)

    def restore(self, path: str | os.PathLike[str]) -> list[Handle]:
        """Finish the requests of a checkpoint here, without log-probabilities, in the time left.

        Raises:
            CheckpointError: The file is truncated or of another version or model, or does not fit.
        """
        return self._client.restore(path, self._handle)

    # -- what the outside may read

    def raise_if_closed(self) -> None:
        """Return if the engine serves.

        Raises:
            EngineClosedError: It was closed or has crashed (then the cause says why).
        """
        self._client.raise_if_closed()

    @property
    def client(self) -> Client:
        """What reaches the engine, for who carries requests of others to it."""
        return self._client

    @property
    def trace(self) -> Trace:
        """Events of the run, kept if the engine was made with `record=True`."""
        return self._client.trace

    @property
    def failure(self) -> str | None:
        """Why the engine ended by itself: a supervisor makes a new one. None while it serves."""
        return self._client.failure

    @property
    def num_waiting(self) -> int:
        """Requests that hold no KV yet."""
        return self._client.num_waiting

    @property
    def drivers(self) -> tuple[str, ...]:
        """Per layer: "fast", "hooked", "dense" or "around" (see `Driver`)."""
        return self._client.info.drivers

    @property
    def kernels(self) -> dict[str, str]:
        """What computes experts, projections, head and attention."""
        return self._client.info.kernels

    def statuses(self, handles: Sequence[Handle]) -> list[RequestStatus]:
        """Where requests of this engine are, all in one question to its process."""
        told = self._client.statuses([handle.number for handle in handles]) if handles else []
        done = RequestStatus.FINISHED
        return [done if h.finish_reason else x for h, x in zip(handles, told, strict=True)]

    def stats(self) -> dict[str, Any]:
        """Numbers of the run so far: the longest segment, preempt latencies, policy errors."""
        return self._client.stats()

    def watch(self, since: int = 0, whole: bool = True) -> dict[str, Any]:
        """What the passes did after entry `since`, for a live page; see `qllm.engine.watch`."""
        return self._client.watch(since, whole)
