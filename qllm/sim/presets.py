"""Costs computed from a model's sizes and a machine's data sheet. Nothing is measured.

The time of an op is the longer of reading its weights and computing with them (on the CPU their
sum), at a fixed part of the data sheet's peak. The costs show the better policy and rough factors,
not exact times. They leave out kernels, tensor parallelism, power limits and other traffic. One GPU
holds the whole model. `qllm calibrate` measures a real machine.
"""

import tomllib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from qllm.errors import ConfigError, ModelError
from qllm.measure.random_moe import MAX_POSITION, SIZES
from qllm.models.aliases import ALIASES
from qllm.sim.costs import CostFile, FileShape
from qllm.sim.runner import SimCosts

_SPARE_PART = 0.1
"""Part of the memory for activations and buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes of a Mixture-of-Experts model, with the names of a Hugging Face config."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    vocab_size: int
    max_position_embeddings: int
    shared_intermediate_size: int = 0
    """Width of the experts that every token uses."""
    expert_bits: float = 16
    """Bits of a weight of the routed experts, in memory. All other weights are bf16."""

    @property
    def attn_weights(self) -> int:
        """Return the weights of one layer's projections."""
        heads = self.num_attention_heads + self.num_key_value_heads
        return 2 * self.hidden_size * heads * self.head_dim

    @property
    def expert_weights(self) -> int:
        """Return the weights of one expert: gate, up and down."""
        return 3 * self.hidden_size * self.moe_intermediate_size

    @property
    def route_weights(self) -> int:
        """Return the weights of one layer's router and shared experts."""
        return self.hidden_size * (self.num_experts + 3 * self.shared_intermediate_size)

    @property
    def head_weights(self) -> int:
        """Return the weights of the output matrix."""
        return self.hidden_size * self.vocab_size

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of one expert in memory."""
        return int(self.expert_weights * self.expert_bits / 8)

    @property
    def weights(self) -> int:
        """Return the number of all weights. Embedding and output matrix count separately."""
        layer = self.attn_weights + self.route_weights + self.num_experts * self.expert_weights
        return self.num_hidden_layers * layer + 2 * self.head_weights

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights in memory."""
        num_experts = self.num_hidden_layers * self.num_experts
        others = self.weights - num_experts * self.expert_weights
        return others * _ITEM_BYTES + num_experts * self.expert_bytes

    @property
    def kv_values(self) -> int:
        """Return the KV values of one token in one layer."""
        return 2 * self.num_key_value_heads * self.head_dim


KNOWN: dict[str, ModelSpec] = {
    **{
        name: ModelSpec(**sizes, max_position_embeddings=MAX_POSITION)
        for name, sizes in SIZES.items()
    },
    "qwen3-30b-a3b": ModelSpec(
        num_hidden_layers=48,
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        max_position_embeddings=40960,
    ),
    "mixtral-8x7b-instruct-v0.1": ModelSpec(
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        moe_intermediate_size=14336,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=32000,
        max_position_embeddings=32768,
    ),
    "olmoe-1b-7b-0924-instruct": ModelSpec(
        num_hidden_layers=16,
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
        moe_intermediate_size=1024,
        num_experts=64,
        num_experts_per_tok=8,
        vocab_size=50304,
        max_position_embeddings=4096,
    ),
    "gpt-oss-20b": ModelSpec(
        num_hidden_layers=24,
        hidden_size=2880,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        moe_intermediate_size=2880,
        num_experts=32,
        num_experts_per_tok=4,
        vocab_size=201088,
        max_position_embeddings=131072,
        expert_bits=4.5,
    ),
}
"""Models known without a download, by the last part of their hub id in small letters. Source: their
config.json; `qllm.measure.random_moe` for the sizes of random weights."""

_NAMES = {
    "moe_intermediate_size": ("moe_intermediate_size", "intermediate_size"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token"),
}
"""Names of sizes in configs, where they differ from ours."""


def model_spec(name: str) -> ModelSpec:
    """Return the sizes of a model, from `KNOWN` or from the config of a folder or hub id.

    Raises:
        ConfigError: The config lacks a size, or its layers are not all alike.
        ModelError: There is no such model.
    """
    hub_id = ALIASES.get(name) or name
    known = KNOWN.get(hub_id.rsplit("/", 1)[-1].lower())
    if known is not None and not Path(name).exists():
        return known
    if name.endswith(".gguf"):
        return _spec_of_gguf(Path(name))
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(hub_id)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"no config of {name!r} ({str(error).splitlines()[0]}); give a folder, a hub id, or "
            f"one of {', '.join(KNOWN)}"
        ) from error
    return spec_of(config, name)


