"""`QLLMEngine`: a model, a policy and a loop, behind `submit`.

with QLLMEngine.from_pretrained("tiny") as engine:
    batch = engine.submit("Summarise: ...", priority="BE", max_tokens=256)
    chat = engine.submit([{"role": "user", "content": "Hi"}], priority="LS")
    for piece in chat:
        print(piece.text, end="")
    print(batch.result(timeout=60).metrics)
"""

import itertools
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from qllm import portable
from qllm.config import EngineConfig, engine_config
from qllm.decision import Limits
from qllm.detokenizer import Detokenizer
from qllm.engine import EngineLoop
from qllm.errors import (
    ConfigError,
    InvalidRequestError,
    QueueFullError,
)
from qllm.handle import Handle, Result
from qllm.host import ThreadHost, torch_threads
from qllm.ingress import Cancel, InprocIngress, Submission
from qllm.metrics import RequestMetrics
from qllm.models.conformance import check as check_conformance
from qllm.models.loader import LoadedModel, load, wrap
from qllm.plugins import cap_names, degraded, load_policy
from qllm.prompts import to_token_ids
from qllm.runner import TorchRunner
from qllm.scheduler import Scheduler
from qllm.trace import Trace
from qllm.types import (
    NS_PER_MS,
    NS_PER_S,
    FinishReason,
    Priority,
    Prompt,
    RequestId,
    RequestStatus,
    Sampled,
    SamplingParams,
    Slo,
)

PRIORITY_LIMIT = 1 << 20


