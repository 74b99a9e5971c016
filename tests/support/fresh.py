"""Scripts in processes of their own, for what depends on what was imported before.

To import torch takes seconds of a processor: scripts that are run together are forks of one
process, which has imported it and nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import doubleback

SOURCE = str(Path(doubleback.__file__).parents[1])
FORKS = """
import os, sys, warnings, torch
for script in sys.argv[1:]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of PyTorch's, all idle
        child = os.fork()
    if not child:
        code = 1
        try:
            exec(script, {"__name__": "__main__"})
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        sys.exit("failed: " + script)
"""


def run_fresh(*scripts: str) -> None:
    """Each script by itself; a warning is an error, and so is anything that is said."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKS, *scripts],
        env={**os.environ, "PYTHONPATH": SOURCE}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr
