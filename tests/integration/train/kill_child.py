"""Runs one command of `stoker` in a fresh process for every line that it reads.

A line is JSON: the command's arguments, variables of its environment, the file that takes what it
says, and before which rename the process is killed (null: none). With `script` it is that script of
the tests with the arguments, and `stdin` is its input. A process forked off one that has imported
TensorFlow, and has run nothing, starts in a fifth of the time.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from stoker.app.import_tensorflow import import_tensorflow
from stoker.cli.main import invoke
from stoker.core.fingerprint import library_versions


def kill_before_rename(number: int) -> None:
    """Let this process die by SIGKILL at its n-th rename, before it is done."""
    # Python would rename what it compiles, AutoGraph's files too, and only our renames count.
    sys.dont_write_bytecode = True
    left = number

    def count(event: str, arguments: Any) -> None:
        nonlocal left
        if event == "os.rename":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def run_script(script: str, arguments: list[str], stdin: str) -> int:
    """Run a script of the tests as `python SCRIPT ARGUMENTS` does."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    sys.argv = [script, *arguments]
    with tempfile.TemporaryFile() as stream:
        stream.write(stdin.encode())
        stream.seek(0)
        os.dup2(stream.fileno(), 0)
    sys.stdin = open(0)  # noqa: SIM115 - until the process ends
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:  # noqa: BLE001 - as Python does it
        traceback.print_exc()
        return 1
    return 0


def work(order: dict[str, Any]) -> int:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(order["environment"])
    if order["kill"] is not None:
        kill_before_rename(order["kill"])
    if order["script"] is None:
        code = invoke(order["arguments"], debug=False)
    else:
        code = run_script(order["script"], order["arguments"], order["stdin"])
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main() -> None:
    import_tensorflow()
    import ibis.backends.duckdb  # noqa: F401 - what every child needs

    import stoker.app.training.stage
    import stoker.data.features.analysis.analyze  # noqa: F401 - as above
    from stoker.train.context import utilization

    # Utilization does not matter here, and to measure it takes a second of every training.
    utilization.CEILING_S = 0.02

    library_versions()
    # No child looks through, and so copies, what was imported.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(work(json.loads(line)))
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
