"""Triton kernels for GPUs, and where they run."""
