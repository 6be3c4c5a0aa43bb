"""Before any test imports Triton: without a GPU its kernels are interpreted."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's own library is imported
