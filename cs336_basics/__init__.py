"""A Transformer language model by itself: model, loss, optimizer, tokenizer, data and sampling.

Nothing here knows about multiple GPUs, kernels or the training pipeline; `cs336_systems` builds on it.
"""
