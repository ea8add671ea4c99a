"""Profiles of a training step: its kernels and its memory."""
