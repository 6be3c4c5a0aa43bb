"""The loader of a model that is ready to run.

Every problem of its folder (no config, not a causal decoder, a missing or truncated shard) is
found before a weight is read.
"""

import gc
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from qllm.cores import no_collections
from qllm.errors import ConfigError, ModelError
from qllm.models.depth import Cut
from qllm.models.fitting import refuse_misfits, without_further_layers
from qllm.models.folders import GGUF, INDEX, WEIGHTS, first_line, locate, read_json, weight_files
from qllm.models.generation import eos_token_ids, sampling_defaults, unlisted_end
from qllm.models.parts.inventory import changed
from qllm.models.tokenizer import tokenizer_in
from qllm.models.weights.checkpoint import DTYPES as CODES
from qllm.models.weights.checkpoint import Checkpoint, Shards, checkpoint_in
from qllm.models.weights.experts_apart import ExpertsApart
from qllm.models.weights.experts_in_file import ExpertsInFolder
from qllm.models.weights.experts_on_demand import ExpertsOnDemand
from qllm.models.weights.experts_on_host import ExpertsOnHost
from qllm.models.weights.formats.layout import PLAIN, Stored
from qllm.models.weights.formats.rounding import ROUNDINGS
from qllm.models.weights.gguf_file import checkpoint_of, config_of, open_file
from qllm.models.weights.quantised import (
    format_of,
    method_of,
    refuse_dtypes,
    refuse_integers,
)
from qllm.models.weights.streaming import stream

EXPERTS_IMPLEMENTATION = "grouped_mm"
"""Expert code of `model.forward` to which our drivers are bit-equal."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOAD_FORMATS = ("auto", "dummy")
DUMMY_SEED = 0

MAKING = threading.Lock()
"""A lock for the time in which transformers makes a model. It changes the process's default dtype
meanwhile, so two models made at once would get each other's dtype.
"""
_had_model = threading.Event()
"""Set once this process has loaded or accepted a model. Parts of a model that is gone, or failed to
load, may remain in reference cycles.
"""
_log = logging.getLogger("qllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in eval mode on its device, with its tokenizer and settings."""

    model: PreTrainedModel
    """The model, made for causal generation."""
    tokenizer: PreTrainedTokenizerBase | None
    """The tokenizer; None if the folder has none (prompts are then token ids)."""
    eos_token_ids: frozenset[int]
    """Every id that ends an answer, from the generation config, the config and the tokenizer."""
    generation_defaults: dict[str, Any]
    """Keywords of SamplingParams set by generation_config.json: temperature, top_p, top_k and
    min_p, unless its `do_sample` is false; repetition_penalty always.
    """
    name: str
    """Hub id, "tiny", or the folder as it was given."""
    weights: str | None = None
    """Description of how quantised weights were stored; None if the checkpoint has none."""


