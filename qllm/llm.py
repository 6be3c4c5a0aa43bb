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
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from transformers.utils.logging import is_progress_bar_enabled

from qllm.config import EngineConfig, engine_config
from qllm.detokenizer import Detokenizer
from qllm.engine_process import Start, pickled_policy
from qllm.errors import ConfigError, InvalidRequestError, QueueFullError, RequestFailedError
from qllm.handle import Handle, Result
from qllm.host import Host
from qllm.ingress import Submission
from qllm.models.loader import check_device, load, load_tokenizer, wrap
from qllm.plugins import load_policy
from qllm.process_host import ProcessHost
from qllm.prompts import to_token_ids
from qllm.thread_host import ThreadHost
from qllm.trace import Trace
from qllm.types import (
    NS_PER_S,
    Priority,
    Prompt,
    RequestId,
    SamplingParams,
    Slo,
)

HOSTS = ("process", "thread")
DEVICES = ("cpu", "cuda")
PRIORITY_LIMIT = 1 << 20


class QLLMEngine:
    """Serves one model to requests of several classes. Make it with a `from_` method.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, host: Host, tokenizer: Any, policy: Any, config: EngineConfig) -> None:
        self.model_name = host.info.name
        self.tokenizer = tokenizer
        self.config = config
        self.policy = policy
        """As it was given. A policy object of a process host is served by a copy of it."""
        self.sampling_defaults = host.info.sampling_defaults
        """Keywords of SamplingParams for requests without any, from the generation config."""
        self._host = host

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
        threads: int | None = None,
        host: str = "process",
        listen: str | None = None,
        **settings: Any,
    ) -> Self:
        """Load a model and start to serve it.

        Args:
            name_or_path: An alias ("mixtral", "tiny", ...), a local folder as `save_pretrained`
                writes it, or a hub id.
            policy: A policy's name (see `qllm policies`) or object.
            policy_settings: Parameters of a policy given by name.
            device: Where the model runs: "cpu", or "cuda" where torch sees a GPU.
            dtype: Of the weights; None keeps the checkpoint's.
            trust_remote_code: Run modelling code that comes with the checkpoint.
            load_format: "auto" reads weights; "dummy" makes seeded random ones.
            threads: Threads torch computes with; None leaves torch's choice.
            host: Where the engine runs: "process", a process of its own, for which the latency
                bounds are promised; or "thread", in this one.
            listen: Path of a Unix socket at which further processes `attach`; needs a process.
            **settings: Fields of `EngineConfig`.

        Raises:
            ConfigError: A setting, alias, policy or device is unknown; known ones are listed.
            ModelError: The model cannot be found, loaded or driven safely.
        """
        config = engine_config(settings)
        made = load_policy(policy, policy_settings)
        if str(device).split(":")[0] not in DEVICES:
            raise ConfigError(f"device={device!r} is unknown; use one of {', '.join(DEVICES)}")
        check_device(device)
        if host not in HOSTS:
            raise ConfigError(f"host={host!r} is unknown; use one of {', '.join(HOSTS)}")
        if listen is not None and host != "process":
            raise ConfigError(f"listen={listen!r} needs host='process'")
        how = {
            "dtype": dtype,
            "device": device,
            "trust_remote_code": trust_remote_code,
            "load_format": load_format,
        }
        if host == "thread":
            loaded = load(name_or_path, **how)
            return cls(ThreadHost(loaded, made, config, threads), loaded.tokenizer, made, config)
        start = Start(
            model=os.fspath(name_or_path),
            load=how,
            policy=policy if isinstance(policy, str) else pickled_policy(policy),
            policy_settings=policy_settings,
            config=config,
            threads=threads,
            listen=listen,
            quiet=not is_progress_bar_enabled(),
        )
        return cls._over_rings(ProcessHost.spawn(start), made)

    @classmethod
    def attach(cls, path: str) -> Self:
        """Become a further front end of an engine that was made with `listen=path`.

        It tokenises here, has rings of its own, and its requests end when it is closed or its
        process ends; the engine stays.

        Raises:
            ConfigError: No engine listens there, or it is of another release.
        """
        return cls._over_rings(ProcessHost.attach(path), None)

    @classmethod
    def _over_rings(cls, host: ProcessHost, policy: Any) -> Self:
        hello = host.hello
        try:
            tokenizer = load_tokenizer(hello.model, trust_remote_code=hello.trust_remote_code)
        except BaseException:
            host.close()
            raise
        return cls(host, tokenizer, policy, hello.config)

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any = None,
        *,
        policy: str | Any = "qllm2",
        policy_settings: Mapping[str, Any] | None = None,
        threads: int | None = None,
        **settings: Any,
    ) -> Self:
        """Serve a Hugging Face model that is already loaded, on a thread; it is not copied."""
        config, made = engine_config(settings), load_policy(policy, policy_settings)
        return cls(
            ThreadHost(wrap(model, tokenizer), made, config, threads), tokenizer, made, config
        )

    def now_ns(self) -> int:
        """The engine's clock: nanoseconds since it was made."""
        return self._host.now_ns()

    # -- requests

    def submit(
        self,
        prompt: Prompt,
        priority: str | int | Priority = "LS",
        max_tokens: int | None = None,
        *,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] | None = None,
        slo: Slo | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Handle:
        """Hand over one request and return at once. Callable from any thread.

        Args:
            prompt: Text, a list of chat messages, or a list of token ids.
            priority: "LS", "BE" or an integer class; smaller is sooner (LS = 0, BE = 10).
            max_tokens: Most tokens to produce; by default `default_max_tokens`, cut to what fits.
            sampling: How tokens are chosen; by default as the model's generation config says.
            stop: Strings that end the answer, beside those in `sampling`.
            slo: Latency targets of this request.
            timeout_s: Ends it with `timeout` when this has passed.
            request_id: A name for it in results and traces.

        Raises:
            InvalidRequestError: Something about the request is wrong; nothing was submitted.
            QueueFullError: `max_waiting` requests wait already.
            EngineClosedError: The engine was closed or has crashed.
        """
        self._host.raise_if_closed()
        shape = self._host.info.shape
        token_ids = to_token_ids(prompt, self.tokenizer, shape.vocab_size)
        params = self._params(sampling, stop)
        wrong = [i for i in (*params.stop_token_ids, *params.logit_bias) if i >= shape.vocab_size]
        if wrong:
            raise InvalidRequestError(
                f"token id {wrong[0]} in sampling must be in [0, {shape.vocab_size})"
            )
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError("stop strings need a tokenizer; use stop_token_ids")
        targets = _slo(slo)
        if timeout_s is not None and not _is_positive(timeout_s):
            raise InvalidRequestError(
                f"timeout_s={timeout_s!r} must be a finite number > 0, or None"
            )
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self._host.info.eos_token_ids
        level, most = _priority(priority), self._max_tokens(len(token_ids), max_tokens)
        with self._host.door:
            self._host.raise_if_closed()
            if self.num_waiting >= self.config.max_waiting:
                raise QueueFullError(
                    f"{self.num_waiting} requests wait already (max_waiting="
                    f"{self.config.max_waiting}); try again later"
                )
            number = self._host.new_number()
            handle = self._handle(number, request_id, token_ids, params)
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
            )
            self._host.submit(submission, handle)
        return handle

    def generate(
        self,
        prompts: Iterable[Prompt],
        priority: str | int | Priority = "BE",
        max_tokens: int | None = None,
        *,
        sampling: SamplingParams | None = None,
        progress: bool = True,
        **kwargs: Any,
    ) -> list[Result]:
        """Run a list to its end, with a progress display; results in the order of the prompts."""
        from rich.progress import track

        waiting = list(prompts)
        handles: list[Handle] = []
        results: list[Result] = []
        try:
            for done in track(
                range(len(waiting)), description="requests", transient=True, disable=not progress
            ):
                while len(handles) < len(waiting) and len(handles) - done < self.config.max_waiting:
                    prompt = waiting[len(handles)]
                    handles.append(
                        self.submit(prompt, priority, max_tokens, sampling=sampling, **kwargs)
                    )
                results.append(handles[done].result())
        finally:  # nobody will read the rest if one was refused or failed
            for handle in handles[len(results) :]:
                handle.cancel()
        return results

    def _params(
        self, sampling: SamplingParams | None, stop: str | Sequence[str] | None
    ) -> SamplingParams:
        if sampling is None:
            sampling = SamplingParams(**{"temperature": 0.0, **self.sampling_defaults})
        if not isinstance(sampling, SamplingParams):
            raise InvalidRequestError(f"sampling={sampling!r} must be SamplingParams, or None")
        changes: dict[str, Any] = {}
        if stop is not None:
            if not isinstance(stop, str | Sequence):
                raise InvalidRequestError(f"stop={stop!r} must be a string or a list of them")
            changes["stop"] = (*sampling.stop, *((stop,) if isinstance(stop, str) else stop))
        if sampling.seed is None:
            changes["seed"] = secrets.randbits(62)
        if not changes:
            return sampling
        values = {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}
        return SamplingParams(**{**values, **changes})

    def _max_tokens(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        limits = {
            "max_kv_tokens": self.config.num_blocks * self.config.block_size,
            "the model's longest sequence": self._host.info.shape.max_position,
        }
        name, most = min(limits.items(), key=lambda item: item[1])
        if num_prompt_tokens >= most:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens; with at least one to produce it must "
                f"be shorter than {most} ({name})"
            )
        if max_tokens is None:
            return min(self.config.default_max_tokens, most - num_prompt_tokens)
        if not _is_int(max_tokens) or max_tokens < 1:
            raise InvalidRequestError(f"max_tokens={max_tokens!r} must be an integer >= 1")
        if num_prompt_tokens + max_tokens > most:
            raise InvalidRequestError(
                f"{num_prompt_tokens} prompt tokens and max_tokens={max_tokens} exceed {most} "
                f"({name}); ask for at most {most - num_prompt_tokens}"
            )
        return int(max_tokens)

    def _handle(
        self,
        number: RequestId,
        request_id: str | None,
        token_ids: tuple[int, ...],
        params: SamplingParams,
    ) -> Handle:
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise InvalidRequestError(f"request_id={request_id!r} must be a non-empty string")
        tokenizer = self.tokenizer
        return Handle(
            number=number,
            request_id=request_id or f"request-{number}",
            prompt_token_ids=token_ids,
            detokenizer=None if tokenizer is None else Detokenizer(tokenizer, params.stop),
            stop_on_text=bool(params.stop),
            cancel=self._host.cancel,
            status=self._host.status,
        )

    # -- the host

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the engine's thread, between two programs, and return its result.

        Over a process host it is pickled, and so are its result and its error.
        """
        return self._host.call(function)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no new requests and wait for the open ones; False if time ran out first.

        From now on `submit` raises EngineClosedError, here and at every other front end.
        """
        self._host.drain()
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        for handle in list(self._host.handles.values()):
            left = deadline - time.monotonic()
            try:
                handle.result(None if left == math.inf else max(0.0, left))
            except TimeoutError:
                return False
            except RequestFailedError:
                continue
        return True

    def close(self) -> None:
        """Stop serving. Requests in flight end as `cancelled`. Twice is once."""
        self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- checkpoints

    def checkpoint(self, path: str | os.PathLike[str]) -> int:
        """Write every unfinished request, mid-pass and KV included, to one safetensors file.

        The requests go on. Returns how many were written.
        """
        return self._host.checkpoint(path)

    def restore(self, path: str | os.PathLike[str]) -> list[Handle]:
        """Take over the requests of a checkpoint, to be finished here from where they were.

        Raises:
            CheckpointError: The file is truncated, of another version, or of another model.
        """
        return self._host.restore(path, self._handle)

    # -- what the outside may read

    def raise_if_closed(self) -> None:
        """Return if the engine serves.

        Raises:
            EngineClosedError: It was closed or has crashed (then the cause says why).
        """
        self._host.raise_if_closed()

    @property
    def trace(self) -> Trace:
        """Events of the run, kept if the engine was made with `record=True`."""
        return self._host.trace

    @property
    def failure(self) -> str | None:
        """Why the engine ended by itself: a supervisor makes a new one. None while it serves."""
        return self._host.failure

    @property
    def num_waiting(self) -> int:
        """Requests that hold no KV yet."""
        return self._host.num_waiting

    @property
    def drivers(self) -> tuple[str, ...]:
        """Per layer: "fast", "replay" or "dense"."""
        return self._host.info.drivers

    @property
    def kernels(self) -> dict[str, str]:
        """What computes experts, projections, head and attention."""
        return self._host.info.kernels

    def stats(self) -> dict[str, Any]:
        """Numbers of the run so far: the longest segment, preempt latencies, policy errors."""
        return self._host.stats()


def _priority(value: str | int | Priority) -> int:
    if isinstance(value, str) and value.upper() in Priority.__members__:
        return int(Priority[value.upper()])
    if _is_int(value) and abs(int(value)) <= PRIORITY_LIMIT:
        return int(value)
    raise InvalidRequestError(
        f"priority={value!r} is unknown; use 'LS', 'BE' or an integer in "
        f"[-{PRIORITY_LIMIT}, {PRIORITY_LIMIT}] (smaller is sooner; LS = 0, BE = 10)"
    )


def _is_int(value: Any) -> bool:
    """An integer of any kind (numpy's too), but no bool."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


def _slo(value: Any) -> Slo:
    if value is None:
        return Slo()
    if not isinstance(value, Slo):
        raise InvalidRequestError(f"slo={value!r} must be an Slo(ttft_ms, tpot_ms), or None")
    wrong = [name for name, t in value._asdict().items() if t is not None and not _is_positive(t)]
    if wrong:
        raise InvalidRequestError(
            f"slo={value!r}: {wrong[0]} must be a finite number of milliseconds > 0, or None"
        )
    return value
