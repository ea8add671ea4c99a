"""Training systems for `cs336_basics`: kernels, parallelism, the training pipeline, measurement and the report."""

import os

# OpenMP's threads spin while they wait, which on a busy machine takes the cores from those that have work: a step then
# takes several times as long. Read when PyTorch is loaded, so it has no effect where that came first.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# PyTorch 2.13 prints a line at each start and stop of its profiler. Read when PyTorch is loaded, too.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
