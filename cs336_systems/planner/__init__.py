"""What a model, a training step and its communication need, by arithmetic before anything runs. Needs no PyTorch."""
