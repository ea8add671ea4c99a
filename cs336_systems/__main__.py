"""`python -m cs336_systems`: the `cs336` command, for where it is not installed."""

from .cli.main import main

if __name__ == "__main__":  # not in the processes that `cs336 bench` starts, which import this too
    main()
