"""The backend for CUDA devices: paged KV, fused kernels, captured stages.

Everything except `graphs` runs on any torch device, with Triton kernels on CUDA and their
plain-torch references elsewhere. So it is tested without a GPU.
"""
