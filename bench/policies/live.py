"""Windows of the engine under one policy and one workload: the parts of `ablation.py`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.energy import Meter, computed_tokens
from qllm import QLLMEngine
from qllm.measure.bench import corpus_of
from qllm.measure.random_moe import make_random_moe
from qllm.measure.variants import KV_SIZES
from qllm.plugins import installed_policies
from qllm.types import Priority, Slo
from qllm.workloads.capacity import Capacity, measure_capacity
from qllm.workloads.generators import Workload, offered_rates
from qllm.workloads.measure import SLO, Served, Window
from qllm.workloads.mix import send
from qllm.workloads.spec import RequestSpec
from qllm.workloads.tokens import with_tokens
from qllm.workloads.traced import engine_report, served_of


@dataclass(frozen=True, slots=True)
class Setting:
    """A policy with parameters, written `name` or `name:key=value:key=value`."""

    policy: str
    parameters: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Setting":
        """Read the written form; values are numbers, `none` or words."""
        name, *pairs = text.split(":")
        return cls(name, tuple((p.partition("=")[0], _value(p.partition("=")[2])) for p in pairs))

    @property
    def name(self) -> str:
        """Return the written form."""
        return ":".join([self.policy, *(f"{k}={v}" for k, v in self.parameters)])

    @property
    def is_installed(self) -> bool:
        """Return True if the policy is installed."""
        return self.policy in installed_policies()


def _value(text: str) -> Any:
    if text == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(slots=True)
class Bench:
    """A model, the source of its prompts, and the settings that every engine shares."""

    model: Any
    corpus: Sequence[int]
    size: str
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, size: str = "300m", **settings: Any) -> "Bench":
        """Load the random model of the demo, made on first use."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = make_random_moe(size=size, seed=0)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return cls(model, corpus_of(tokenizer), size, settings)

    def engine(self, setting: Setting | str, **changes: Any) -> QLLMEngine:
        """Start a new engine for one window."""
        if isinstance(setting, str):
            setting = Setting.parse(setting)
        return QLLMEngine.from_model(
            self.model,
            policy=setting.policy,
            policy_settings=dict(setting.parameters),
            **{
                **KV_SIZES,
                "threads": 1,
                "conformance": False,
                "record": True,
                **self.settings,
                **changes,
            },
        )

    def capacity(self, prompt_tokens: int = 512) -> Capacity:
        """Measure this machine's capacity, with the model and settings of the bench.

        Args:
            prompt_tokens: Tokens of the measured prompts; longer ones are slower per token.
        """
        with self.engine("priority") as engine:
            return measure_capacity(engine, self.corpus, prompt_tokens=prompt_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of a window, the same for every policy."""

    warmup_s: float
    window_s: float
    drain_s: float

    @property
    def total_s(self) -> float:
        """Return the seconds of one run."""
        return self.warmup_s + self.window_s + self.drain_s

    @property
    def window(self) -> Window:
        """Return the measured window."""
        end = self.warmup_s + self.window_s
        return Window(start_s=self.warmup_s, end_s=end, stop_s=self.total_s)


def run_workload(
    bench: Bench,
    setting: Setting,
    workload: Workload,
    seed: int,
    timing: Timing,
    *,
    only: Priority | None = None,
    slo: Slo = SLO,
    **changes: Any,
) -> dict[str, Any]:
    """Serve one seed of a workload and report it.

    Args:
        bench: Model and shared settings.
        setting: Policy of the engine.
        workload: Workload that lasts at least as long as the timing.
        seed: Seed of the workload.
        timing: Warm-up, window, drain; requests arrive in all three.
        only: Class to serve alone.
        slo: Targets of LS.
        **changes: Engine settings of this run.
    """
    requests = [r for r in workload.requests(seed) if only is None or r.priority == only]
    return run_requests(bench, setting, requests, timing, slo=slo, **changes) | {
        "workload": workload.name,
        "seed": seed,
        "only": None if only is None else only.name,
        "nominal_per_s": {p.name: rate for p, rate in workload.nominal_rates().items()},
    }


def run_requests(
    bench: Bench,
    setting: Setting,
    requests: Sequence[RequestSpec],
    timing: Timing,
    *,
    slo: Slo = SLO,
    be_slo: Slo | None = None,
    until_answered: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    """Serve requests and report them. Requests of BE have targets only with `be_slo`.

    Args:
        bench: Model and shared settings.
        setting: Policy of the engine.
        requests: Requests to serve.
        timing: Warm-up, window, drain.
        slo: Targets of LS.
        be_slo: Targets of BE.
        until_answered: True to end the run when all requests are answered, at the latest after the
            drain. The window is fixed. So only `took_s` and `joules` depend on it, and what is
            divided by them.
        **changes: Engine settings of this run.
    """
    begin = time.monotonic()
    arrivals = with_tokens(requests, bench.corpus)
    with bench.engine(setting, **changes) as engine:
        meter = Meter()
        run = send(engine, arrivals, timing.total_s, until_answered=until_answered)
        joules = meter.joules()
        stats = engine.stats()
        policy = repr(engine.policy)
        bound = getattr(engine.policy, "max_be_stall_ms", None)
    window = timing.window
    slos = {Priority.LS: slo} | ({} if be_slo is None else {Priority.BE: be_slo})
    found = engine_report(run.trace, requests, window, slos=slos, start_ns=run.start_ns)
    served = served_of(run.events, requests, run.start_ns)
    offered = offered_rates(requests, timing.total_s)
    return {
        "setting": setting.name,
        "policy": policy,
        "classes": {name: found[name] for name in ("LS", "BE") if name in found},
        "engine": found["engine"]
        | {
            "expert_bytes": stats["expert_bytes"],
            "longest_segment_ms": stats["longest_segment_ms"],
            "longest_segment_kind": stats["longest_segment_kind"],
            "policy_errors": stats["policy_errors"],
            "joules": joules,
            "computed_tokens": computed_tokens(run.trace),
        },
        "offered_per_s": {Priority(p).name: rate for p, rate in offered.items()},
        "client_late_ms": run.max_lag_ms,
        "refused": run.refused,
        "declared_be_stall_ms": bound,
        "took_s": time.monotonic() - begin,
        "samples": _samples([s for s in served if s.spec.priority == Priority.LS], window, slo),
    }


def _samples(served: Sequence[Served], window: Window, slo: Slo) -> dict[str, Any]:
    """Return the numbers pooled over seeds: milliseconds of the LS requests that count."""
    counted = [s for s in served if window.counts(s.spec)]
    return {
        "ttft_ms": [s.ttft_ms(window.stop_s) for s in counted],
        "first_ms": {s.spec.name: s.ttft_ms(window.stop_s) for s in counted},
        "tbt_ms": [(b - a) * 1000 for s in counted for a, b in pairwise(s.token_s)],
        "tpot_ms": [t for s in counted if (t := s.tpot_ms) is not None],
        "e2e_ms": {s.spec.name: s.e2e_ms(window.stop_s) for s in counted},
        "met": sum(s.meets(slo) for s in counted),
    }
