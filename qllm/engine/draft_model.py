"""The draft model of an engine: its load, and what is refused.

It is another model (`draft="model:PATH"`), or a layer of the model's own checkpoint that predicts
further tokens (`draft="mtp"`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from qllm.config import EngineConfig
from qllm.cores import why_too_large
from qllm.drafters.choose import MODEL, MTP, model_path
from qllm.drafters.mtp import MOST_STATES_OF_ALL
from qllm.errors import ConfigError, ModelError, shown
from qllm.models.depth import num_layers, whole_layers
from qllm.models.folders import locate, weight_files
from qllm.models.loader import LoadedModel, load
from qllm.models.mtp import MtpEmbedding, mtp_model
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
    embedding: MtpEmbedding | None = None
    """Input of the model's own further layer; None if the draft model is another model."""


def draft_model_of(config: EngineConfig, loaded: LoadedModel) -> OwnModel | None:
    """Load the draft model that an engine's settings name; return None if they name none.

    Args:
        config: Settings.
        loaded: The model that verifies the drafts.

    Raises:
        ConfigError: There is no such model, it does not fit into memory, it has another tokenizer
            or vocabulary, or an arrival could not stop it in time. Or the model's checkpoint has no
            layer that predicts further tokens, or none that can be used.
    """
    path = model_path(config.draft)
    if not config.has_drafts or (path is None and config.draft != MTP):
        return None
    start = f"draft={config.draft!r} cannot be used"
    if loaded.model.device.type != "cpu":
        raise ConfigError(f"{start}: a draft model runs on the CPU only; use draft='none'")
    if path is None:
        start = f"{start} with this model"
        advice = f"use draft='auto', or a draft model with draft='{MODEL}PATH'"
    else:
        advice = "name another model, or use draft='none'"
    try:
        own = _further_layer(config, loaded) if path is None else _other_model(path, config, loaded)
    except (ConfigError, ModelError) as error:
        end = f"; {advice}" if path is None else ""
        raise ConfigError(f"{start}: {error}{end}") from error
    if own.runner.parts.has_states:
        why = "its layers carry a state, which cannot go back when a draft is rejected"
    elif not own.runner.backend.is_native:
        why = "not every layer of it runs on our kernels, so an arrival would wait for it"
    else:
        return own
    raise ConfigError(f"{start}: {why}; {advice}")


def _other_model(path: str, config: EngineConfig, loaded: LoadedModel) -> OwnModel:
    """Load another model that drafts."""
    _refuse_large(path)
    drafts = load(path)
    _refuse_others(loaded, drafts)
    num_bytes = weight_bytes(drafts.model)  # the runner packs weights
    runner = cpu_runner(drafts.model, max_segment_ms=config.max_segment_ms)
    return OwnModel(runner, drafts.name, num_bytes, kv_token_bytes(runner.parts, drafts.model))


def _further_layer(config: EngineConfig, loaded: LoadedModel) -> OwnModel:
    """Load the layer of the model's checkpoint that predicts further tokens.

    Its experts are rounded as those of the model.

    Raises:
        ConfigError: The model is cut: its last layer is not the one that such a layer reads.
    """
    if (depth := num_layers(loaded.model)) != (whole := whole_layers(loaded.model)):
        raise ConfigError(
            f"the model is cut to depth={depth}, and the layer that predicts further tokens reads "
            f"what the last of all {whole} layers computes"
        )
    layer, embedding = mtp_model(loaded.model)
    num_bytes = weight_bytes(layer) - weight_bytes(embedding.embed)
    runner = cpu_runner(
        layer,
        max_segment_ms=config.max_segment_ms,
        expert_weights=config.expert_weights,
        # with "auto" the layer's weights stay as they are stored, in bf16
        activations="bf16" if config.expert_weights == "auto" else config.activations,
    )
    each, like = kv_token_bytes(runner.parts, layer), runner.parts.like
    states = MOST_STATES_OF_ALL * like.shape[-1] * like.itemsize
    return OwnModel(runner, loaded.name, num_bytes + states, each, embedding)


def _refuse_large(path: str) -> None:
    """Raise ConfigError if the weights of a model are more than the memory that is free."""
    _, folder = locate(path, weights=True, code=False)
    files = weight_files(folder) if folder.is_dir() else [folder]
    if why := why_too_large(sum(file.stat().st_size for file in files)):
        raise ConfigError(f"{why}; name a smaller model")


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
