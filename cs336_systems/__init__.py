"""Training systems for `cs336_basics`: kernels, parallelism, the training pipeline, measurement and the report."""