def load(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    load_format: str = "auto",
    expert_weights: str = "auto",
    experts: ExpertsApart | None = None,
    expert_place: tuple[str | None, int] | None = None,
    tp: int = 1,
    depth: int | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer.

    In bf16, quantised weights of experts stay quantised. On a CPU, those of linear modules do too.
    All others are expanded, and a log line names them (docs/guides/quantised-weights.md).

    Args:
        name_or_path: An alias, a folder as `save_pretrained` writes it, a GGUF file or a folder
            with one, or a hub id ORG/NAME.
        dtype: Type of the weights. None or "auto" is the checkpoint's own, but bf16 for GGUF files
            and for quantised checkpoints in fp16.
        device: Device of the weights, without a second copy on the host.
        trust_remote_code: True runs modelling code that comes with the checkpoint.
        load_format: "auto" reads safetensors; "dummy" makes seeded random weights from the
            config alone.
        expert_weights: Format of experts, see `EngineConfig`; "int4" and "mxfp4" round weights
            while they are read.
        experts: Place of the experts outside the model; None keeps them in the model.
        expert_place: Folder for the experts, and most bytes of experts where the model computes,
            in place of `experts`. Without a folder they are in the host's memory, for a GPU. If all
            experts fit, they stay in the model.
        tp: Number of ranks that will share the model. Several ranks on the CPU read their own
            experts later.
        depth: Number of layers to load; the others are not read. None loads the whole model.

    Raises:
        ConfigError: An unknown name, dtype, device or load format, a depth that the model does not
            have, or a model without experts that `expert_weights` can round.
        ModelError: The model is missing, broken, not a causal decoder, or quantised in an
            unsupported way.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format={load_format!r} is unknown; use one of {', '.join(LOAD_FORMATS)}"
        )
    wanted, place = _dtype(dtype), check_device(device)
    dummy, weights = load_format == "dummy", None
    if expert_place is not None:
        experts = _experts_in(*expert_place)
    on_gpu = place.type != "cpu" and not isinstance(experts, ExpertsOnHost)
    if experts is not None and (dummy or on_gpu):
        raise ConfigError(
            f"experts {experts.where} are read from a checkpoint: load_format={load_format!r} on "
            f"device={str(device)!r} does not do so; use load_format='auto', and a file of experts "
            "on the CPU alone"
        )
    if tp > 1 and experts is None and not dummy and place.type == "cpu":
        experts = ExpertsOnDemand()
    name, folder = locate(os.fspath(name_or_path), weights=not dummy, code=trust_remote_code)
    config = _config(name, folder, trust_remote_code)
    with MAKING:
        cut = None if depth is None else _cut(name, config, depth, dummy=dummy)
        how = expert_weights, experts, cut
        if dummy:
            model = _dummy(name, config, wanted, place, trust_remote_code)
        elif folder.suffix == GGUF:
            model, weights = _of_gguf(name, folder, config, wanted, place, *how)
        else:
            model, weights = _of_folder(
                name, folder, config, wanted, place, trust_remote_code, *how
            )
        if cut is not None:
            cut.finish(model)
    _use_grouped_mm(model)
    model.train(False)
    if weights is not None:
        _log.warning("weights of model %r: %s", name, weights)
    tokenizer = tokenizer_in(name, folder, trust_remote_code)
    generation: Mapping[str, Any] = (
        open_file(folder).sampling
        if folder.suffix == GGUF
        else read_json(folder / "generation_config.json")
    )
    return _loaded(name, model, tokenizer, generation, weights)


def skeleton(name_or_path: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """Make a model from its config alone, with its parameters on the meta device.

    Raises:
        ConfigError: The name is no alias, folder or hub id.
        ModelError: The config is missing, or no model can be made from it.
    """
    name, folder = locate(name_or_path, weights=False, code=trust_remote_code)
    config = _config(name, folder, trust_remote_code)
    with MAKING:
        model = _dummy(name, config, None, torch.device("meta"), trust_remote_code)
    model.train(False)
    return model


def wrap(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> LoadedModel:
    """Take a model that is loaded already, without copying or changing it.

    Raises:
        ModelError: The model is not a causal decoder.
    """
    config = model.config
    name = getattr(config, "_name_or_path", "") or type(model).__name__
    _refuse_if_not_causal(name, config, known=model.can_generate())
    generation = getattr(model, "generation_config", None)
    return _loaded(name, model, tokenizer, generation.to_dict() if generation else {})


def _loaded(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    generation: Mapping[str, Any],
    weights: str | None = None,
) -> LoadedModel:
    _had_model.set()
    if parts := changed(model):
        _log.warning(
            "model %r: parts of transformers %s compute something else than qllm knows: %s; their "
            "own modules run instead, more slowly (docs/guides/families.md)",
            name,
            transformers.__version__,
            "; ".join(f"{part.source} ({part.known.how})" for part in parts),
        )
    ends = eos_token_ids(generation, model, tokenizer)
    if (token := unlisted_end(tokenizer, ends)) is not None:
        _log.warning(
            "model %r: its chat template writes %r behind an answer, and that token ends none "
            "(ends are the ids %s): answers may go on behind it; add its id to eos_token_id in "
            "generation_config.json, or ask with stop=[%r]",
            *(name, token, ", ".join(map(str, sorted(ends))) or "none", token),
        )
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=ends,
        generation_defaults=sampling_defaults(name, generation),
        name=name,
        weights=weights,
    )


def _experts_in(folder: str | None, max_bytes: int) -> ExpertsApart:
    """Return the place of experts: a file in a folder, or the host's memory."""
    return ExpertsOnHost(max_bytes) if folder is None else ExpertsInFolder(Path(folder), max_bytes)


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or dtype == "auto":
        return None
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise ConfigError(f"dtype={dtype!r} is unknown; use auto or one of {', '.join(DTYPES)}")
    return found


def check_device(device: str | torch.device) -> torch.device:
    """Return the device of that name. Before CUDA starts, set it to load its kernels at the start.

    Raises:
        ConfigError: The device is unknown or missing.
    """
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r} is unknown; use cpu or cuda") from error
    if place.type == "cuda" and place.index:
        raise ConfigError(
            f"device={device!r}: only the first device is used; say device='cuda' and choose it "
            f"with CUDA_VISIBLE_DEVICES={place.index}"
        )
    if place.type == "cuda":
        # A kernel that is loaded while serving waits for all running work.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        # Streams that share a hardware queue wait for each other.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: torch sees no CUDA device here; use cpu")
    if place.type == "meta":
        raise ConfigError("device='meta' holds no weights; use cpu or cuda")
    return place


