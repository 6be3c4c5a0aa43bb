"""The backend for CUDA devices: paged KV, fused kernels, captured stages.

Everything except `graphs` runs on any torch device. CUDA uses Triton kernels, and other devices use
their plain-torch references. So tests need no GPU.
"""
