"""Settings of the engine: a frozen object that is checked when it is made."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any, Literal, get_type_hints

from qllm.errors import ConfigError, InvariantError, shown
from qllm.floor import Floor
from qllm.hints import hint_of
from qllm.spelling import allowed, read, read_all
from qllm.types import MAX_TIME_MS, MOST_DRAFTS, Exactness, Grain, Priority, Slo

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
"""Allowed values of settings that have a few."""
ON_CUDA = ("auto", "int4", "mxfp4")
"""Values of `expert_weights` that the GPU kernels support."""
DEVICE_LOOP = "conditional"
DEVICES = ("cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_WORDS = {
    "bf16": "bfloat16", "half": "float16", "fp16": "float16", "f16": "float16",
    "float": "float32", "fp32": "float32", "f32": "float32",
}  # fmt: skip
"""Names of dtypes in vLLM and llama.cpp, and our names."""
GONE = {
    "attention": "CUDA has one attention kernel, and it needs no setting; leave it out",
    "host": "say where the engine runs with run_in='process' or run_in='thread'",
    "scheduler": "Python decides, and with loop='conditional' the device does; leave it out",
}
"""Removed settings, and what to do instead."""
GONE_VALUES = {
    ("loop", "device-launch"): "is gone: a loop on the device is 'conditional'",
    ("loop", "native"): "is gone: it saved little on a CPU; leave loop out",
}
"""Removed values of settings, and the end of the error message."""
PAGE_SIZE = 64
"""Tokens of a page of the prefix cache, or a KV block if that is larger."""
SLO_EXAMPLE = "ttft=500ms,tpot=50ms"
MAX_KV_GIB = 1 << 20
MAX_MEMORY = MAX_KV_GIB << 30
MOST_RANKS = 64
MAX_COUNT = (1 << 31) - 1
"""Largest count of a setting: the decisions in C++ keep counts in 32 bits."""
MAY_BE_OPEN = {"default_max_tokens", "depth", "max_kv_tokens", "prefix_cache_tokens"}
"""Counts that may be None."""
GROUP = re.compile(r"[A-Za-z0-9_-]{1,40}")
"""Names of groups of engines. A socket's path, which has the name, may have about 100 bytes."""
ONLY_HOST_LOOP = {
    "record": False,
    "on_policy_error": "fail",
    "swap_kv_tokens": 0,
    "kv_dir": None,
    "kv_ttl_s": None,
    "max_expert_bytes": None,
    "role": "both",
    "handover_gib": 0.0,
    "draft": "none",
    "tp": 1,
    "shared_cores": None,
}
"""Settings that a loop on the device does not support, and the values they must have there."""
NOT_ON_RANKS = {
    "kernels": ("fast", "ranks compute with our kernels only"),
    "kv_dir": (None, "no file of KV is written by several ranks yet"),
    "handover_gib": (0.0, "no KV is handed over by several ranks yet"),
    "role": ("both", "no KV is handed over by several ranks yet"),
    "max_expert_bytes": (None, "each rank has its experts in memory"),
}
"""Settings that several ranks do not support: the values they must have, and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Raises:
        ConfigError: A value is out of its range; the message contains the allowed values.
    """

    preempt_at: str = "expert"
    """Finest boundary at which a pass may stop: "step", "layer" or "expert"."""
    depth: int | None = None
    """Number of layers to load, from the first: the others are not read, and KV gets their memory.
    **This can change answers**: a cut model is another model, with worse answers. None: all
    layers (docs/guides/depths.md)."""
    max_num_seqs: int = 32
    """Seats: most requests in one step."""
    memory: int | str | None = None
    """Bytes of memory for the whole engine, like "10GiB": weights, KV, cached KV and buffers; on a
    GPU those of the device. None: what is free (docs/guides/reuse-kv.md)."""
    max_kv_tokens: int | None = None
    """Most tokens of KV at once, over all requests. None: a share of the memory that is free after
    loading (docs/guides/reuse-kv.md)."""
    block_size: int = 16
    """Tokens per KV block, the unit of allocation."""
    max_step_tokens: int = 4096
    """Most prefill tokens in one step."""
    max_segment_ms: float = 5.0
    """Declared bound on the work between two boundaries; infinity does not cut."""
    min_be_share: float = 0.0
    """Least part of the engine's time for BE while BE can run, over every `be_share_window_ms`;
    `qllm doctor` prints how much longer LS waits then. 0 is no floor."""
    be_share_window_ms: float = 2000.0
    """Time over which `min_be_share` holds. A shorter one costs LS more."""
    shared_cores: str | None = None
    """Name of a group of engines on the same cores of this machine. While one of them has LS work,
    the BE of the others waits, down to `min_be_share` or a hundredth of the time. None: the engine
    is in no group (docs/guides/several-engines.md)."""
    exactness: str = "order"
    """Promise about bits: "order" (L1) or "batch-invariant" (L2)."""
    kernels: str = "fast"
    """Kernels of the engine. "fast": our kernels for the parts that they support; last bits may
    differ from Hugging Face's. "reference": the bits of `model.forward`."""
    expert_weights: str = "auto"
    """Format of expert weights. "auto": as in the checkpoint. Others round a bf16 checkpoint to the
    nearest value at load: "int8" with a scale per output channel (weight-only, as vLLM's
    "experts_int8"), "int8-g64" per group of 64 inputs, "int4" with a scale and offset per group of
    64, "mxfp4" with a power of two per group of 32 (docs/guides/quantised-weights.md)."""
    activations: str = "bf16"
    """Rows that products with quantised weights read. "bf16": rows as they are. "int8": rows
    rounded to 8 bits with a scale per group of inputs, where weights are integers of 4 or 8 bits.
    It is faster and changes bits; a row still depends on no other row
    (docs/guides/quantised-weights.md)."""
    max_waiting: int = 1024
    """Most requests that wait for their first step; then `submit` raises QueueFullError."""
    default_max_tokens: int | None = None
    """Default of `max_tokens`, cut to the room for an answer. None: 256, or all the room for a
    chat over HTTP."""
    clamp_max_tokens: bool = True
    """True: a `max_tokens` beyond the room for an answer is a ceiling, and the answer ends with the
    context. False refuses such a request."""
    ls_slo: str = ""
    """Latency targets of LS requests that have none, like "ttft=500ms,tpot=100ms". `qllm2` gives
    BE the time that they leave, and stops prompts of LS in time. Without a TPOT target, BE
    stretches decode steps by `ride_frac`, and prompts stop after `max_prompt_gap_ms`."""
    on_policy_error: str = "fail"
    """Action if a policy works for no request: "fail" ends all requests, "fcfs" falls back. If the
    policy breaks on one request, only that one ends."""
    loop: str = "host"
    """Loop that takes requests out of the rings, decides, and publishes tokens. "host": the engine
    loop in Python. "conditional": the device without a CPU, as one graph that loops and switches
    over captured stages. It needs a `RankPolicy` and an engine in a process of its own;
    docs/guides/gpu.md lists what it does not serve."""
    prefix_cache: str | bool = "auto"
    """Cache KV of finished pages, and copy it into requests with the same first tokens. "auto": if
    no bit changes (our CPU kernels in every layer). True: refused where bits change. "approximate":
    also where a hit may change last bits, with loop="host". False: off
    (docs/guides/reuse-kv.md)."""
    prefix_cache_tokens: int | None = None
    """Most tokens of KV in the prefix cache, in addition to `max_kv_tokens`. None: a share of the
    memory that is free after loading, and 16,384 on a GPU (docs/guides/reuse-kv.md)."""
    prefix_states_gib: float | None = None
    """Most GiB of states in the prefix cache, for models whose layers have states. None: a share of
    the memory that is free after loading (docs/guides/reuse-kv.md)."""
    swap_kv_tokens: int = 0
    """Most tokens of swapped-out KV, in addition to `max_kv_tokens`: requests that lost blocks
    continue where they stopped. 0: they are computed again (docs/guides/reuse-kv.md)."""
    keep_ls_s: float = 600.0
    """Seconds for which KV that LS requests used is safe from BE work."""
    kv_dir: str | PurePath | None = None
    """Folder for a file of cached KV, which the next engine finds, also after a crash. One engine
    uses it at a time. None: KV is cached in RAM only (docs/guides/reuse-kv.md)."""
    kv_dir_gib: float = 8.0
    """Size of that file in GiB, which is allocated at the start."""
    kv_dir_reset: bool = False
    """True replaces a file of another model or size, or a damaged one; a file that fits stays."""
    kv_ttl_s: float | None = None
    """Seconds without use after which cached KV is deleted, in RAM and in the file. None: it is
    deleted when its room is needed."""
    max_expert_bytes: int | str | None = None
    """Most bytes of experts in memory, like "8GiB", for a model that is larger than memory. Its
    experts are in a file in `expert_dir`, and come and go. On a GPU: most bytes of experts on the
    GPU, while all are in the host's memory. If all fit, they stay. None keeps all experts where
    they compute (docs/guides/larger-than-memory.md)."""
    expert_dir: str | PurePath | None = None
    """Folder for the file of packed experts, about as large as the experts. The first load writes
    it, and later loads and other engines read it. For the CPU only."""
    role: str = "both"
    """Role in a fleet. "prefill" migrates a request once it has its first token; "decode" and
    "both" do not. Front ends send new requests to "decode" engines only if there are no others."""
    handover_gib: float = 0.0
    """Most GiB of KV on its way to other engines, and as many on its way from them. With it,
    migrated requests continue where they stopped. 0: they are computed again
    (docs/design/handover.md)."""
    draft: str = "none"
    """Source of drafted tokens. The model verifies several of them in one step. "none": one token
    at a time. "lookup": what followed the last tokens before. "grammar": what the request's grammar
    forces. "auto": the grammar, or a lookup if it forces nothing. "exit:4": the model's own first 4
    layers. "model:PATH": what a smaller model with the same tokenizer says. "mtp": what the
    checkpoint's extra layer for further tokens predicts. Or the name of an installed drafter.
    Drafts change no token (docs/guides/drafts.md)."""
    draft_tokens: int = 4
    """Most drafted tokens that a step verifies per request, 0 to 16. Each request has as many as
    pay, by measured times."""
    tp: int = 1
    """Ranks that split every layer of the model and compute each step together. On the CPU a rank
    is a process, and the answers are those of one rank, bit for bit. On CUDA one process has all
    ranks (docs/design/sharded.md)."""
    tp_hosts: tuple[str, ...] = ()
    """Addresses HOST:PORT of the other ranks, at which `qllm rank` listens: one rank on each host,
    and one here, so `tp` is one more. Empty: all ranks are processes of this machine
    (docs/design/sharded.md)."""
    tp_secret_file: str | None = None
    """File with a secret that the hosts of all ranks have. Addresses that only this machine can
    reach need none."""
    rank_deadline_s: float = 30.0
    """Seconds that ranks on the CPU wait for a rank that hangs before the engine ends with an
    error."""
    conformance: bool = True
    """Compare with `model.forward` at start, up to rounding, and parked passes with uncut ones."""
    record: bool = False
    """Store the trace events of the run (see `engine.trace`)."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._read_values()
        self._check_experts()
        for name in (
            "depth",
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
            is_open = value is None and name in MAY_BE_OPEN
            if not is_open and not (is_count and 1 <= value <= MAX_COUNT):
                raise ConfigError(f"{name}={shown(value)} must be an integer in [1, {MAX_COUNT}]")
        if self.block_size & (self.block_size - 1) or self.block_size > 256:
            raise ConfigError(f"block_size={self.block_size} must be a power of two in [1, 256]")
        for name in ("clamp_max_tokens", "conformance", "record", "kv_dir_reset"):
            check_bool(name, getattr(self, name))
        self._check_sizes()
        self._check_group()
        self._check_drafts()
        self._check_ranks()
        kept = self.prefix_cache_tokens
        if self.prefix_cache is not False and kept is not None and kept < self.page_size:
            raise ConfigError(
                f"prefix_cache_tokens={kept} has no room for a page of "
                f"{self.page_size} tokens; give more, or prefix_cache=False"
            )
        if self.loop != "host":
            self._check_loop()
        if not isinstance(self.ls_slo, str):
            raise ConfigError(f"ls_slo={shown(self.ls_slo)} must be text like {SLO_EXAMPLE}")
        if self.ls_slo:
            parse_slo(self.ls_slo)

    def _read_values(self) -> None:
        """Replace paths by their texts, and sizes by bytes."""
        if isinstance(self.tp_hosts, list):
            object.__setattr__(self, "tp_hosts", tuple(self.tp_hosts))
        for name in ("kv_dir", "expert_dir", "tp_secret_file"):
            if isinstance(path := getattr(self, name), PurePath):
                object.__setattr__(self, name, str(path))
        for name in ("memory", "max_expert_bytes"):
            object.__setattr__(self, name, _num_bytes(name, getattr(self, name)))

    def _check_experts(self) -> None:
        most, folder = self.max_expert_bytes, self.expert_dir
        if folder is not None and not (isinstance(folder, str) and folder):
            raise ConfigError(f"expert_dir={shown(folder)} must be None or the path of a folder")
        if most is None and folder is not None:
            raise ConfigError(
                f"expert_dir={folder!r} needs max_expert_bytes, too: the folder for all experts "
                "and the bytes of experts in memory are given together"
            )

    @property
    def has_drafts(self) -> bool:
        """True if a drafter proposes tokens."""
        return self.draft != "none" and self.draft_tokens > 0

    def _check_group(self) -> None:
        name = self.shared_cores
        if name is not None and not (isinstance(name, str) and GROUP.fullmatch(name)):
            raise ConfigError(
                f"shared_cores={shown(name)} must be None, or a name of 1 to 40 letters, digits, "
                "'-' and '_'"
            )

    def _check_drafts(self) -> None:
        most = self.draft_tokens
        is_count = isinstance(most, int) and not isinstance(most, bool)
        if not is_count or not 0 <= most <= MOST_DRAFTS:
            raise ConfigError(
                f"draft_tokens={shown(most)} must be an integer in [0, {MOST_DRAFTS}]"
            )
        if not isinstance(self.draft, str) or not self.draft:
            raise ConfigError(f"draft={shown(self.draft)} must be the name of a drafter, or 'none'")

    def _check_ranks(self) -> None:
        is_count = isinstance(self.tp, int) and not isinstance(self.tp, bool)
        if not is_count or not 1 <= self.tp <= MOST_RANKS:
            raise ConfigError(f"tp={shown(self.tp)} must be an integer in [1, {MOST_RANKS}]")
        seconds, most = self.rank_deadline_s, MAX_TIME_MS / 1000
        if not _is_number(seconds) or not 0 < seconds <= most:
            raise ConfigError(f"rank_deadline_s={shown(seconds)} must be a number in (0, {most:g}]")
        for name, (value, why) in NOT_ON_RANKS.items() if self.tp > 1 else ():
            if getattr(self, name) != value:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} needs tp=1, and tp={self.tp}: {why}; leave "
                    f"{name} at {value!r}, or use tp=1"
                )
        self._check_hosts()

    def _check_hosts(self) -> None:
        hosts, file = self.tp_hosts, self.tp_secret_file
        if not isinstance(hosts, tuple) or not all(isinstance(x, str) and x for x in hosts):
            raise ConfigError(f"tp_hosts={shown(hosts)} must be a list of addresses HOST:PORT")
        if len(set(hosts)) < len(hosts):
            raise ConfigError(f"tp_hosts={shown(hosts)} names a host twice; name each host once")
        if hosts and self.tp != 1 + len(hosts):
            raise ConfigError(
                f"tp={self.tp} with {len(hosts)} tp_hosts: each host has one rank, and this one "
                f"has one; use tp={1 + len(hosts)}"
            )
        if file is not None and not (isinstance(file, str) and file):
            raise ConfigError(f"tp_secret_file={shown(file)} must be None or the path of a file")
        if file is not None and not hosts:
            raise ConfigError(
                f"tp_secret_file={file!r} is for tp_hosts; give both, or leave it out"
            )

    def _check_sizes(self) -> None:
        segment = self.max_segment_ms
        is_number = isinstance(segment, int | float) and not isinstance(segment, bool)
        if not is_number or not (0 < segment <= MAX_TIME_MS or segment == float("inf")):
            raise ConfigError(
                f"max_segment_ms={shown(segment)} must be a number in (0, {MAX_TIME_MS}], or "
                "infinity"
            )
        _ = self.floor  # checks its settings
        swap = self.swap_kv_tokens
        if not isinstance(swap, int) or isinstance(swap, bool) or not 0 <= swap <= MAX_COUNT:
            raise ConfigError(
                f"swap_kv_tokens={shown(swap)} must be an integer in [0, {MAX_COUNT}]; 0 is off"
            )
        most = MAX_TIME_MS / 1000
        states = self.prefix_states_gib
        if states is not None and (not _is_number(states) or not 0 <= states <= MAX_KV_GIB):
            raise ConfigError(
                f"prefix_states_gib={shown(states)} must be None or a number in [0, {MAX_KV_GIB}]"
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
        """Refuse a loop or kernels that cannot run in this place or on this device.

        Raises:
            ConfigError: They need a process of their own, a CPU or a GPU.
        """
        if device.split(":")[0] == "cuda":
            self._check_cuda()
        elif self.max_expert_bytes is not None and self.expert_dir is None:
            raise ConfigError(
                f"max_expert_bytes={self.max_expert_bytes} needs expert_dir, too: on the CPU the "
                "bytes of experts in memory and the folder for the others are given together"
            )
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
        has_copies = self.swap_kv_tokens or self.prefix_cache == "approximate"
        if self.tp > 1 and has_copies:
            raise ConfigError(
                f"tp={self.tp} on CUDA: no KV of several ranks is copied out of the devices yet; "
                "use swap_kv_tokens=0 and prefix_cache='auto' or False, or tp=1"
            )
        if self.expert_dir is not None:
            raise ConfigError(
                f"expert_dir={self.expert_dir!r} is for the CPU: with device='cuda' all experts "
                "are in the host's memory, and none in a file; leave expert_dir out"
            )

    def refuse_apart(self, what: str, *, on_ranks: bool = False) -> None:
        """Refuse experts in a file, and ranks.

        Args:
            what: Subject of the message: "a simulation".
            on_ranks: True if the subject knows ranks.

        Raises:
            ConfigError: `max_expert_bytes` is set, or `tp` is not 1.
        """
        if self.tp > 1 and not on_ranks:
            raise ConfigError(f"tp={self.tp}: {what} has the model in one process; leave tp out")
        if self.max_expert_bytes is not None:
            raise ConfigError(
                f"max_expert_bytes={self.max_expert_bytes}: {what} has all experts in memory; "
                "leave it and expert_dir out"
            )

    @property
    def on_device(self) -> bool:
        """True if the loop runs on the device, which uses no doorbell."""
        return self.loop == DEVICE_LOOP

    def default_slo(self, priority: int) -> Slo:
        """Return the targets of a request that has none."""
        return parse_slo(self.ls_slo) if self.ls_slo and priority <= Priority.LS else Slo()

    @property
    def floor(self) -> Floor:
        """Least share of the time for BE while LS has work."""
        return Floor.of(self.min_be_share, self.be_share_window_ms, self.max_segment_ms)

    @property
    def grain(self) -> Grain:
        """`preempt_at` as a grain."""
        return GRAINS[self.preempt_at]

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks in the pool."""
        return int(self._sized("max_kv_tokens")) // self.block_size

    @property
    def pool_tokens(self) -> int:
        """Tokens of KV in the pool: `max_kv_tokens` in whole blocks."""
        return self.num_blocks * self.block_size

    @property
    def kept_tokens(self) -> int:
        """Most tokens of KV in the prefix cache; 0 if it is off."""
        return 0 if self.prefix_cache is False else int(self._sized("prefix_cache_tokens"))

    @property
    def kept_state_bytes(self) -> int:
        """Most bytes of states in the prefix cache."""
        return int(self._sized("prefix_states_gib") * (1 << 30))

    def _sized(self, name: str) -> Any:
        """Return a size.

        Raises:
            InvariantError: The setting leaves it open, and no engine has chosen it.
        """
        value = getattr(self, name)
        if value is None:
            raise InvariantError(f"{name} is open: an engine chooses it after loading its model")
        return value

    @property
    def page_size(self) -> int:
        """Tokens of a page of the prefix cache."""
        return max(PAGE_SIZE, self.block_size)

    @property
    def num_swap_blocks(self) -> int:
        """Space for swapped-out KV, in blocks."""
        return self.swap_kv_tokens // self.block_size

    @property
    def batch_invariant(self) -> bool:
        """True for exactness level L2."""
        return self.exactness == Exactness.BATCH_INVARIANT


