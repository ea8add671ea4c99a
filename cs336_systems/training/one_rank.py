"""The program of each process that `launch` starts: reads the configuration from a file and trains."""

import dataclasses
import json
import sys
from pathlib import Path

from ..config.run import RunConfig
from ..parallel.ranks import environment_rank
from .launch import child_process
from .pipeline import train


def main() -> None:
    """Train: `CONFIG_FILE RESULT_FILE PARENT`."""
    config_file, result_file, parent = sys.argv[1:]
    with child_process(parent):
        result = train(RunConfig.from_dict(json.loads(Path(config_file).read_text())))
        if environment_rank() == 0:
            Path(result_file).write_text(json.dumps(dataclasses.asdict(result)))


if __name__ == "__main__":
    main()