def _config(name: str, folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    if folder.suffix == GGUF:
        return config_of(open_file(folder))
    raw = read_json(folder / "config.json")
    if "auto_map" in raw and not trust_remote_code and not _known_type(raw.get("model_type")):
        raise ModelError(
            f"model {name!r} (type {raw.get('model_type')!r}) brings its own modelling code; "
            "pass trust_remote_code=True to run it, if you trust its author"
        )
    try:
        config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise ModelError(
            f"config.json of model {name!r} is not usable: {first_line(error)}"
        ) from error
    named = getattr(config, "transformers_weights", None)
    if named is not None:
        raise ModelError(
            f"config.json of model {name!r} names its weights (transformers_weights={named!r}); "
            f"read are {WEIGHTS} and what {INDEX} lists: rename them, and take that line out"
        )
    known = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    brought = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    _refuse_if_not_causal(name, config, known=known or brought)
    return config


def _known_type(model_type: object) -> bool:
    return isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING


def _refuse_if_not_causal(name: str, config: PreTrainedConfig, *, known: bool) -> None:
    what = f"model {name!r} ({', '.join(config.architectures or ()) or config.model_type})"
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{what} is an encoder-decoder; only causal decoders can be served")
    if not known:
        raise ModelError(
            f"{what} has no causal language model in transformers; it cannot be served"
        )
    named = any(name.endswith("ForCausalLM") for name in config.architectures or ())
    if getattr(config, "is_decoder", True) is False and not named:
        raise ModelError(f"{what} attends in both directions (is_decoder is false), not causally")


def _cut(name: str, config: PreTrainedConfig, depth: int, *, dummy: bool) -> Cut | None:
    """Return the first layers of a model; None if they are all.

    Raises:
        ConfigError: The depth is no number of layers that the model has, or the model is not one
            that can be cut.
        ModelError: The model cannot be made from its config.
    """
    if dummy or not _is_known(config):
        what = "load_format='dummy' reads no layers" if dummy else "it brings its own code"
        raise ConfigError(
            f"depth={depth!r}: model {name!r} cannot be cut, because {what}; leave depth out"
        )
    cut = Cut(name, _dummy(name, config, None, torch.device("meta"), False), depth)
    return None if cut.is_whole else cut


def _use_grouped_mm(model: PreTrainedModel) -> None:
    # A class without the experts decorator (a dense model, remote code) has nothing to set.
    can_set = getattr(model, "_can_set_experts_implementation", None)
    if can_set is not None and can_set():
        model.set_experts_implementation(EXPERTS_IMPLEMENTATION)


def _pretrained(
    name: str,
    folder: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype | None,
    device: torch.device,
    trust_remote_code: bool,
) -> PreTrainedModel:
    auto: Any = transformers.AutoModelForCausalLM
    model: PreTrainedModel
    with _naming_weights(name):
        model, info = auto.from_pretrained(
            folder,
            config=config,
            dtype="auto" if dtype is None else dtype,
            device_map=None if device.type == "cpu" else {"": device},
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # mismatches are refused by name below
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    info["unexpected_keys"] = without_further_layers(info["unexpected_keys"], config)
    _refuse_misfit(name, info)
    return model


def _of_folder(
    name: str,
    folder: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype | None,
    device: torch.device,
    trust_remote_code: bool,
    expert_weights: str,
    experts: ExpertsApart | None,
    cut: Cut | None,
) -> tuple[PreTrainedModel, str | None]:
    """Return a model of safetensors, and how its weights were stored if they are quantised."""
    rounding = expert_weights if expert_weights in ROUNDINGS else None
    with _reading():
        shards = Shards(weight_files(folder))
        shards.keep(without_further_layers(shards.stored, config))
        method = method_of(config, read_json(folder / "hf_quant_config.json"))
        if experts is not None:
            experts.identify(weight_files(folder), method, expert_weights)
        if method is not None:
            form = format_of(name, method)
            checkpoint, rest = checkpoint_in(name, shards, form)
            refuse_dtypes(name, rest, f"no scales where {form.name} has them")
            return _streamed(name, config, checkpoint, rest, dtype, device, None, experts, cut)
        refuse_dtypes(name, shards.stored, "no known quantization_config to scale them")
        own = experts is not None or cut is not None
        if own or (rounding is not None and _is_known(config)):
            checkpoint, rest = checkpoint_in(name, shards, PLAIN, mapped=cut is None)
            place = dtype, device
            return _streamed(name, config, checkpoint, rest, *place, rounding, experts, cut)
    tensors = shards.stored
    del shards  # transformers opens the files itself
    _refuse_by_header(name, config, tensors, ())
    model = _pretrained(name, folder, config, dtype, device, trust_remote_code)
    refuse_integers(model, name, tensors)
    return model, None


def _of_gguf(
    name: str,
    path: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype | None,
    device: torch.device,
    expert_weights: str,
    experts: ExpertsApart | None,
    cut: Cut | None,
) -> tuple[PreTrainedModel, str | None]:
    """Return a model of a GGUF file, and how its weights were stored."""
    with _reading():
        file = open_file(path)
        if experts is not None:
            experts.identify([path], None, expert_weights)
        model = _dummy(name, config, None, torch.device("meta"), False)
        kind = dtype or torch.bfloat16  # the file has no dtype
        checkpoint = checkpoint_of(file, model)
        return _streamed(name, config, checkpoint, {}, kind, device, None, experts, cut)


def _refuse_by_header(
    name: str, config: PreTrainedConfig, plain: Mapping[str, Stored], quantised: Iterable[str]
) -> None:
    if _is_known(config):
        model = _dummy(name, config, None, torch.device("meta"), False)
        shapes: dict[str, tuple[int, ...] | None] = dict.fromkeys(quantised)
        refuse_misfits(name, model, shapes | {key: stored.shape for key, stored in plain.items()})


def _is_known(config: PreTrainedConfig) -> bool:
    """Return True if transformers has the model's code."""
    return type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING


def _streamed(
    name: str,
    config: PreTrainedConfig,
    checkpoint: Checkpoint,
    rest: Mapping[str, Stored],
    dtype: torch.dtype | None,
    device: torch.device,
    rounding: str | None,
    experts: ExpertsApart | None,
    cut: Cut | None,
) -> tuple[PreTrainedModel, str | None]:
    """Return a model of an open checkpoint, and how its weights were stored if not plainly."""
    if not _is_known(config):
        advice = "is quantised and brings its own modelling code; load bfloat16 weights"
        if experts is not None:
            advice = f"brings its own modelling code; {experts.advice}"
        raise ModelError(f"model {name!r} {advice}")
    if rest:
        _refuse_by_header(name, config, rest, checkpoint.quantised)
    kind = dtype or getattr(config, "dtype", None) or _stored_dtype(rest)
    is_plain = checkpoint.format == PLAIN.name
    if dtype is None and not is_plain and kind is torch.float16:
        kind = torch.bfloat16
    if experts is not None and kind is not torch.bfloat16:
        raise ConfigError(
            f"experts {experts.where} are bfloat16, not {kind}; use dtype='bfloat16', or "
            f"{experts.advice}"
        )
    _forget_quantisation(config)
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if cut is not None:
        model_class, checkpoint = cut.model_class, cut.of_checkpoint(checkpoint)
        rest = cut.of(rest)
    with _naming_weights(name):
        how = kind, device, rounding, experts
        model, info, outcome = stream(model_class, config, checkpoint, *how)
    model.config.name_or_path = name  # as transformers does when it reads the files itself
    _refuse_misfit(name, info)
    if rounding is not None and not outcome.kept:
        raise ConfigError(
            f"expert_weights={rounding!r}: model {name!r} has no experts that can be rounded; use "
            'expert_weights="auto"'
        )
    refuse_integers(model, name, rest)
    if is_plain and not (outcome.kept or outcome.linears or outcome.expanded):
        return model, None
    return model, outcome.text(rounding or checkpoint.format, kind)


def _forget_quantisation(config: PreTrainedConfig) -> None:
    for part in (config, config.get_text_config(decoder=True)):
        for key in ("quantization_config", "compression_config"):
            vars(part).pop(key, None)


def _stored_dtype(tensors: Mapping[str, Stored]) -> torch.dtype:
    """Return the first dtype of floats among the tensors of a checkpoint, or bf16."""
    for stored in tensors.values():
        dtype = CODES.get(stored.dtype)
        if dtype is not None and dtype in DTYPES.values():
            return dtype
    return torch.bfloat16


@contextmanager
def _reading() -> Iterator[None]:
    """Turn Python's collection of cycles off while weights are read.

    Tables of a hundred thousand tensors trigger one collection after another, each of which scans
    all objects of torch and transformers. That would take a twentieth of the time of a load.
    """
    if _had_model.is_set():  # unused weights of an earlier model may be as large as these
        gc.collect()
    _had_model.set()
    with no_collections():
        yield


@contextmanager
def _naming_weights(name: str) -> Iterator[None]:
    """Turn errors of transformers into a ModelError that names the model."""
    try:
        yield
    except (ConfigError, ModelError):
        raise
    except Exception as error:
        raise ModelError(
            f"weights of model {name!r} cannot be loaded: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error


def _refuse_misfit(name: str, info: Mapping[str, Any]) -> None:
    """Refuse weights that transformers would initialise at random, or ignore."""
    if shapes := sorted(info.get("mismatched_keys") or ()):
        weight, found, wanted = shapes[0]
        raise ModelError(
            f"checkpoint of model {name!r} does not fit its config: {len(shapes)} weights of "
            f"another shape, first {weight}, which is {tuple(found)} and must be {tuple(wanted)}; "
            "download it again"
        )
    for key in ("missing_keys", "unexpected_keys", "error_msgs"):
        wrong = sorted(map(str, info.get(key) or ()))
        if wrong:
            advice = "download it again"
            if key == "unexpected_keys":
                advice = "it is of another model, or quantised by a method that is not supported"
            raise ModelError(
                f"checkpoint of model {name!r} does not fit its config: {len(wrong)} "
                f"{key.replace('_', ' ')}, first {wrong[0]}; {advice}"
            )


def _dummy(
    name: str,
    config: PreTrainedConfig,
    dtype: torch.dtype | None,
    device: torch.device,
    trust_remote_code: bool,
) -> PreTrainedModel:
    auto: Any = transformers.AutoModelForCausalLM
    wanted = dtype or getattr(config, "dtype", None) or torch.float32
    try:
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(DUMMY_SEED)
            model: PreTrainedModel = auto.from_config(
                config, dtype=wanted, trust_remote_code=trust_remote_code
            )
            return model
    except Exception as error:
        raise ModelError(
            f"model {name!r} cannot be made from its config: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error
