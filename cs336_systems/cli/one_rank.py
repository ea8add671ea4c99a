"""The program of each process that a command starts for its --devices: the command itself, as one rank."""

import sys

from ..training.launch import child_process
from .main import run_command


def main() -> None:
    """Run a command: `COMMAND ARGUMENTS... PARENT`."""
    command, *arguments, parent = sys.argv[1:]
    with child_process(parent):
        run_command(command, arguments)


if __name__ == "__main__":
    main()
