"""Settings of the engine: one frozen object, checked when it is made."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any, Literal, get_type_hints

from qllm.errors import ConfigError, shown
from qllm.floor import Floor
from qllm.hints import hint_of
from qllm.spelling import read_all
from qllm.types import MAX_TIME_MS, Exactness, Grain, Priority, Slo

GRAINS = {grain.name.lower(): grain for grain in Grain}
CHOICES = {
    "preempt_at": tuple(GRAINS),
    "exactness": tuple(level.value for level in Exactness),
    "kernels": ("fast", "reference"),
    "expert_weights": ("auto", "int8", "int8-g64", "int4", "mxfp4"),
    "activations": ("bf16", "int8"),
    "on_policy_error": ("fail", "fcfs"),
    "loop": ("host", "conditional"),
    "prefix_cache": ("auto", True, False, "approximate"),
    "role": ("both", "prefill", "decode"),
}
"""Settings that name one of a few."""
ON_CUDA = ("auto", "int4", "mxfp4")
"""Values of `expert_weights` that a GPU's kernels read."""
DEVICE_LOOP = "conditional"
DEVICES = ("cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_WORDS = {
    "bf16": "bfloat16", "half": "float16", "fp16": "float16", "f16": "float16",
    "float": "float32", "fp32": "float32", "f32": "float32",
}  # fmt: skip
"""Other names of dtypes, of vLLM and llama.cpp."""
GONE = {
    "attention": "CUDA has one attention kernel, and it needs no setting; leave it out",
    "host": "say where the engine runs with run_in='process' or run_in='thread'",
    "scheduler": "Python decides, and with loop='conditional' the device does; leave it out",
}
"""Settings that there were once, and what to do instead."""
GONE_VALUES = {
    ("loop", "device-launch"): "is gone: a loop on the device is 'conditional'",
    ("loop", "native"): "is gone: it saved little on a CPU; leave loop out",
}
"""Values that settings had once."""
PAGE_SIZE = 64
"""Tokens of a page of the prefix cache, or a KV block if that is larger."""
SLO_EXAMPLE = "ttft=500ms,tpot=50ms"
MAX_KV_GIB = 1 << 20
MAX_COUNT = (1 << 31) - 1
"""Largest count that a setting may name: the decisions in C++ keep counts in 32 bits."""
ONLY_HOST_LOOP = {
    "record": False,
    "on_policy_error": "fail",
    "swap_kv_tokens": 0,
    "kv_dir": None,
    "kv_ttl_s": None,
    "role": "both",
    "handover_gib": 0.0,
}
"""Settings that a loop on the device does not have, and the values they have there."""


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
    min_be_share: float = 0.0
    """Part of the engine's time that BE gets at least while it can run, whatever LS does, over
    every `be_share_window_ms`; `qllm doctor` says what LS waits longer. 0 is no floor."""
    be_share_window_ms: float = 2000.0
    """The time over which `min_be_share` holds. A shorter one costs LS more."""
    exactness: str = "order"
    """"order" (L1) or "batch-invariant" (L2)."""
    kernels: str = "fast"
    """"fast": our kernels where they are made for a part, whose last bits may differ from Hugging
    Face's; "reference": the bits of `model.forward`."""
    expert_weights: str = "auto"
    """"auto": as the checkpoint has them. Others round a bf16 checkpoint to the nearest value as it
    is loaded: "int8" with a scale per output channel (weight-only, as vLLM's "experts_int8"),
    "int8-g64" per group of 64 inputs, "int4" with a scale and offset per group of 64, "mxfp4" with
    a power of two per group of 32 (docs/weights.md)."""
    activations: str = "bf16"
    """What products with quantised weights read: "bf16", rows as they are; "int8", rows rounded to
    8 bits with a scale per group of inputs, where weights are integers of 4 or 8 bits. Faster, and
    other bits; a row still depends on no other (docs/weights.md)."""
    max_waiting: int = 1024
    """Most requests that wait for their first step; over it `submit` raises QueueFullError."""
    default_max_tokens: int | None = None
    """`max_tokens` of a request that names none, cut to what fits. None: 256, and for a chat over
    HTTP whatever fits."""
    clamp_max_tokens: bool = True
    """A `max_tokens` beyond what fits is a ceiling: the answer ends with the context. False refuses
    such a request."""
    ls_slo: str = ""
    """Latency targets of LS requests that bring none, like "ttft=500ms,tpot=100ms". `qllm2` lets
    BE have the time that they leave, and stops prompts of LS in time; without a TPOT target BE
    stretches decode steps by `ride_frac`, and prompts stop after `max_prompt_gap_ms`."""
    on_policy_error: str = "fail"
    """A policy that breaks on one request ends that one. One that works for none: "fail" ends them
    all, "fcfs" falls back."""
    loop: str = "host"
    """Who takes requests out of the rings, decides and hands tokens over. "host": the engine loop,
    in Python. "conditional": the device, with no CPU in it, as one graph that loops and switches
    over captured stages; for a `RankPolicy` and an engine in a process of its own, and
    docs/serving.md says what it does not serve."""
    prefix_cache: str | bool = "auto"
    """Keep KV of finished pages and copy it into requests with the same first tokens. "auto": where
    no bit changes (our CPU kernels in every layer); True: refused elsewhere; "approximate": where
    a hit may change last bits too, if loop="host"; False: off (docs/kv.md)."""
    prefix_cache_tokens: int = 16384
    """Most tokens of KV that the prefix cache keeps, beside `max_kv_tokens`."""
    prefix_states_gib: float = 2.0
    """GiB of states that it keeps beside them where layers carry a state (docs/kv.md)."""
    swap_kv_tokens: int = 0
    """Most tokens of KV of requests that had to give up their blocks, beside `max_kv_tokens`: they
    go on where they were. 0: they are computed again (docs/kv.md)."""
    keep_ls_s: float = 600.0
    """Seconds for which KV that LS requests used is safe from BE work."""
    kv_dir: str | PurePath | None = None
    """Folder for a file of kept KV, which the next engine finds, also after a crash; one engine at
    a time. None: KV is kept in RAM alone (docs/kv.md)."""
    kv_dir_gib: float = 8.0
    """Size of that file in GiB; it is taken at the start."""
    kv_dir_reset: bool = False
    """Replace a file that is another model's, damaged or of another size; one that fits stays."""
    kv_ttl_s: float | None = None
    """Kept KV is deleted, in RAM and in the file, once nobody has used it for so many seconds;
    None: when its room is needed."""
    role: str = "both"
    """"prefill": a request is handed over once it has its first token; "decode", "both": it is not,
    and front ends send new requests to engines of role "decode" only if there are no others."""
    handover_gib: float = 0.0
    """Most GiB of KV on its way to other engines, and as many on its way from them: requests that
    move go on where they were. 0: they are computed again (docs/handover.md)."""
    conformance: bool = True
    """Compare with `model.forward` at start, up to rounding, and parked passes with uncut ones."""
    record: bool = False
    """Keep the trace events of the run (see `engine.trace`)."""

    def __post_init__(self) -> None:
        self._check_choices()
        if isinstance(self.kv_dir, PurePath):
            object.__setattr__(self, "kv_dir", str(self.kv_dir))
        for name in (
            "max_num_seqs",
            "max_kv_tokens",
            "block_size",
            "max_step_tokens",
            "max_waiting",
            "default_max_tokens",
            "prefix_cache_tokens",
        ):
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool)
            is_open = value is None and name == "default_max_tokens"
            if not is_open and not (is_count and 1 <= value <= MAX_COUNT):
                raise ConfigError(f"{name}={shown(value)} must be an integer in [1, {MAX_COUNT}]")
        if self.block_size & (self.block_size - 1) or self.block_size > 256:
            raise ConfigError(f"block_size={self.block_size} must be a power of two in [1, 256]")
        for name in ("clamp_max_tokens", "conformance", "record", "kv_dir_reset"):
            check_bool(name, getattr(self, name))
        self._check_sizes()
        if self.prefix_cache is not False and self.prefix_cache_tokens < self.page_size:
            raise ConfigError(
                f"prefix_cache_tokens={self.prefix_cache_tokens} has no room for a page of "
                f"{self.page_size} tokens; give more, or prefix_cache=False"
            )
        if self.loop != "host":
            self._check_loop()
        if not isinstance(self.ls_slo, str):
            raise ConfigError(f"ls_slo={shown(self.ls_slo)} must be text like {SLO_EXAMPLE}")
        if self.ls_slo:
            parse_slo(self.ls_slo)

    def _check_sizes(self) -> None:
        segment = self.max_segment_ms
        is_number = isinstance(segment, int | float) and not isinstance(segment, bool)
        if not is_number or not (0 < segment <= MAX_TIME_MS or segment == float("inf")):
            raise ConfigError(
                f"max_segment_ms={shown(segment)} must be a number in (0, {MAX_TIME_MS}], or "
                "infinity"
            )
        _ = self.floor  # which checks what it is made of
        swap = self.swap_kv_tokens
        if not isinstance(swap, int) or isinstance(swap, bool) or not 0 <= swap <= MAX_COUNT:
            raise ConfigError(
                f"swap_kv_tokens={shown(swap)} must be an integer in [0, {MAX_COUNT}]; 0 is off"
            )
        most = MAX_TIME_MS / 1000
        states = self.prefix_states_gib
        if not _is_number(states) or not 0 <= states <= MAX_KV_GIB:
            raise ConfigError(
                f"prefix_states_gib={shown(states)} must be a number in [0, {MAX_KV_GIB}]"
            )
        keep, ttl, gib = self.keep_ls_s, self.kv_ttl_s, self.kv_dir_gib
        if not _is_number(keep) or not 0 <= keep <= most:
            raise ConfigError(f"keep_ls_s={shown(keep)} must be a number in [0, {most:g}]")
        if ttl is not None and (not _is_number(ttl) or not 0 < ttl <= most):
            raise ConfigError(f"kv_ttl_s={shown(ttl)} must be None or a number in (0, {most:g}]")
        if not _is_number(gib) or not 0 < gib <= MAX_KV_GIB:
            raise ConfigError(f"kv_dir_gib={shown(gib)} must be a number in (0, {MAX_KV_GIB}]")
        gib = self.handover_gib
        if not _is_number(gib) or not 0 <= gib <= MAX_KV_GIB:
            raise ConfigError(f"handover_gib={shown(gib)} must be a number in [0, {MAX_KV_GIB}]")
        if self.kv_dir is not None and not (isinstance(self.kv_dir, str) and self.kv_dir):
            raise ConfigError(f"kv_dir={shown(self.kv_dir)} must be None or the path of a folder")
        if self.kv_dir is not None and self.prefix_cache in (False, "approximate"):
            raise ConfigError(
                f"kv_dir={self.kv_dir!r} holds the pages of the prefix cache, and only exact ones: "
                f"prefix_cache={self.prefix_cache!r} must be 'auto' or True"
            )

    def _check_choices(self) -> None:
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if not any(type(value) is type(x) and value == x for x in known):  # 1 is not True
                state = GONE_VALUES.get((name, value), "is unknown")
                raise ConfigError(
                    f"{name}={value!r} {state}; use one of {', '.join(map(str, known))}"
                )
        if self.expert_weights != "auto" and self.kernels == "reference":
            raise ConfigError(
                f"expert_weights={self.expert_weights!r} needs kernels='fast', the kernels that "
                "read it; kernels='reference' has 'auto'"
            )
        if self.activations != "bf16" and self.kernels == "reference":
            raise ConfigError(
                f"activations={self.activations!r} needs kernels='fast', the kernels that read "
                "them; kernels='reference' has 'bf16'"
            )
        if self.activations != "bf16" and self.expert_weights not in ("auto", "int4"):
            raise ConfigError(
                f"activations={self.activations!r} with expert_weights={self.expert_weights!r}: "
                "experts that are rounded at load read int8 rows as 'int4' alone; use 'int4', or "
                "activations='bf16'"
            )

    def _check_loop(self) -> None:
        if self.prefix_cache not in ("auto", False):
            raise ConfigError(
                f"prefix_cache={self.prefix_cache!r} needs loop='host', and loop={self.loop!r}; "
                "leave it at 'auto'"
            )
        for name, plain in ONLY_HOST_LOOP.items():
            if getattr(self, name) != plain:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} needs loop='host', and loop={self.loop!r}; "
                    f"leave {name} at {plain!r}"
                )

    def check_place(self, run_in: str, device: str) -> None:
        """Return if the loop and the kernels that were asked for can run there.

        Raises:
            ConfigError: They need a process of their own, a CPU or a GPU.
        """
        if device.split(":")[0] == "cuda":
            self._check_cuda()
        if self.loop == "host":
            return
        if run_in != "process":
            raise ConfigError(f"loop={self.loop!r} serves rings and needs run_in='process'")
        if device.split(":")[0] != "cuda":
            raise ConfigError(f"loop={self.loop!r} runs on a GPU and device={device!r}; use 'host'")

    def _check_cuda(self) -> None:
        if self.expert_weights not in ON_CUDA:
            raise ConfigError(
                f"expert_weights={self.expert_weights!r} is for the CPU; on CUDA use one of "
                f"{', '.join(ON_CUDA)}"
            )
        if self.activations != "bf16":
            raise ConfigError(f"activations={self.activations!r} is for the CPU; use 'bf16'")

    @property
    def on_device(self) -> bool:
        """Whether the loop runs on the device, where no doorbell rings."""
        return self.loop == DEVICE_LOOP

    def default_slo(self, priority: int) -> Slo:
        """Targets of a request that brings none."""
        return parse_slo(self.ls_slo) if self.ls_slo and priority <= Priority.LS else Slo()

    @property
    def floor(self) -> Floor:
        """The share of the time that BE gets, whatever LS does."""
        return Floor.of(self.min_be_share, self.be_share_window_ms, self.max_segment_ms)

    @property
    def grain(self) -> Grain:
        """`preempt_at` as a grain."""
        return GRAINS[self.preempt_at]

    @property
    def num_blocks(self) -> int:
        """KV blocks in the pool."""
        return self.max_kv_tokens // self.block_size

    @property
    def pool_tokens(self) -> int:
        """Tokens of KV that the pool has room for: `max_kv_tokens` in whole blocks."""
        return self.num_blocks * self.block_size

    @property
    def page_size(self) -> int:
        """Tokens of a page of the prefix cache."""
        return max(PAGE_SIZE, self.block_size)

    @property
    def num_swap_blocks(self) -> int:
        """Room for KV that is swapped out, in blocks."""
        return self.swap_kv_tokens // self.block_size

    @property
    def batch_invariant(self) -> bool:
        """Whether level L2 is asked for."""
        return self.exactness == Exactness.BATCH_INVARIANT