def spec_of(config: Any, name: str) -> ModelSpec:
    """Return the sizes in a Hugging Face config.

    Raises:
        ConfigError: See `model_spec`.
    """
    if getattr(config, "first_k_dense_replace", 0) or getattr(config, "mlp_only_layers", None):
        raise ConfigError(f"{name}: presets know models whose layers all have experts; calibrate")
    if getattr(config, "kv_lora_rank", None):
        raise ConfigError(f"{name}: presets do not know latent attention (MLA); calibrate")
    found: dict[str, int] = {}
    for field in fields(ModelSpec):
        if field.name == "expert_bits":
            continue
        aliases = _NAMES.get(field.name, (field.name,))
        values = [getattr(config, alias, None) for alias in aliases]
        value = next((v for v in values if v is not None), None)
        if value is None and field.name == "head_dim":
            value = config.hidden_size // config.num_attention_heads
        if value is None and field.name == "shared_intermediate_size":
            value = getattr(config, "shared_expert_intermediate_size", None) or 0
        if value is None:
            raise ConfigError(f"{name}: its config has no {' or '.join(aliases)}")
        found[field.name] = int(value)
    return ModelSpec(**found, expert_bits=_bits_of(config, name))


def _spec_of_gguf(path: Path) -> ModelSpec:
    from qllm.models.weights.gguf_file import config_of, expert_bits, open_file

    file = open_file(path)
    return replace(spec_of(config_of(file), str(path)), expert_bits=expert_bits(file))


