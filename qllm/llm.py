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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from qllm.config import EngineConfig, check_bool, engine_config, named_device, named_dtype
from qllm.cores import Threads, num_threads
from qllm.errors import ConfigError, EngineClosedError, RequestFailedError
from qllm.fleet.client import meet
from qllm.frontend.checks import (
    check_request_id,
    check_room,
    check_timeout,
    kv_tag,
    most_tokens,
    priority_class,
    salt_digest,
    slo_of,
)
from qllm.frontend.client import Client, ManyClient, close_collected
from qllm.frontend.detokenizer import Detokenizer, MakeReading
from qllm.frontend.handle import Handle, Result
from qllm.frontend.offline import class_and_sampling, each_answer, render_chats, run_all
from qllm.frontend.process import ProcessClient
from qllm.frontend.prompts import (
    SAMPLING_OPTIONS,
    asked_sampling,
    check_sampling,
    for_one,
    ids_that_fit,
    to_sampling,
    with_prediction,
)
from qllm.frontend.saved_request import SavedRequest
from qllm.frontend.streaming_prompt import NO_OPTIONS, PromptEngine, StreamingPrompt, open_prompt
from qllm.frontend.tokenizer import tokenizer_of
from qllm.grammar import Vocabulary
from qllm.ingress import Submission
from qllm.ingress.messages import Start
from qllm.ingress.remote.meeting import Meeting
from qllm.plugins import load_policy, pickled_policy
from qllm.record.trace import Trace
from qllm.types import (
    NS_PER_S,
    Message,
    Priority,
    Prompt,
    RequestId,
    RequestStatus,
    SamplingParams,
    Slo,
)

PLACES = ("process", "thread")


