"""Triton kernels for NVIDIA GPUs; under TRITON_INTERPRET=1 the same source runs on a CPU.

Each has a plain-torch reference of the same signature in `kernels.reference`. Nothing here reads
a device value on the host, so every call can be captured in a CUDA graph.
"""
