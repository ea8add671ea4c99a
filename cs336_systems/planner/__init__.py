"""Memory, time and communication of a training step, calculated before anything runs. Needs no PyTorch."""