class QLLMEngine:
    """An engine that serves one model to requests of several classes. A `from_` method makes it.

    Use an engine as a context manager, or call `close`. An engine that is garbage collected is
    closed too: handles of unfinished requests, which callers may still hold, end as `cancelled`.

    After `os.fork` the engine belongs to the parent. In the child, handles of unfinished requests
    end in `error`, and calls raise EngineClosedError. `close` and the child's exit do not change
    the engine.
    """

    def __init__(self, client: Client, tokenizer: Any, policy: Any) -> None:
        self.model_name = client.info.name
        self.tokenizer = tokenizer
        self.policy = policy
        """Policy that the caller gave. An engine in a process of its own uses a copy of a policy
        object."""
        self.sampling_defaults = client.info.sampling_defaults
        """Defaults of SamplingParams from the generation config, for requests without settings."""
        info = client.info
        self.vocabulary = Vocabulary(tokenizer, info.shape.vocab_size, info.eos_token_ids)
        """Vocabulary that checks structured outputs."""
        self._client = client
        self.fleet = client if isinstance(client, ManyClient) else None
        collected = weakref.finalize(self, close_collected, client)
        collected.atexit = False  # at exit the client closes itself

    @property
    def config(self) -> EngineConfig:
        """Settings of the engine, with the sizes that it chose; of a fleet, the smallest sizes."""
        return self._client.config

    # -- constructors

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
            policy: Name of a policy (see `qllm policies`), or a policy object.
            policy_settings: Parameters of a policy given by name.
            device: Device of the model: "cpu", or "cuda" where torch sees a GPU.
            dtype: Type of the weights; None keeps the type of the checkpoint.
            trust_remote_code: True runs modelling code that comes with the checkpoint.
            load_format: "auto" reads weights; "dummy" makes seeded random weights.
            threads: Number of threads. "auto" is the cores that this process may use; None is
                torch's number.
            run_in: "process" runs the engine in a process of its own, with promised latency bounds;
                "thread" runs it on a thread of this process.
            listen: Path of a Unix socket at which further processes `attach`; needs
                `run_in="process"`.
            meeting: Address at which front ends of other hosts `connect`; needs `run_in="process"`.
            takes_digest: True reads all weights once, for a digest that identifies the weights. It
                is always True with `listen` or `meeting`.
            **settings: Fields of `EngineConfig`. With `depth`, only the first layers are loaded,
                which can change answers.

        Raises:
            ConfigError: A setting, alias, policy or device is unknown; the message lists the known
                ones. Or the model has fewer layers than `depth`.
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
        how |= {"tp": config.tp, "depth": config.depth}
        if config.max_expert_bytes is not None:
            how["expert_place"] = config.expert_dir, config.max_expert_bytes
        if run_in == "thread":
            from qllm.frontend.thread import ThreadClient
            from qllm.models.loader import load

            loaded = load(name_or_path, **how)
            return cls(ThreadClient(loaded, made, config, count), loaded.tokenizer, made)
        # progress bars are on if the module is not imported yet
        bars = sys.modules.get("transformers.utils.logging")
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
        """Return a further front end of an engine that was made with `listen=path`.

        The front end tokenises in this process and has rings of its own. Its requests end when it
        is closed or this process ends. The engine continues.

        Raises:
            ConfigError: No engine listens at the path, or the engine has another release.
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
        """Return a front end of an engine on another host. It tokenises here, without weights.

        Several addresses, separated by commas, are a fleet: see docs/guides/several-engines.md.

        The front end's requests end when it is closed, this process ends, or the connection fails.
        `call`, `checkpoint`, `restore` and `trace` work only on the engine's own host.

        Args:
            address: HOST:PORT of the engine's `meeting`; in a fleet also the path of an engine's
                `listen`.
            profile: Transport of the rings: "tcp", "shm" or "rdma". Engine and front end need the
                same.
            secret_file: File with the secret that engine and front end share; needed unless the
                address is loopback.
            tokenizer: Alias, folder or hub id of the tokenizer, as in `from_pretrained`; by default
                the engine's model.
            trust_remote_code: True runs code that comes with the tokenizer.
            **fleet: Arguments of `FleetClient.connect`, such as `route` (a name or function).

        Raises:
            ConfigError: A secret, NIXL, the tokenizer or a device is missing, or engine and front
                end do not match.
            EngineClosedError: No engine answers at the address.
        """
        check_bool("trust_remote_code", trust_remote_code)
        client = meet(address, profile, secret_file, fleet)
        where = client.hello.model if tokenizer is None else os.fspath(tokenizer)
        tokenizer = tokenizer_of(client, where, trust_remote_code)
        return cls(client, tokenizer, client.hello.trace_meta["policy"])

    @classmethod
    def _over_rings(cls, client: ProcessClient, policy: Any) -> Self:
        hello = client.hello
        tokenizer = tokenizer_of(client, hello.model, hello.trust_remote_code)
        return cls(client, tokenizer, policy)

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
        """Serve a Hugging Face model that is already loaded, on a thread and without a copy.

        The model is served whole. The setting `depth` is refused, because the caller's model would
        lose its further layers.

        One engine at a time can serve a model object. If an earlier engine of the model was garbage
        collected, is being closed or has crashed, this call waits for that engine's end.

        Raises:
            ConfigError: A setting or policy is unknown; the message lists the known ones. Or
                `depth` is given.
            ModelError: The model cannot be driven safely, or another engine serves it: close that
                engine first, or load the model again.
        """
        from qllm.frontend.thread import ThreadClient
        from qllm.models.loader import wrap

        config, made = engine_config(settings), load_policy(policy, policy_settings)
        if config.max_expert_bytes is not None:
            raise ConfigError(
                f"max_expert_bytes={config.max_expert_bytes} is for a model that the engine loads; "
                "use from_pretrained, or leave it and expert_dir out"
            )
        thread = ThreadClient(wrap(model, tokenizer), made, config, num_threads(threads))
        return cls(thread, tokenizer, made)

    def now_ns(self) -> int:
        """Return the engine's clock, in nanoseconds since its start."""
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
        """Submit one request and return its handle at once. Any thread may call it.

        Args:
            prompt: Text, a list of chat messages, or a list of token ids.
            priority: "LS", "BE" or an integer class; smaller is sooner (LS = 0, BE = 10).
            max_tokens: Most tokens to produce, and never more than the room for an answer. The
                default is `default_max_tokens`. "fit" takes that setting, or all the room if the
                setting is not given.
            sampling: Settings of sampling; by default those of the model's generation config.
            stop: Strings that end the answer, in addition to those in `sampling`.
            slo: Latency targets of this request. The default for LS requests is `ls_slo`.
            timeout_s: Seconds after which the request ends with `timeout`.
            request_id: Name of the request in results and traces.
            cache_salt: Salt of cached KV. Only requests with the same salt share cached KV.
            cache_owner: Owner of cached KV. Only requests of the same owner share cached KV, and
                `delete_kv` deletes it.
            cache_ttl_s: Seconds for which the request's cached KV is not displaced, so that later
                requests of a conversation find it. 0 caches no KV of the request.
            reading: Factory of a reader that finds the reasoning in an answer. Inside reasoning, no
                stop string or stop id ends the answer.
            **options: Fields of SamplingParams (`temperature=0.8`) in place of those in `sampling`.

        Raises:
            InvalidRequestError: An argument is wrong. Nothing was submitted.
            QueueFullError: `max_waiting` requests wait already.
            EngineClosedError: The engine was closed or has crashed.
            TypeError: A keyword is unknown.
        """
        self._client.raise_if_closed()
        shape = self._client.info.shape
        token_ids = ids_that_fit(prompt, self.tokenizer, self.config, shape)
        asked = asked_sampling(sampling, options, self.sampling_defaults)
        params, max_tokens = for_one(to_sampling(asked, stop), max_tokens)
        params = with_prediction(params, self.tokenizer, self.config)
        level = priority_class(priority)
        most = most_tokens(len(token_ids), max_tokens, self.config, shape)
        targets = slo_of(slo, self.config.default_slo(level))
        check_timeout("timeout_s", timeout_s)
        check_timeout("cache_ttl_s", cache_ttl_s, zero=True)
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

    def open(
        self,
        priority: str | int | Priority = "LS",
        prompt: Prompt = "",
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        cache_owner: str = "",
        template: Mapping[str, Any] = NO_OPTIONS,
    ) -> StreamingPrompt:
        """Open a streaming prompt, computed while its pieces arrive. Callable from any thread.

        A streaming prompt yields to requests of its class whose prompts are whole. The prompt stays
        open until the caller sends or cancels it. It holds KV until requests of the same class or a
        better class need the KV. If a server replaces its engine, the prompt continues in the next
        engine.

        Args:
            priority: "LS", "BE" or an integer class; smaller is sooner.
            prompt: Beginning of the prompt: text, token ids, or a list of messages. Pieces
                extend the content of the last message.
            request_id: Name of the request in results and traces.
            cache_salt: Salt as for `submit`.
            cache_owner: Owner as for `submit`.
            template: Keywords of `qllm.frontend.prompts.render_chat` for a chat, such as `tools`.

        Raises:
            InvalidRequestError: An argument is wrong. Nothing was opened.
            ConfigError: The engine's loop runs on a device.
            QueueFullError: `max_waiting` requests wait already.
            EngineClosedError: The engine was closed or has crashed.
        """
        engine = PromptEngine(
            self._client, self.tokenizer, self.vocabulary, self.config, self.sampling_defaults
        )
        return open_prompt(
            engine,
            self._handle,
            priority,
            prompt,
            request_id=request_id,
            cache_salt=cache_salt,
            cache_owner=cache_owner,
            template=template,
        )

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
            priority: Class as for `submit`. As in vLLM, this argument may also be SamplingParams.
            max_tokens: Largest number of tokens per answer, as for `submit`.
            sampling: Sampling settings. With `n`, each prompt gets `n` answers.
            progress: True to show a progress bar.
            **kwargs: Further arguments of `submit`, or fields of SamplingParams.

        Returns:
            Results in the order of the prompts. The results of one prompt follow each other.

        Raises:
            InvalidRequestError: A prompt or setting is wrong. The requests of earlier prompts are
                cancelled.
            RequestFailedError: A request ended in `error`. The other requests are cancelled.
        """
        priority, sampling = class_and_sampling(priority, sampling, "BE")
        options = {name: kwargs.pop(name) for name in SAMPLING_OPTIONS & kwargs.keys() - {"stop"}}
        sampling = asked_sampling(sampling, options, self.sampling_defaults)
        submit = partial(self.submit, priority=priority, max_tokens=max_tokens, **kwargs)
        return run_all(submit, each_answer(prompts, sampling), self.config.max_waiting, progress)

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
            priority: Class as for `submit`. As in vLLM, this argument may also be SamplingParams.
            max_tokens: Largest number of tokens per answer, as for `submit`.
            sampling: Sampling settings. With `n`, each conversation gets `n` answers.
            tools: JSON schemas of functions, for chat templates that support tools.
            chat_template_kwargs: Further variables of the model's chat template.
            add_generation_prompt: True to begin the assistant's answer.
            continue_final_message: True to let the answer continue the last message; needs
                `add_generation_prompt=False`.
            progress: True to show a progress bar.
            **kwargs: Further arguments of `submit`, or fields of SamplingParams.

        Raises:
            InvalidRequestError: A message or setting is wrong, or the template refuses it.
            RequestFailedError: A request ended in `error`. The other requests are cancelled.
        """
        priority, sampling = class_and_sampling(priority, sampling, "LS")
        prompts = render_chats(
            messages,
            self.tokenizer,
            tools=tools,
            variables=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self.generate(
            prompts, priority, max_tokens, sampling=sampling, progress=progress, **kwargs
        )

    def check(
        self, token_ids: Sequence[int], max_tokens: int | str, params: SamplingParams
    ) -> None:
        """Check a prompt and its sampling as `submit` does, and submit nothing.

        Raises:
            InvalidRequestError: The prompt or the sampling is wrong.
        """
        shape = self._client.info.shape
        most = most_tokens(len(token_ids), max_tokens, self.config, shape)
        check_sampling(params, self.vocabulary, self.tokenizer, self.config.loop, most)

    def replay(self, request: SavedRequest) -> None:
        """Continue a request that another engine left unfinished (see `RequestLog`)."""
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

        The function, its result and its error are pickled for an engine in a process of its own.
        """
        return self._client.call(function)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests and wait for unfinished requests; return False at a timeout.

        From now on `submit` raises EngineClosedError, in this and in every other front end.
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
        """Kill the engine's process if it has work and finishes no iteration for `after_s` seconds.

        The process's requests end in `error`, and `failure` has the reason. An iteration of the
        loop ends between two passes, so `after_s` must be longer than the longest pass. Time in
        which this process is also suspended does not count.

        Raises:
            ConfigError: This front end has not started the engine's process.
        """
        self._client.end_if_stuck(after_s)

    def close(self) -> None:
        """Stop serving. Unfinished requests end as `cancelled`. Idempotent.

        An engine's process that does not end in time is killed. Calls that wait for the process
        raise EngineClosedError. In a child of `os.fork` this method does nothing.
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

    # -- cached KV

    def reset_prefix_cache(self) -> None:
        """Delete all cached KV, in RAM and in the file. Unfinished requests continue."""
        self._client.reset_prefix_cache()

    def delete_kv(self, cache_salt: str | None = None, cache_owner: str = "") -> int:
        """Delete cached KV of one salt, or all cached KV of an owner; return the number of pages.

        The KV is deleted in RAM and in the file. Unfinished requests continue, but their KV is not
        cached any more.

        Args:
            cache_salt: Salt as for `submit`; None deletes every salt of the owner.
            cache_owner: Owner as for `submit`.

        Raises:
            InvalidRequestError: The salt or the owner is no text, or longer than 256 bytes.
        """
        return self._client.delete_kv(kv_tag(cache_salt, cache_owner))

    # -- checkpoints

    def checkpoint(self, path: str | os.PathLike[str]) -> int:
        """Write every unfinished request, with parked passes and KV, to one safetensors file.

        The requests continue. Returns the number of requests written.
        """
        return self._client.checkpoint(path)

    def restore(self, path: str | os.PathLike[str]) -> list[Handle]:
        """Continue the requests of a checkpoint, without log-probabilities.

        Each request keeps the time that its timeout had left.

        Raises:
            CheckpointError: The file is truncated or of another version or model, or does not fit.
        """
        return self._client.restore(path, self._handle)

    # -- state for callers

    def raise_if_closed(self) -> None:
        """Raise an error if the engine does not serve.

        Raises:
            EngineClosedError: The engine was closed, or has crashed (then `__cause__` is the
                reason).
        """
        self._client.raise_if_closed()

    @property
    def client(self) -> Client:
        """Client of the engine, for callers that forward requests of other programs."""
        return self._client

    @property
    def trace(self) -> Trace:
        """Events of the run, stored if the engine was made with `record=True`."""
        return self._client.trace

    @property
    def failure(self) -> str | None:
        """Reason why the engine ended by itself, for a supervisor; None while it serves."""
        return self._client.failure

    @property
    def num_waiting(self) -> int:
        """Number of requests that hold no KV yet."""
        return self._client.num_waiting

    @property
    def drivers(self) -> tuple[str, ...]:
        """Kind of driver per layer: "fast", "hooked", "dense" or "around" (see `Driver`)."""
        return self._client.info.drivers

    @property
    def kernels(self) -> dict[str, str]:
        """Kernels of experts, projections, head and attention."""
        return self._client.info.kernels

    def statuses(self, handles: Sequence[Handle]) -> list[RequestStatus]:
        """Return the states of requests of this engine, with one call to its process."""
        told = self._client.statuses([handle.number for handle in handles]) if handles else []
        done = RequestStatus.FINISHED
        return [done if h.finish_reason else x for h, x in zip(handles, told, strict=True)]

    def stats(self) -> dict[str, Any]:
        """Return numbers of the run so far: longest segment, preempt latencies, policy errors."""
        return self._client.stats()

    def watch(self, since: int = 0, whole: bool = True) -> dict[str, Any]:
        """Return the work of passes after entry `since`, for a live page (`qllm.engine.watch`)."""
        return self._client.watch(since, whole)
