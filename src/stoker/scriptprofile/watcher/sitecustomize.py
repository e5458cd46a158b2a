"""Python runs this module when it starts, because `stoker profile` puts this folder first on Python's path.

It runs in the script and in every Python process that the script starts, of any kind and version. It imports only the
standard library, prints nothing, and never makes a process fail.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - importing pathlib slows the script's start


def _run_the_one_we_hide() -> None:
    """Run the user's own sitecustomize: Python itself runs only the first one on its path, which is this module."""
    others = [place for place in sys.path if os.path.abspath(place) != _HERE]  # noqa: PTH100 - importing pathlib slows the script's start - as above
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _attach() -> None:
    folder = os.environ.get("STOKER_WATCH_FOLDER")
    if not folder:
        return
    try:
        from stoker_watch import import_hook  # type: ignore[import-not-found] # found in our folder

        import_hook.wait_for_tensorflow(folder)
    except Exception as error:  # noqa: BLE001 - whatever it is, the script must run
        from contextlib import suppress

        with suppress(OSError), open(os.path.join(folder, "failed"), "a") as stream:  # noqa: PTH118, PTH123 - as above
            stream.write(f"{type(error).__name__}: {error}\n")
    # Give the script its original path.
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != _HERE]  # noqa: PTH100 - importing pathlib slows the script's start


_attach()
_run_the_one_we_hide()
