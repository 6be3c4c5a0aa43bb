"""Settings of the engine: one frozen object, checked when it is made."""

from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from qllm.errors import ConfigError
from qllm.types import Exactness, Grain, Priority, Slo

GRAINS = {grain.name.lower(): grain for grain in Grain}
CHOICES = {
    "preempt_at": tuple(GRAINS),
    "exactness": tuple(level.value for level in Exactness),
    "kernels": ("fast", "reference"),
    "expert_weights": ("auto", "int8", "int8-g64"),
    "attention": ("triton", "flash3"),
    "on_policy_error": ("fail", "fcfs"),
    "scheduler": ("python", "native"),
    "loop": ("host", "native", "conditional", "device-launch"),
}
"""Settings that name one of a few."""
DEVICE_LOOPS = ("conditional", "device-launch")
ONLY_HOST_LOOP = {"record": False, "on_policy_error": "fail", "scheduler": "python"}
"""Settings that other loops do not have, and the values they have there. (Their decisions are
native anyway.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Raises:
        ConfigError: A value is out of its range; the message says what is allowed.
    """

    preempt_at: str = "expert"
    """Finest boundary at which a pass may stop: "step", "layer" or "expert"."""
    max_num_seqs: int = 32
    """Seats: most requests in one step."""
    max_kv_tokens: int = 65536
    """Tokens of KV that may exist at once, over all requests."""
    block_size: int = 16
    """Tokens per KV block; the unit in which `max_kv_tokens` is charged."""
    max_step_tokens: int = 4096
    """Most prefill tokens in one step."""
    max_segment_ms: float = 5.0
    """Declared bound on the work between two boundaries; infinity does not cut."""
    exactness: str = "order"
    """"order" (L1) or "batch-invariant" (L2)."""
    kernels: str = "fast"
    """"fast": our kernels where they are made for a part, whose last bits may differ from Hugging
    Face's; "reference": the bits of `model.forward`."""
    expert_weights: str = "auto"
    """"auto": as loaded; "int8": half the bytes of bf16, rounded with a scale per output channel
    (weight-only, as vLLM's "experts_int8"), or "int8-g64" per group of 64 inputs."""
    attention: str = "triton"
    """On CUDA: "triton", our kernel, or "flash3", flash-attn 3 through torch (>= 2.12)."""
    max_waiting: int = 1024
    """Most requests that wait for their first step; over it `submit` raises QueueFullError."""
    default_max_tokens: int = 256
    """`max_tokens` of a request that names none (cut to what fits)."""
    ls_slo: str = ""
    """Latency targets of LS requests that bring none, like "ttft=500ms,tpot=100ms". `qllm2` lets
    BE have the time that they leave; without a TPOT target BE stretches decode steps by
    `ride_frac`."""
    on_policy_error: str = "fail"
    """What a policy that raises does to its requests: "fail" ends them, "fcfs" falls back."""
    scheduler: str = "python"
    """"python"; or "native", the same decisions in C++ (for a `RankPolicy`; needs numba)."""
    loop: str = "host"
    """Who takes requests out of the rings, decides and hands tokens over. "host": the engine loop,
    in Python. "native": the same in C++, around the host's kernels. Or the device, with no CPU in
    it: "conditional", one graph that loops and switches over captured stages, or "device-launch",
    a graph that launches stages and itself. All but "host" are for a `RankPolicy` and a process
    host; docs/serving.md says what they do not serve."""
    conformance: bool = True
    """Compare with `model.forward` at start."""
    record: bool = False
    """Keep the trace events of the run (see `engine.trace`)."""

    def __post_init__(self) -> None:
        self._check_choices()
        for name in (
            "max_num_seqs",
            "max_kv_tokens",
            "block_size",
            "max_step_tokens",
            "max_waiting",
            "default_max_tokens",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} must be an integer >= 1")
        if self.block_size & (self.block_size - 1) or self.block_size > 256:
            raise ConfigError(f"block_size={self.block_size} must be a power of two in [1, 256]")
        for name in ("conformance", "record"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r} must be True or False")
        segment = self.max_segment_ms
        if not isinstance(segment, int | float) or not segment > 0:
            raise ConfigError(f"max_segment_ms={segment!r} must be a number > 0 (or infinity)")
        if self.loop != "host":
            self._check_loop()
        if self.ls_slo:
            parse_slo(self.ls_slo)

    def _check_choices(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(known)}"
                )
        if self.expert_weights != "auto" and self.kernels == "reference":
            raise ConfigError(
                f"expert_weights={self.expert_weights!r} needs kernels='fast', the kernels that "
                "read it; kernels='reference' has 'auto'"
            )

    def _check_loop(self) -> None:
        for name, plain in ONLY_HOST_LOOP.items():
            if getattr(self, name) != plain:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} needs loop='host', and loop={self.loop!r}; "
                    f"leave {name} at {plain!r}"
                )

    def check_place(self, host: str, device: str, has_meeting: bool) -> None:
        """Return if the loop can run there.

        Raises:
            ConfigError: It needs a process of its own, a GPU, or front ends of this machine only.
        """
        if self.loop == "host":
            return
        if host != "process":
            raise ConfigError(f"loop={self.loop!r} serves rings and needs host='process'")
        if self.on_device and device.split(":")[0] != "cuda":
            raise ConfigError(
                f"loop={self.loop!r} runs on a GPU and device={device!r}; use 'native' or 'host'"
            )
        if has_meeting and not self.on_device:
            raise ConfigError(f"loop={self.loop!r} has no front ends of other hosts; use 'host'")

    @property
    def on_device(self) -> bool:
        """Whether the loop runs on the device, where no doorbell rings."""
        return self.loop in DEVICE_LOOPS

    def default_slo(self, priority: int) -> Slo:
        """Targets of a request that brings none."""
        return parse_slo(self.ls_slo) if self.ls_slo and priority <= Priority.LS else Slo()

    @property
    def grain(self) -> Grain:
        """`preempt_at` as a grain."""
        return GRAINS[self.preempt_at]

    @property
    def num_blocks(self) -> int:
        """KV blocks in the pool."""
        return self.max_kv_tokens // self.block_size

    @property
    def batch_invariant(self) -> bool:
        """Whether level L2 is asked for."""
        return self.exactness == Exactness.BATCH_INVARIANT


def engine_config(settings: dict[str, Any]) -> EngineConfig:
    """Make an EngineConfig from keyword settings; an unknown name lists the known ones."""
    known = [f.name for f in fields(EngineConfig)]
    for name in settings:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ConfigError(f"unknown setting {name!r}{hint}; known: {', '.join(known)}")
    return EngineConfig(**settings)


def parse_slo(text: str) -> Slo:
    """Read `ttft=500ms,tpot=50ms`; one of the two may be missing. Seconds are `0.5s`.

    Raises:
        ConfigError: It is something else.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        unit = next((u for u in ("ms", "s") if value.endswith(u)), "")
        try:
            number = float(value.removesuffix(unit)) * {"s": 1000.0}.get(unit, 1.0)
        except ValueError:
            number = -1.0
        if name not in ("ttft", "tpot") or name in found or not 0 < number < float("inf"):
            raise ConfigError(f"slo {text!r} must be like ttft=500ms,tpot=50ms")
        found[name] = number
    return Slo(ttft_ms=found.get("ttft"), tpot_ms=found.get("tpot"))