def engine_config(settings: dict[str, Any]) -> EngineConfig:
    """Make an EngineConfig from keyword settings; an error for an unknown name lists all names."""
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
KINDS["memory"] = KINDS["max_expert_bytes"] = int | None
"""Type of each setting; a `Literal` of the values for those in CHOICES."""


def spelled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of the engine with values read from text, each by its type.

    Raises:
        ConfigError: A text is no value of its setting.
    """
    return read_all(settings, KINDS)


def named_dtype(dtype: Any) -> Any:
    """Return our name of a dtype given as text; other values are returned unchanged.

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
    """Return a device given as text in lower case; other values are returned unchanged.

    Raises:
        ConfigError: It is neither a CPU nor a GPU.
    """
    found = device.lower() if isinstance(device, str) else device
    if str(found).split(":")[0] not in DEVICES:
        raise ConfigError(f"device={device!r} is unknown; use one of {', '.join(DEVICES)}")
    return found


def check_bool(name: str, value: Any) -> None:
    """Refuse a setting that is not a bool.

    Raises:
        ConfigError: It has another type, even if it could mean a bool.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={shown(value)} must be True or False")


def _num_bytes(name: str, value: Any) -> int | None:
    """Return a number of bytes that is given as an integer, or as text with a unit."""
    found: int | None = read(name, value, int | None) if isinstance(value, str) else value
    is_count = isinstance(found, int) and not isinstance(found, bool)
    if found is not None and not (is_count and 1 <= found <= MAX_MEMORY):
        raise ConfigError(
            f"{name}={shown(value)} must be {allowed(name, int | None)}, in [1, {MAX_MEMORY}] bytes"
        )
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def parse_slo(text: str) -> Slo:
    """Read text like `ttft=500ms,tpot=50ms`; one part may be missing, and times may be in `s`.

    Raises:
        ConfigError: The text has another form.
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
