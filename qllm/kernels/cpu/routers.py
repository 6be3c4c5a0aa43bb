"""Routers: norm, scores, choice of experts and their weights."""

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from qllm.kernels.cpu import Matrix, MatrixStruct, dense, native
from qllm.kernels.cpu.norms import Norm, NormStruct

KINDS = ("softmax", "sigmoid", "sparse_mixer", "softmax_fp32")
"""`RouterKind` in kernels.h."""
MAX_TOP_K = 64
DTYPES = torch.bfloat16, torch.float32
"""Dtypes of weights. Releases of transformers load the routers of some families in fp32."""
MAX_TERMS = 3
"""Most bf16 terms of a weight in fp32."""


class _Router(ctypes.Structure):
    _fields_ = (
        ("norm", NormStruct),
        ("weight", MatrixStruct),
        ("terms", c_int64),
        ("kind", c_int64),
        ("top_k", c_int64),
        ("renormalise", c_int64),
        ("wide", c_int64),
        ("groups", c_int64),
        ("top_groups", c_int64),
        ("correction", c_void_p),
        ("scaling", c_float),
        ("jitter", c_float),
    )


def terms_of(weight_ED: Tensor) -> list[Tensor]:
    """Split a weight into bf16 terms whose sum is the weight: one, or up to three for fp32.

    Each term has eight bits, the next ones after the bits of the earlier terms.
    """
    if weight_ED.dtype is torch.bfloat16:
        return [weight_ED]
    terms, rest = [], weight_ED.detach().float()
    for _ in range(MAX_TERMS):
        terms.append(rest.bfloat16())
        rest = rest - terms[-1].float()
        if not rest.any():
            break
    return terms


class Router:
    """A norm, a router, the choice of experts and their weights.

    Args:
        weight_ED: Weight of the router, in bf16 or fp32.
        norm: Norm before the router.
        kind: Scores: "softmax" over all experts of logits rounded to bf16, "softmax_fp32" or
            "sigmoid" of logits in fp32, or "sparse_mixer", of two experts.
        top_k: Experts per token.
        renormalise: True if the weights are divided by their sum.
        wide: True if weights stay fp32; else they are rounded to bf16.
        bias_E: Bias of the logits.
        correction_E: Numbers added to the scores for the choice alone; only with "sigmoid".
        groups: Number of equal groups of experts. With "sigmoid", the score of a group is that of
            its two best experts. With the softmaxes, it is that of the best expert.
        top_groups: Number of best groups. Experts are chosen only from these groups.
        scaling: Factor of the weights; not with "sparse_mixer".
        jitter: Relative distance from the best score beyond which "sparse_mixer" ignores an expert.

    Raises:
        ValueError: More experts per token than may be chosen, or groups that are not equal.
    """

    def __init__(
        self,
        weight_ED: Tensor,
        norm: Norm,
        *,
        kind: str = "softmax",
        top_k: int,
        renormalise: bool,
        wide: bool,
        bias_E: Tensor | None = None,
        correction_E: Tensor | None = None,
        groups: int = 1,
        top_groups: int = 1,
        scaling: float = 1.0,
        jitter: float = 0.0,
    ) -> None:
        num = weight_ED.shape[0]
        if num % groups or (groups > 1 and num == groups) or not 1 <= top_groups <= groups:
            raise ValueError(f"{top_groups} of {groups} groups of {num} experts")
        most = 2 if kind == "sparse_mixer" else min(MAX_TOP_K, num // groups * top_groups)
        if not 1 <= top_k <= most or (kind == "sparse_mixer" and top_k != 2):
            raise ValueError(f"top_k={top_k} of {num} experts, {top_groups} of {groups} groups")
        terms = terms_of(weight_ED)
        biases = [] if bias_E is None else [bias_E, *[torch.zeros_like(bias_E)] * (len(terms) - 1)]
        matrix = Matrix(terms, biases)
        correction = None if correction_E is None else correction_E.detach().float().contiguous()
        self._keep = (matrix, norm, correction)
        self.top_k = top_k
        self.dtype = torch.float32 if wide else torch.bfloat16
        self._struct = _Router(
            norm.struct,
            matrix.struct,
            len(terms),
            KINDS.index(kind),
            top_k,
            renormalise,
            wide,
            groups,
            top_groups,
            None if correction is None else correction.data_ptr(),
            scaling,
            jitter,
        )
        self.address = ctypes.addressof(self._struct)

    def __call__(self, mid_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normed input [T, D], expert ids [T, K] and their weights [T, K]."""
        mid_TD = dense(mid_TD)
        num = mid_TD.shape[0]
        normed = torch.empty_like(mid_TD)
        ids = torch.empty((num, self.top_k), dtype=torch.int64)
        weights = torch.empty((num, self.top_k), dtype=self.dtype)
        native.route(
            normed.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            mid_TD.data_ptr(),
            num,
            self.address,
        )
        return normed, ids, weights
