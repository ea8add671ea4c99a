"""What a model, a training step and its communication need, calculated before anything runs. Needs no PyTorch."""
