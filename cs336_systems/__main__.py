"""`python -m cs336_systems`: the `cs336` command, for where it is not installed."""

from .cli import main

main()
