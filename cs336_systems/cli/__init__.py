"""The `cs336` command: a file for each large subcommand, `main.py` to find them."""

from .train import load_config

__all__ = ["load_config"]
