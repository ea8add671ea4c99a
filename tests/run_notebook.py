"""Run the code of a notebook in this process, as a kernel would. Arguments: the notebook, a file for the outputs.

The file becomes a JSON list with "text" (what was printed) and "shown" (what was displayed, by MIME type) of each cell
with code. The first error ends the program. Programs in Python that the notebook starts are forked.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from tests import forked


class Shell(InteractiveShell):
    def enable_gui(self, gui: Any = None) -> None:
        """Pictures are displayed in place, so there is no window."""


def main(notebook: str, file: str) -> None:
    subprocess.Popen = forked.Popen  # type: ignore[misc]
    shell = Shell.instance()
    shell.run_line_magic("matplotlib", "inline")
    outputs = []
    for cell in json.loads(Path(notebook).read_text())["cells"]:
        if cell["cell_type"] == "code":
            with capture_output() as captured:
                result = shell.run_cell("".join(cell["source"]), store_history=True)
            if not result.success:
                print(captured.stdout)
            result.raise_error()
            outputs.append({"text": captured.stdout, "shown": [output.data for output in captured.outputs]})
    Path(file).write_text(json.dumps(outputs))


if __name__ == "__main__":
    main(*sys.argv[1:])
