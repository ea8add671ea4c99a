"""Kernels. They know nothing of parallelism or training."""
