"""The draft model of an engine (`draft="model:PATH"`): its load, and what is refused."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import transformers
from transformers import modeling_layers

from qllm.config import EngineConfig
from qllm.cores import free_bytes
from qllm.drafters.choose import MODEL, MTP, model_path
from qllm.errors import ConfigError, ModelError, shown
from qllm.models.folders import locate, weight_files
from qllm.models.loader import LoadedModel, load
from qllm.models.weights.quantised_linears import weight_bytes
from qllm.runner.cpu import cpu_runner
from qllm.runner.layers.trial import kv_token_bytes
from qllm.runner.runner import TorchRunner


class OwnModel(NamedTuple):
    """A loaded draft model."""

    runner: TorchRunner
    name: str
    weight_bytes: int
    token_bytes: int
    """Bytes of a token's KV in the draft model."""


def draft_model_of(config: EngineConfig, loaded: LoadedModel) -> OwnModel | None:
    """Load the draft model that an engine's settings name; return None if they name none.

    Args:
        config: Settings.
        loaded: The model that verifies the drafts.

    Raises:
        ConfigError: There is no such model, it does not fit into memory, it has another tokenizer
            or vocabulary, or an arrival could not stop it in time. Or the drafts are to come from
            layers of the model itself.
    """
    if config.draft == MTP and config.has_drafts:
        raise ConfigError(_no_mtp(loaded.model.config))
    path = model_path(config.draft)
    if path is None or not config.has_drafts:
        return None
    start = f"draft={config.draft!r} cannot be used"
    if loaded.model.device.type != "cpu":
        raise ConfigError(f"{start}: a draft model runs on the CPU only; use draft='none'")
    try:
        _refuse_large(path)
        drafts = load(path)
        _refuse_others(loaded, drafts)
        num_bytes = weight_bytes(drafts.model)  # the runner packs weights
        runner = cpu_runner(drafts.model, max_segment_ms=config.max_segment_ms)
    except (ConfigError, ModelError) as error:
        raise ConfigError(f"{start}: {error}") from error
    if runner.parts.has_states:
        why = "its layers carry a state, which cannot go back when a draft is rejected"
    elif not runner.backend.is_native:
        why = "not every layer of it runs on our kernels, so an arrival would wait for it"
    else:
        each = kv_token_bytes(runner.parts, drafts.model)
        return OwnModel(runner, drafts.name, num_bytes, each)
    raise ConfigError(f"{start}: {why}; name another model, or use draft='none'")


def _no_mtp(config: Any) -> str:
    """Return the reasons why the layers of a checkpoint that predict further tokens draft nothing.

    Args:
        config: Config of the model.
    """
    text = config.get_text_config(decoder=True)
    num = getattr(text, "num_nextn_predict_layers", None) or getattr(text, "num_mtp_layers", None)
    counted = f"counts {num}" if num else "counts none"
    how = "leaves them out when it loads a model, and computes them only in generate(use_mtp=True)"
    if not hasattr(modeling_layers, "MtpModel"):
        how = "has no class that computes them"
    return (
        f"draft={MTP!r} cannot be used with this model: of layers that predict further tokens "
        f"(num_nextn_predict_layers) its config {counted}; transformers {transformers.__version__} "
        f"{how}, and qllm has no programs for them; use draft='auto', or a draft model with "
        f"draft='{MODEL}PATH'"
    )


def _refuse_large(path: str) -> None:
    """Raise ConfigError if the weights of a model are more than the memory that is free."""
    _, folder = locate(path, weights=True, code=False)
    files = weight_files(folder) if folder.is_dir() else [folder]
    needed, free = sum(file.stat().st_size for file in files), free_bytes()
    if needed > free:
        raise ConfigError(
            f"its weights take {needed} bytes, and {free} bytes of memory are free; name a smaller "
            "model"
        )


def _refuse_others(ours: LoadedModel, theirs: LoadedModel) -> None:
    """Raise ConfigError if a draft model has another tokenizer or vocabulary than the model."""
    if differs := _difference(ours, theirs):
        raise ConfigError(
            f"{differs}; a draft model needs the same tokenizer and vocabulary as the model, so "
            "name a smaller model of the same series"
        )


def _difference(ours: LoadedModel, theirs: LoadedModel) -> str | None:
    """Return the first difference of two tokenizers or vocabularies; None if there is none."""
    texts = [None if one.tokenizer is None else _texts(one.tokenizer) for one in (ours, theirs)]
    if None in texts and texts != [None, None]:
        which = "the model" if texts[0] is None else "the draft model"
        return f"{which} has no tokenizer, and the other one has"
    if None not in texts and texts[0] != texts[1]:
        here, there = (text or {} for text in texts)
        ids = [i for i in sorted(here.keys() | there.keys()) if here.get(i) != there.get(i)]
        first = ids[0]
        return (
            f"{len(ids)} token ids have another text in its tokenizer, the first is {first}: "
            f"{shown(here.get(first))} in the model, {shown(there.get(first))} in the draft model"
        )
    sizes = [_num_logits(one.model) for one in (ours, theirs)]
    if sizes[0] != sizes[1]:
        return f"the model has {sizes[0]} token ids, and the draft model {sizes[1]}"
    return None


def _texts(tokenizer: Any) -> Mapping[int, str]:
    return {number: text for text, number in tokenizer.get_vocab().items()}


def _num_logits(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)
