"""The program of each process that `run_processes` starts: calls a function with a list of texts, as one rank."""

import sys

from ..config.checks import import_object
from .launch import child_process


def main() -> None:
    """Call a function: `MODULE:FUNCTION TEXTS... PARENT`."""
    function, *texts, parent = sys.argv[1:]
    with child_process(parent):
        import_object("program", function)(texts)


if __name__ == "__main__":
    main()
