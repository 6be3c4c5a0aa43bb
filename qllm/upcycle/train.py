"""Sparse upcycling: a Mixture-of-Experts model made from a dense one.

Every expert is a copy of the dense model's FFN, and a new router chooses among them. The weights of
the chosen experts sum to 1. So before any noise or training the new model computes the same as the
dense model, up to rounding. Source: Komatsuzaki et al., Sparse Upcycling, arXiv:2212.05055.
Differences: all layers are upcycled, and seeded noise can make the copies differ.
"""

import hashlib
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import MixtralConfig, PreTrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

from qllm.errors import ConfigError, ModelError
from qllm.models.weights.dense import Dense, meta_model, open_dense
from qllm.upcycle.router_training import MOST_STEPS, Training, read_windows, train_routers

SHARED_WIDTH = 64
"""Width of the shared expert that Qwen2-MoE must have. The shared expert's weights are zeros."""
MOST_EXPERTS = 1024
_FFN = re.compile(r"(model\.layers\.\d+)\.mlp\.(gate|up|down)_proj\.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$")
"""Names of buffers in old checkpoints that may be ignored."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class _Target(NamedTuple):
    """An MoE family: its config, and the names of its additions to a dense layer."""

    config: Any
    router: str
    expert: str
    """Template for the name of one matrix of an expert, with the fields `expert` and `matrix`."""
    matrices: Mapping[str, str]
    """Name of each matrix of an expert, by the name of the matrix in the dense FFN."""
    settings: Mapping[str, Any] = {}
    """Further settings of the config, besides experts, top-k and width."""


_OWN_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_MIXTRAL = _Target(
    MixtralConfig,
    "block_sparse_moe.gate.weight",
    "block_sparse_moe.experts.{expert}.{matrix}.weight",
    {"gate": "w1", "up": "w3", "down": "w2"},
)
_QWEN3 = _Target(
    Qwen3MoeConfig,
    "mlp.gate.weight",
    "mlp.experts.{expert}.{matrix}.weight",
    _OWN_NAMES,
    {"norm_topk_prob": True},
)
_QWEN2 = _QWEN3._replace(
    config=Qwen2MoeConfig,
    settings={"norm_topk_prob": True, "shared_expert_intermediate_size": SHARED_WIDTH},
)
TARGETS: Mapping[str, _Target] = {
    "llama": _MIXTRAL,
    "mistral": _MIXTRAL,
    "qwen2": _QWEN2,  # the attention of this family has biases
    "qwen3": _QWEN3,
}
"""Family with experts and the same attention, by the `model_type` of a dense model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings of the experts."""

    experts: int = 8
    top_k: int = 2
    """Experts per token."""
    seed: int = 0
    """Seed of routers and noise. Each tensor is a function of the seed and the tensor's name."""
    noise: float = 0.0
    """Standard deviation of the noise in a copy, relative to that of the copied matrix."""
    dtype: str | None = None
    """A key of DTYPES. None is the type of the dense weights, or bfloat16 if they are quantised."""
    train_steps: int = 0
    """Steps of a training of the routers alone. It needs `text`, and memory for the model in
    float32."""
    text: Path | None = None
    """File of the text on which the routers are trained."""

    def __post_init__(self) -> None:
        if not 2 <= self.experts <= MOST_EXPERTS:
            raise ConfigError(f"experts={self.experts!r} must be in [2, {MOST_EXPERTS}]")
        if not 1 <= self.top_k <= self.experts:
            raise ConfigError(
                f"top_k={self.top_k!r} must be in [1, {self.experts}], the number of experts"
            )
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed!r} must be at least 0")
        if not (math.isfinite(self.noise) and 0 <= self.noise <= 1):
            raise ConfigError(f"noise={self.noise!r} must be in [0, 1]")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} is unknown; use one of {', '.join(DTYPES)}")
        if not 0 <= self.train_steps <= MOST_STEPS:
            raise ConfigError(f"train_steps={self.train_steps!r} must be in [0, {MOST_STEPS}]")
        if (self.train_steps > 0) != (self.text is not None):
            raise ConfigError(
                f"train_steps={self.train_steps!r} and text={self.text}: a training of the routers "
                "needs both, a number of steps and a text"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Upcycled:
    """The written model."""

    folder: Path
    architecture: str
    num_parameters: int
    num_bytes: int
    """Size of all weights."""
    training: Training | None = None


def upcycle(dense: str | Path, out: str | Path, recipe: Recipe | None = None) -> Upcycled:
    """Write a model with experts, made from a dense one.

    Weights are read and written layer by layer, so at most one layer of the new model is in memory.

    Args:
        dense: A folder as `save_pretrained` writes it, or a .gguf file.
        out: The new folder. It appears when all files are complete.
        recipe: Number of experts, and the differences between them.

    Raises:
        ConfigError: `out` exists.
        ModelError: The dense model is missing, broken, or cannot be upcycled.
    """
    recipe, place = recipe or Recipe(), Path(out).expanduser()
    if place.exists():
        raise ConfigError(f"{place} exists and is left as it is; choose another folder")
    source = open_dense(Path(dense).expanduser())
    target = _target(source.config)
    _check_tensors(source)
    dtype = source.dtype if recipe.dtype is None else DTYPES[recipe.dtype]
    config = _config(source.config, target, recipe, dtype)
    place.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        config.save_pretrained(work)
        source.save_beside(work)
        windows = None if recipe.text is None else read_windows(work, recipe.text)
        index = _write_shards(work, _shards(source, target, recipe, dtype))
        routers = [name for name in index["weight_map"] if name.endswith(target.router)]
        training = None
        if windows is not None:
            training = train_routers(work, routers, windows, recipe.train_steps, recipe.seed)
        model = meta_model(config)
        made = Upcycled(
            folder=place,
            architecture=type(model).__name__,
            num_parameters=sum(p.numel() for p in model.parameters()),
            num_bytes=index["metadata"]["total_size"],
            training=training,
        )
        (work / "README.md").write_text(_readme(Path(dense).name, made, recipe, dtype))
        work.chmod(0o755)
        work.rename(place)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return made


def _target(config: PreTrainedConfig) -> _Target:
    """Return the family with experts for a dense model."""
    kind = config.model_type
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if getattr(config, name, None):
            raise ModelError(f"a {kind} model has experts already; give a dense one")
    target = TARGETS.get(kind)
    if target is None:
        raise ModelError(
            f"a {kind!r} model cannot be upcycled; known dense families: {', '.join(TARGETS)}"
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    for wrong, what in (
        (getattr(config, "attention_bias", False), "biases in its attention"),
        (getattr(config, "mlp_bias", False), "biases in its FFN"),
        ("sliding_attention" in kinds, "sliding windows in some layers"),
        (config.hidden_act != "silu", f"the activation {config.hidden_act!r}"),
    ):
        if wrong:
            family = target.config.model_type
            raise ModelError(f"this {kind} model has {what}, which {family} models have not")
    return target


def _check_tensors(source: Dense) -> None:
    """Compare names and shapes with the tensors that transformers makes for the config."""
    expected = {name: tuple(t.shape) for name, t in meta_model(source.config).state_dict().items()}
    if source.config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    stored = {
        name: shape
        for name, shape in source.shapes.items()
        if not _HARMLESS.search(name) and (name in expected or name != "lm_head.weight")
    }
    wrong = sorted(
        name for name in expected.keys() | stored.keys() if expected.get(name) != stored.get(name)
    )
    if wrong:
        name = wrong[0]
        raise ModelError(
            f"the checkpoint does not fit its config: {len(wrong)} tensors, first {name} of shape "
            f"{stored.get(name, 'none')} instead of {expected.get(name, 'none')}; download it again"
        )


def _config(
    dense: PreTrainedConfig, target: _Target, recipe: Recipe, dtype: torch.dtype
) -> PreTrainedConfig:
    known = {*target.config().to_dict(), "head_dim"} - {"model_type", "architectures", "dtype"}
    taken = {name: value for name, value in dense.to_dict().items() if name in known}
    experts = "num_local_experts" if target is _MIXTRAL else "num_experts"
    width = "intermediate_size" if target is _MIXTRAL else "moe_intermediate_size"
    config: PreTrainedConfig = target.config(
        **{
            **taken,
            **target.settings,
            experts: recipe.experts,
            width: dense.intermediate_size,
            "num_experts_per_tok": recipe.top_k,
            "dtype": str(dtype).removeprefix("torch."),
        }
    )
    config.architectures = [type(meta_model(config)).__name__]
    return config


def _shards(
    source: Dense, target: _Target, recipe: Recipe, dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """Yield the new checkpoint: tensors outside the layers, then layer by layer."""
    by_layer: dict[int, list[str]] = {}
    for name in source.shapes:
        if _HARMLESS.search(name) or (
            name == "lm_head.weight" and source.config.tie_word_embeddings
        ):
            continue
        found = _LAYER.match(name)
        by_layer.setdefault(-1 if found is None else int(found[1]), []).append(name)
    for layer in sorted(by_layer):
        shard: dict[str, Tensor] = {}
        for name in by_layer[layer]:
            shard.update(_tensors(name, source.read(name), target, recipe))
        if layer >= 0:
            shard.update(_new_tensors(f"model.layers.{layer}.", source.config, target, recipe))
        yield {name: tensor.to(dtype).contiguous() for name, tensor in shard.items()}


def _tensors(
    name: str, weight: Tensor, target: _Target, recipe: Recipe
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of the new model for a dense tensor: the same, or one copy per expert."""
    found = _FFN.fullmatch(name)
    if found is None:
        yield name, weight
        return
    prefix, matrix = found[1], target.matrices[found[2]]
    for expert in range(recipe.experts):
        own = f"{prefix}.{target.expert.format(expert=expert, matrix=matrix)}"
        if recipe.noise:
            wide = weight.float()
            yield own, wide + recipe.noise * wide.std() * _normal(recipe.seed, own, wide.shape)
        else:
            yield own, weight.clone()


def _new_tensors(
    layer: str, config: PreTrainedConfig, target: _Target, recipe: Recipe
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a dense layer lacks: a router, and Qwen2-MoE's shared expert."""
    width, name = config.hidden_size, layer + target.router
    yield name, config.initializer_range * _normal(recipe.seed, name, (recipe.experts, width))
    if "shared_expert_intermediate_size" in target.settings:
        for matrix in _OWN_NAMES.values():
            shape = (width, SHARED_WIDTH) if matrix == "down_proj" else (SHARED_WIDTH, width)
            yield (
                f"{layer}mlp.shared_expert.{matrix}.weight",
                torch.zeros(shape, dtype=torch.float32),
            )
        yield f"{layer}mlp.shared_expert_gate.weight", torch.zeros(1, width, dtype=torch.float32)


def _normal(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    made = torch.Generator().manual_seed(int.from_bytes(digest))
    return torch.randn(shape, generator=made, dtype=torch.float32)


def _write_shards(folder: Path, found: Iterator[dict[str, Tensor]]) -> dict[str, Any]:
    """Write one file per shard; return their index."""
    weight_map: dict[str, str] = {}
    size = 0
    for number, tensors in enumerate(found):
        file = f"model-{number:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return index


def _readme(dense: str, made: Upcycled, recipe: Recipe, dtype: torch.dtype) -> str:
    try:
        by = version("qllm-runtime")
    except PackageNotFoundError:
        by = "unknown"
    trained = ""
    if made.training is not None:
        before, after = made.training.busiest
        trained = (
            f" Routers trained for {made.training.steps} steps; the busiest expert of a layer had "
            f"{before:.0%} of the choices before and {after:.0%} after."
        )
    return (
        f"# {made.folder.name}\n\n"
        f"Made by `qllm upcycle` (qllm-runtime {by}) of {dense}: sparse upcycling, "
        "arXiv:2212.05055.\n\n"
        f"{made.architecture}, {made.num_parameters:,} parameters in "
        f"{str(dtype).removeprefix('torch.')}; experts {recipe.experts}, top-k {recipe.top_k}, "
        f"seed {recipe.seed}, noise {recipe.noise:g}.{trained}\n\n"
        "The licence is that of the dense model.\n"
    )
