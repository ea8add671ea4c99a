"""The `cs336` command. `main.py` finds the subcommands."""

from .train import load_config

__all__ = ["load_config"]