def _bits_of(config: Any, name: str) -> float:
    """Return the bits of an expert's weight in memory, after the checkpoint's quantisation."""
    from qllm.models.weights.quantised import format_of, method_of

    method = method_of(config, {})
    return 16 if method is None else format_of(name, method).bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Peaks of a machine, the parts of the peaks that are assumed to be reached, and overheads."""

    title: str
    source: str
    bytes_per_ns: float
    """Memory bandwidth in bytes per ns."""
    flops_per_ns: float
    """Peak FLOPs per ns of bfloat16 matrix products."""
    memory_bytes: float
    read_part: float
    """Part of the bandwidth that reads reach."""
    dense_part: float
    """Part of the FLOPs that projections and the output matrix reach."""
    expert_part: float
    """Part of the FLOPs that grouped expert products reach."""
    attn_part: float
    """Part of the FLOPs that attention reaches."""
    glue_bytes_per_ns: float
    """Rate of norms, rotations, gathers and sums."""
    op_ns: float
    """Nanoseconds per op: launches, or calls."""
    step_ns: float
    """Nanoseconds per step: deciding, preparing inputs, sampling."""
    overlap: bool
    out_bytes_per_ns: float = 0.0
    """Bandwidth of the link by which KV leaves for main memory; 0 for KV that stays."""
    in_bytes_per_ns: float = 0.0
    """Bandwidth of the link by which KV comes back, at the same time."""
    threads: int | None = None


HARDWARE: dict[str, Hardware] = {
    "h100": Hardware(
        title="NVIDIA H100 SXM5 80 GB",
        source="data sheet: 3.35 TB/s, 989 TFLOPS dense bfloat16, PCIe 5 of 64 GB/s each way",
        bytes_per_ns=3350,
        flops_per_ns=989e3,
        memory_bytes=80e9,
        read_part=0.8,
        dense_part=0.6,
        expert_part=0.4,
        attn_part=0.4,
        glue_bytes_per_ns=2000,
        op_ns=8_000,
        step_ns=500_000,
        overlap=True,
        out_bytes_per_ns=64,
        in_bytes_per_ns=64,
    ),
    "h200": Hardware(
        title="NVIDIA H200 SXM 141 GB",
        source="data sheet: 4.8 TB/s, 989 TFLOPS dense bfloat16, PCIe 5 of 64 GB/s each way",
        bytes_per_ns=4800,
        flops_per_ns=989e3,
        memory_bytes=141e9,
        read_part=0.8,
        dense_part=0.6,
        expert_part=0.4,
        attn_part=0.4,
        glue_bytes_per_ns=2900,
        op_ns=8_000,
        step_ns=500_000,
        overlap=True,
        out_bytes_per_ns=64,
        in_bytes_per_ns=64,
    ),
    "gh200": Hardware(
        title="NVIDIA GH200 96 GB",
        source="data sheet: 4 TB/s, 989 TFLOPS dense bfloat16, NVLink-C2C of 450 GB/s each way",
        bytes_per_ns=4000,
        flops_per_ns=989e3,
        memory_bytes=96e9,
        read_part=0.8,
        dense_part=0.6,
        expert_part=0.4,
        attn_part=0.4,
        glue_bytes_per_ns=2400,
        op_ns=8_000,
        step_ns=500_000,
        overlap=True,
        out_bytes_per_ns=450,
        in_bytes_per_ns=450,
    ),
    "cpu": Hardware(
        title="one core of a Zen 4 server",
        source="the nominal constants of qllm/runner/cuts.py: 6 GB/s, 180 GFLOPS bfloat16",
        bytes_per_ns=6,
        flops_per_ns=180,
        memory_bytes=16e9,
        read_part=1.0,
        dense_part=1.0,
        expert_part=1.0,
        attn_part=1 / 6,
        glue_bytes_per_ns=2.5,
        op_ns=40_000,
        step_ns=500_000,
        overlap=False,
        threads=1,
    ),
}
"""Presets by name. The parts of peaks and the overheads are assumptions, not measurements."""

_ITEM_BYTES = 2
"""Bytes of a bfloat16."""


_SHEET = {"memory_gb": 1e9, "bandwidth_gb_per_s": 1.0, "tflops": 1e3}
"""Keys of a data sheet, and the factor of each to a field of `Hardware`."""
_SHEET_FIELDS = dict(zip(_SHEET, ("memory_bytes", "bytes_per_ns", "flops_per_ns"), strict=True))


def data_sheet(path: Path) -> Hardware:
    """Return a machine from a TOML file: its data sheet, on top of the preset named by `like`.

        title = "NVIDIA B200"
        memory_gb = 180
        bandwidth_gb_per_s = 8000
        tflops = 2250              # dense bfloat16
        like = "h100"              # whose overheads and parts reached are assumed
        read_part = 0.8            # any field of `Hardware` may be given too

    Raises:
        ConfigError: The file is no TOML, or a name or value in it is wrong.
    """
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the data sheet {path} cannot be read: {error}") from error
    base = HARDWARE.get(str(given.pop("like", "h100")))
    if base is None:
        raise ConfigError(f"{path}: like must be one of {', '.join(HARDWARE)}")
    known = {f.name: f.type for f in fields(Hardware)}
    found: dict[str, Any] = {"title": path.stem, "source": f"data sheet {path.name}"}
    for name, value in given.items():
        if name not in _SHEET and name not in known:
            names = ", ".join([*_SHEET, "like", *known])
            raise ConfigError(f"{path}: unknown name {name!r}; known: {names}")
        if name in ("title", "source"):
            found[name] = str(value)
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name == "overlap":
            if not isinstance(value, bool):
                raise ConfigError(f"{path}: overlap={value!r} must be true or false")
        elif not is_number or not 0 < value < 1e18:
            raise ConfigError(f"{path}: {name}={value!r} must be a number > 0")
        found[_SHEET_FIELDS.get(name, name)] = value * _SHEET[name] if name in _SHEET else value
    missing = [name for name, field in _SHEET_FIELDS.items() if field not in found]
    if missing:
        raise ConfigError(
            f"{path}: {missing[0]} is missing; a data sheet gives {', '.join(_SHEET)}"
        )
    return replace(base, **found)


def hardware_of(name: str) -> Hardware:
    """Return a preset by its name, or a data sheet by its path (`*.toml`).

    Raises:
        ConfigError: There is no such preset and no such file.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    if name.endswith(".toml"):
        return data_sheet(Path(name))
    raise ConfigError(
        f"unknown preset {name!r}; known: {', '.join(HARDWARE)}, or a data sheet of your own, "
        "FILE.toml"
    )


