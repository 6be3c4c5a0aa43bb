"""Routers: norm, scores, choice and weights of experts."""

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from qllm.kernels.cpu import Matrix, MatrixStruct, dense, native
from qllm.kernels.cpu.norms import Norm, NormStruct

KINDS = ("softmax", "sigmoid", "sparse_mixer", "softmax_fp32")
"""`RouterKind` of kernels.h."""
MAX_TOP_K = 64
DTYPES = torch.bfloat16, torch.float32
"""Dtypes of weights. Releases of transformers load the routers of some families in fp32."""
MAX_TERMS = 3
"""Terms of bf16 in a weight of fp32."""


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
    """Split a weight into few terms in bf16, whose sum it is: one, or up to three if it is fp32.

    Every term has the eight bits behind those of the terms before it.
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
    """Norm, router, choice of experts and their weights.

    Args:
        weight_ED: Of the router, in bf16 or fp32.
        norm: Before it.
        kind: "softmax" of the logits, rounded to bf16, over all experts; "softmax_fp32" and
            "sigmoid" of logits in fp32; "sparse_mixer", of two experts.
        top_k: Experts per token.
        renormalise: Divide the weights by their sum.
        wide: Weights stay fp32; else they are rounded to bf16.
        bias_E: Of the logits.
        correction_E: Added to the scores for the choice alone; with "sigmoid".
        groups: The experts of all but `top_groups` of so many equal groups are not chosen; with
            "sigmoid" (groups of the two best experts) and the softmaxes (of the best expert).
        top_groups: See `groups`.
        scaling: Of the weights; not with "sparse_mixer".
        jitter: Of "sparse_mixer": relative distance from the best score, beyond which an expert
            does not weigh.

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
        """The normed input [T, D], expert ids [T, K] and their weights [T, K]."""
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
