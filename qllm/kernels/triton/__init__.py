"""Triton kernels for NVIDIA GPUs. Under TRITON_INTERPRET=1 the same source runs on a CPU.

Each kernel has a plain-torch reference of the same signature in `kernels.reference`. No call reads
a device value on the host, so every call can be captured in a CUDA graph.
"""
