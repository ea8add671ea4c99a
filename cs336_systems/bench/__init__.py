"""Measuring: cases that turn configurations into rows. Nothing here is needed to train."""