def engine_config(settings: dict[str, Any]) -> EngineConfig:
    """Make an EngineConfig from keyword settings; an unknown name lists the known ones."""
    known = [f.name for f in fields(EngineConfig)]
    for name in settings:
        if name in GONE:
            raise ConfigError(f"the setting {name!r} is gone: {GONE[name]}")
        if name not in known:
            raise ConfigError(
                f"unknown setting {name!r}{hint_of(name, known)}; known: {', '.join(known)}"
            )
    return EngineConfig(**settings)


KINDS = get_type_hints(EngineConfig) | {name: Literal[known] for name, known in CHOICES.items()}
"""The type of each setting; of those in CHOICES the values."""


def spelled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of the engine whose values are written as text, each by its type.

    Raises:
        ConfigError: A text is no value of its setting.
    """
    return read_all(settings, KINDS)


def named_dtype(dtype: Any) -> Any:
    """Return a dtype that is named by text under its own name; anything else as it is.

    Raises:
        ConfigError: The name is unknown.
    """
    if not isinstance(dtype, str):
        return dtype
    low = dtype.lower().removeprefix("torch.")
    name = DTYPE_WORDS.get(low, low)
    if name not in DTYPES:
        raise ConfigError(f"dtype={shown(dtype)} is unknown; use one of {', '.join(DTYPES)}")
    return name


def named_device(device: Any) -> Any:
    """Return a device that is named by text in lower case; anything else as it is.

    Raises:
        ConfigError: It is neither a CPU nor a GPU.
    """
    found = device.lower() if isinstance(device, str) else device
    if str(found).split(":")[0] not in DEVICES:
        raise ConfigError(f"device={device!r} is unknown; use one of {', '.join(DEVICES)}")
    return found


def check_bool(name: str, value: Any) -> None:
    """Return if a setting is a bool.

    Raises:
        ConfigError: It is something else, which might mean one.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={shown(value)} must be True or False")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
        if name not in ("ttft", "tpot") or name in found or not 0 < number <= MAX_TIME_MS:
            raise ConfigError(
                f"slo {shown(text)} must be like {SLO_EXAMPLE}, with times in (0, {MAX_TIME_MS}] ms"
            )
        found[name] = number
    return Slo(ttft_ms=found.get("ttft"), tpot_ms=found.get("tpot"))