def preset(hardware: str, model: str, expert_weights: str = "auto") -> CostFile:
    """Return the costs of a model on a machine of `HARDWARE`, or of a data sheet.

    Args:
        hardware: Name, or path of a data sheet.
        model: Alias, hub id or folder.
        expert_weights: Format, see `EngineConfig`.

    Raises:
        ConfigError: The machine is unknown, or the model does not fit into its memory.
        ModelError: The model is unknown.
    """
    from qllm.models.weights.formats.rounding import BITS

    machine, spec = hardware_of(hardware), model_spec(model)
    if expert_weights != "auto":
        if spec.expert_bits != 16:
            raise ConfigError(
                f"expert_weights={expert_weights!r} rounds bfloat16 weights, and those of {model} "
                "are quantised already; use 'auto'"
            )
        spec = replace(spec, expert_bits=BITS[expert_weights])
    weight_bytes = spec.weight_bytes
    room = machine.memory_bytes * (1 - _SPARE_PART) - weight_bytes
    kv_bytes = spec.kv_values * spec.num_hidden_layers * _ITEM_BYTES
    max_kv_tokens = int(room / kv_bytes)
    if max_kv_tokens < spec.max_position_embeddings:
        raise ConfigError(
            f"{model} has {weight_bytes / 1e9:.0f} GB of weights; with KV for one sequence they do "
            f"not fit into the {machine.memory_bytes / 1e9:.0f} GB of {hardware}"
        )
    layers = spec.num_hidden_layers
    return CostFile(
        model=model,
        machine=machine.title,
        threads=machine.threads,
        dtype="bfloat16",
        origin="computed",
        note=f"{machine.source}; never compared with such a machine",
        shape=FileShape(
            num_layers=layers,
            num_experts=spec.num_experts,
            experts_per_token=spec.num_experts_per_tok,
            is_moe=(True,) * layers,
            vocab_size=spec.vocab_size,
            max_position=spec.max_position_embeddings,
        ),
        costs=asdict(_roofline(machine, spec)),
        max_kv_tokens=min(max_kv_tokens, 1 << 20),
        expert_bytes=spec.expert_bytes,
    )


def _roofline(machine: Hardware, spec: ModelSpec) -> SimCosts:
    def read(weights: int) -> float:
        return weights * _ITEM_BYTES / (machine.bytes_per_ns * machine.read_part)

    def compute(weights: int, part: float) -> float:
        return 2 * weights / (machine.flops_per_ns * part)

    def glue(passes: int) -> float:
        return passes * spec.hidden_size * _ITEM_BYTES / machine.glue_bytes_per_ns

    def copy(bytes_per_ns: float) -> float:
        token_bytes = spec.kv_values * spec.num_hidden_layers * _ITEM_BYTES
        return token_bytes / (bytes_per_ns * machine.read_part) if bytes_per_ns else 0.0

    scores = 2 * spec.num_attention_heads * spec.head_dim
    return SimCosts(
        overlap=machine.overlap,
        op_ns=machine.op_ns,
        embed_ns=0.0,
        embed_token_ns=glue(2),
        attn_ns=read(spec.attn_weights),
        attn_token_ns=compute(spec.attn_weights, machine.dense_part) + glue(8),
        attn_row_ns=0.0,
        kv_token_ns=read(spec.kv_values),
        pair_ns=compute(scores, machine.attn_part),
        route_ns=read(spec.route_weights),
        route_token_ns=compute(spec.route_weights, machine.dense_part) + glue(4),
        experts_ns=0.0,
        expert_ns=spec.expert_bytes / (machine.bytes_per_ns * machine.read_part),
        expert_token_ns=compute(spec.expert_weights, machine.expert_part) + glue(2),
        combine_ns=0.0,
        combine_token_ns=glue(spec.num_experts_per_tok + 2),
        dense_ns=0.0,
        dense_token_ns=0.0,
        head_ns=read(spec.head_weights),
        head_row_ns=compute(spec.head_weights, machine.dense_part),
        step_ns=machine.step_ns,
        step_row_ns=0.0,
        out_token_ns=copy(machine.out_bytes_per_ns),
        in_token_ns=copy(machine.in_bytes_per_ns),
    )
