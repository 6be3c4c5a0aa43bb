"""The layer of a checkpoint that predicts the token after the next (multi-token prediction, MTP).

DeepSeek-V3 and GLM-4.5 publish one such layer behind their last one. It reads the embedding of a
token, and the model's last hidden state of the token before:

    hidden = eh_proj([enorm(embedding), hnorm(state before)])
    logits = head(post_norm(layer(hidden)))

Here the layer is a model of one layer, of the same class as the whole model. It shares embedding,
head and position embeddings with the whole model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel, modeling_layers

from qllm.cores import why_too_large
from qllm.errors import ModelError
from qllm.models.folders import GGUF, first_line, locate, weight_files
from qllm.models.loader import MAKING
from qllm.models.weights.checkpoint import DTYPES, stored_tensors

AS_STORED = ("BF16", "F16", "F32")
"""Types of weights that are read as they are, as safetensors spells them."""


class MtpEmbedding(nn.Module):
    """The input of the layer: embeddings of tokens, joined with the states of the tokens before.

    Args:
        embed: Embedding of the whole model.
        layer: `MtpLayer` of transformers.
        states_first: True if the states come first in the input of `eh_proj`.
    """

    def __init__(self, embed: nn.Module, layer: Any, *, states_first: bool) -> None:
        super().__init__()
        self.embed, self._states_first = embed, states_first
        self.enorm, self.hnorm, self.eh_proj = layer.enorm, layer.hnorm, layer.eh_proj
        self.states_TD: Tensor | None = None
        """Last hidden states, normed, of the tokens before those of the next call. If it is None,
        the embeddings are used in their place. Only a trial of the layer's code does this."""

    def forward(self, ids: Tensor) -> Tensor:
        """Return the layer's input of token ids."""
        tokens = self.embed(ids)
        states = tokens if self.states_TD is None else self.states_TD.view_as(tokens)
        both = [self.enorm(tokens), self.hnorm(states)]
        joined: Tensor = self.eh_proj(torch.cat(both[::-1] if self._states_first else both, -1))
        return joined


def mtp_model(model: PreTrainedModel) -> tuple[PreTrainedModel, MtpEmbedding]:
    """Return a model of the checkpoint's first layer that predicts further tokens, and its input.

    Args:
        model: Whole model, as it was loaded from its folder.

    Raises:
        ModelError: The config counts no such layer, the installed transformers cannot compute it,
            or the checkpoint has no weights of it that can be read.
    """
    text: Any = model.config.get_text_config(decoder=True)
    num = getattr(text, "num_nextn_predict_layers", None) or getattr(text, "num_mtp_layers", None)
    why = []
    if not num:
        why.append(
            "its config counts no layer that predicts further tokens (num_nextn_predict_layers)"
        )
    if not hasattr(modeling_layers, "MtpModel"):
        why.append(
            f"transformers {transformers.__version__} has no class that computes such layers"
        )
    if why:
        raise ModelError(", and ".join(why))
    folder = _folder_of(model)
    try:
        _refuse_weights(folder, text.num_hidden_layers)
        with MAKING, _read_as(model, folder):
            return _made(model, text)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"transformers {transformers.__version__} cannot read the layer in {folder}: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error


def _made(model: Any, text: Any) -> tuple[PreTrainedModel, MtpEmbedding]:
    whole: Any = modeling_layers.MtpModel.from_pretrained(model)
    layer = whole.layers[0]
    if layer.post_norm is None:
        raise ModelError("its layers that predict further tokens have no norm of their own")
    with torch.device("meta"):
        one = type(model)(model.config.get_mtp_config())
    base, states_first = one.get_decoder(), getattr(text, "mtp_hidden_states_first", False)
    base.embed_tokens = MtpEmbedding(whole.embed_tokens, layer, states_first=states_first)
    base.layers[0], base.norm, base.rotary_emb = layer.mtp_block, layer.post_norm, whole.rotary_emb
    one.lm_head = model.lm_head
    return one.eval(), base.embed_tokens


def _folder_of(model: PreTrainedModel) -> Path:
    """Return the folder of a model's checkpoint."""
    name = str(model.config.name_or_path or "")
    if not name:
        raise ModelError("it was made in memory, and only a checkpoint has such layers")
    _, folder = locate(name, weights=True, code=False)
    if folder.suffix == GGUF:
        raise ModelError(f"{folder} is a GGUF file, from which such layers are not read")
    return folder


def _refuse_weights(folder: Path, layer: int) -> None:
    """Refuse a checkpoint without unquantised weights of the layer with this index.

    Weights that do not fit into the memory that is free are refused too.
    """
    begin, needed = f"layers.{layer}.", 0
    for path in weight_files(folder):
        for name, stored in stored_tensors(path).items():
            if begin not in name and not name.startswith("mtp."):
                continue
            if stored.dtype not in AS_STORED:
                raise ModelError(
                    f"{name} is stored as {stored.dtype}, and such layers are read from "
                    f"{', '.join(AS_STORED)} only"
                )
            needed += DTYPES[stored.dtype].itemsize * prod(stored.shape)
    if not needed:
        raise ModelError(f"{folder} has no weights whose names contain {begin!r}")
    if why := why_too_large(needed):
        raise ModelError(why)


@contextmanager
def _read_as(model: Any, folder: Path) -> Iterator[None]:
    """Make transformers find the first further layer in a folder.

    The class of a model names these layers by the numbers of the published sizes. And a model whose
    experts were not read by transformers has no conversions of experts.
    """
    config = model.config.get_text_config(decoder=True)
    before, patterns = config.num_mtp_layers, model._keys_to_ignore_on_load_unexpected
    name, conversions = model.config.name_or_path, getattr(model, "_weight_conversions", None)
    own = rf"\blayers\.{config.num_hidden_layers}\."
    try:
        model._keys_to_ignore_on_load_unexpected = [*(patterns or ()), own]
        model._weight_conversions = None  # those of its class
        config.num_mtp_layers, model.config.name_or_path = 1, str(folder)
        yield
    finally:
        model._keys_to_ignore_on_load_unexpected = patterns
        model._weight_conversions = conversions
        config.num_mtp_layers, model.config.name_or_path = before, name