class QLLMEngine:
    """Serves one model to requests of several classes. Make it with a `from_` method.

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self, loaded: LoadedModel, policy: Any, config: EngineConfig, *, threads: int | None = None
    ) -> None:
        self.model_name = loaded.name
        self.tokenizer = loaded.tokenizer
        self.config = config
        self.policy = policy
        self._eos_ids = loaded.eos_token_ids
        self.sampling_defaults = loaded.generation_defaults
        """Keywords of SamplingParams for requests without any, from the generation config."""
        self._zero_ns = time.monotonic_ns()
        with torch_threads(threads):
            self._runner = TorchRunner(
                loaded.model,
                max_segment_ms=config.max_segment_ms,
                batch_invariant=config.batch_invariant,
                kernels=config.kernels,
            )
            if config.conformance:
                check_conformance(loaded.model, self._runner)
        segment_ns = min(config.max_segment_ms, 1e6) * NS_PER_MS
        limits = Limits(
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=config.max_step_tokens,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            grain=config.grain,
            max_segment_ns=int(segment_ns),
            batch_invariant=config.batch_invariant,
        )
        self._ingress = InprocIngress(self.now_ns)
        meta = {"model": self.model_name, "policy": repr(policy)}
        if degraded(policy):
            meta["degraded_without"] = cap_names(degraded(policy))
        self.trace = Trace(meta=meta)
        """Events of the run, kept if the engine was made with `record=True`."""
        self._loop = EngineLoop(
            self._ingress,
            Scheduler(policy, self._runner.shape, self._runner.cuts, limits),
            self._runner,
            self,
            self.now_ns,
            record=self.trace if config.record else None,
            fallback=load_policy("fcfs") if config.on_policy_error == "fcfs" else None,
        )
        self._handles: dict[RequestId, Handle] = {}
        self._numbers = itertools.count()
        self._host = ThreadHost(self._loop, self._ingress, lambda: self._handles, threads)

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
        **settings: Any,
    ) -> Self:
        """Load a model and start to serve it.

        Args:
            name_or_path: An alias ("mixtral", "tiny", ...), a local folder as `save_pretrained`
                writes it, or a hub id.
            policy: A policy's name (see `qllm policies`) or object.
            policy_settings: Parameters of a policy given by name.
            device: Where the model runs. This release drives "cpu".
            dtype: Of the weights; None keeps the checkpoint's.
            trust_remote_code: Run modelling code that comes with the checkpoint.
            load_format: "auto" reads weights; "dummy" makes seeded random ones.
            threads: Threads torch computes with; None leaves torch's choice.
            **settings: Fields of `EngineConfig`.

        Raises:
            ConfigError: A setting, alias, policy or device is unknown; known ones are listed.
            ModelError: The model cannot be found, loaded or driven safely.
        """
        config = engine_config(settings)
        made = load_policy(policy, policy_settings)
        if str(device).split(":")[0] != "cpu":
            raise ConfigError(
                f"device={device!r} cannot be driven yet; use device='cpu' (the CUDA runner is "
                "not part of this release)"
            )
        loaded = load(
            name_or_path,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            load_format=load_format,
        )
        return cls(loaded, made, config, threads=threads)

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
        """Serve a Hugging Face model that is already loaded; it is not copied."""
        config = engine_config(settings)
        return cls(
            wrap(model, tokenizer), load_policy(policy, policy_settings), config, threads=threads
        )

    def now_ns(self) -> int:
        """The engine's clock: nanoseconds since it was made."""
        return time.monotonic_ns() - self._zero_ns

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
        shape = self._runner.shape
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
            stop_ids |= self._eos_ids
        level, most = _priority(priority), self._max_tokens(len(token_ids), max_tokens)
        with self._host.door:
            self._host.raise_if_closed()
            if self.num_waiting >= self.config.max_waiting:
                raise QueueFullError(
                    f"{self.num_waiting} requests wait already (max_waiting="
                    f"{self.config.max_waiting}); try again later"
                )
            number = next(self._numbers)
            handle = self._handle(number, request_id, token_ids, params)
            self._handles[number] = handle
            now = self.now_ns()
            deadline = None if timeout_s is None else now + int(timeout_s * NS_PER_S)
            self._ingress.put(
                Submission(
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
            )
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
            "the model's longest sequence": self._runner.shape.max_position,
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
            cancel=self._cancel,
            status=self._status,
        )

    def _cancel(self, number: RequestId) -> None:
        self._ingress.put(Cancel(number))

    def _status(self, number: RequestId) -> RequestStatus:
        live = self._loop.live.get(number)
        return RequestStatus.WAITING if live is None else live.request.status

    # -- sink of the loop

    def on_token(self, sampled: Sampled, at_ns: int) -> bool:
        """Called by the loop."""
        return self._handles[sampled.request_id].on_token(sampled)

    def on_finish(
        self,
        request_id: RequestId,
        reason: FinishReason,
        error: str | None,
        metrics: RequestMetrics | None,
    ) -> None:
        """Called by the loop."""
        self._handles.pop(request_id).on_finish(reason, error, metrics)

    # -- the host

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the engine's thread, between two programs, and return its result."""
        return self._host.call(function)

    def close(self) -> None:
        """Stop serving. Requests in flight end as `cancelled`. Twice is once."""
        self._host.close()
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- checkpoints

    def checkpoint(self, path: str | os.PathLike[str]) -> int:
        """Write every unfinished request, mid-pass and KV included, to one safetensors file.

        The requests go on. Returns how many were written.
        """
        return int(self.call(lambda: portable.save(self._loop, self._runner, path)))

    def restore(self, path: str | os.PathLike[str]) -> list[Handle]:
        """Take over the requests of a checkpoint, to be finished here from where they were.

        Raises:
            CheckpointError: The file is truncated, of another version, or of another model.
        """

        def adopt(name: str, prompt: tuple[int, ...], params: SamplingParams) -> Handle:
            with self._host.door:
                number = next(self._numbers)
                handle = self._handle(number, name, prompt, params)
                self._handles[number] = handle
            return handle

        return list(
            self.call(lambda: portable.load(self._loop, self._runner, path, adopt, self.now_ns()))
        )

    # -- what the outside may read

    def raise_if_closed(self) -> None:
        """Return if the engine serves.

        Raises:
            EngineClosedError: It was closed or has crashed (then the cause says why).
        """
        self._host.raise_if_closed()

    @property
    def num_waiting(self) -> int:
        """Requests that hold no KV yet."""
        known = self._loop.live
        unseen = sum(1 for number in list(self._handles) if number not in known)
        return unseen + self._loop.num_waiting

    @property
    def drivers(self) -> tuple[str, ...]:
        """Per layer: "fast", "replay" or "dense"."""
        return tuple(str(d) for d in self._runner.drivers)

    @property
    def kernels(self) -> dict[str, str]:
        """What computes experts, projections, head and attention."""
        return self._runner.compute.names

    def stats(self) -> dict[str, Any]:
        """Numbers of the run so far: segments, preempt latencies, expert bytes, policy errors."""
        longest_ms, kind = self._loop.longest_segment()
        return {
            "longest_segment_ms": longest_ms,
            "longest_segment_kind": kind,
            "max_segment_ms": self.config.max_segment_ms,
            "preempt_latencies_ms": [
                ns / 1e6
                for ns in list(self._loop.preempt_latencies_ns)  # the loop's thread appends
            ],
            "expert_bytes": self._runner.expert_bytes,
            "num_preemptions": self._loop.num_preemptions,
            "kv_blocks_used": self.config.num_blocks - self._loop.scheduler.pool.num_free,
            "kv_blocks": self.config.num_blocks,
            "policy_errors": list(self._loop.policy_errors),
            "longest_plan_ms": self._loop.longest_plan_ns / NS_PER_MS,
            "num_live": len(self._loop.live),
            "num_waiting": self.num_waiting,
        }


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
