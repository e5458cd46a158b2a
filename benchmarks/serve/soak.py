"""Memory of the server after a model was loaded and unloaded many times: `make soak` runs it.

python benchmarks/serve/soak.py [--cycles 50]; exit code 1 if more than 5 % were kept
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(
    str(ROOT / "benchmarks" / "train")
)  # `figures`; it has a `models` too, which is found after ours

import models  # noqa: E402 - next to this file, which is in no package
import servers  # noqa: E402 - as above
from figures import Figure, figure, write  # noqa: E402 - as above
from swap_case import states  # noqa: E402 - as above

_CYCLE_S = 60.0
"""Longest that a load or an unload may take."""

_POLL_S = "0.1"
"""Between two looks at the repository and at the file of models."""

_MAX_PERCENT = 5.0
"""More than the first cycle had, at most."""


def memory(cycles: int, scratch: Path) -> list[int]:
    """Bytes of the server after each cycle."""
    root, file = scratch / "models", scratch / "models.config"
    models.write_models(root)
    request = models.request_of("cnn")
    found = []
    with ExitStack() as stack:
        _write_config(file, root, ["mlp"])
        server, _ = servers.start_ours(
            ["--model_config_file", str(file), "--model_config_file_poll_wait_seconds", _POLL_S],
            scratch / "soak.log",
            "--poll-s",
            _POLL_S,
        )
        stack.callback(server.stop)
        server.wait_until(lambda: servers.post(server.port, "/readyz", b"")[0] == 200)
        for cycle in range(1, cycles + 1):
            _write_config(file, root, ["mlp", "cnn"])
            _wait(server.port, loaded=True)
            status, body = servers.post(server.port, "/v1/models/cnn:predict", request.instances)
            if status != 200:
                raise RuntimeError(f"cycle {cycle}: {status}: {body[:300]!r}")
            _write_config(file, root, ["mlp"])
            _wait(server.port, loaded=False)
            found.append(server.rss_bytes())
            sys.stderr.write(f"soak: cycle {cycle}: {found[-1] / 1e6:.1f} MB\n")
    return found


def _write_config(file: Path, root: Path, names: list[str]) -> None:
    """What is served, in one step."""
    configs = "".join(
        f'config {{ name: "{name}" base_path: "{root / name}" model_platform: "tensorflow" }}\n'
        for name in names
    )
    new = file.with_suffix(".new")
    new.write_text(f"model_config_list {{\n{configs}}}\n")
    new.rename(file)


def _wait(port: int, *, loaded: bool) -> None:
    until_s = time.monotonic() + _CYCLE_S
    while time.monotonic() < until_s:
        found = set(states(port, "cnn").values())
        if found == {"AVAILABLE"} if loaded else found <= {"END"}:
            return
        time.sleep(0.02)  # a state of another process: it is looked at
    raise RuntimeError(f"the model is not {'loaded' if loaded else 'unloaded'}: {found}")


def kept(found: list[int]) -> Figure:
    """The memory of the last cycle relative to the first."""
    percent = 100 * (found[-1] / found[0] - 1)
    how = (
        f"resident memory of the server, first {found[0] / 1e6:.4g} MB, last {found[-1] / 1e6:.4g}, "
        f"most {max(found) / 1e6:.4g}; a CNN is named in the model_config_file, called, and removed from the file"
    )
    return figure(
        f"memory after {len(found)} load and unload cycles, relative to the first",
        percent,
        "%",
        at_most=_MAX_PERCENT,
        how=how,
    )


def main() -> None:
    """Load and unload, and say what was kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    if given.cycles < 2:
        raise SystemExit("soak: at least 2 cycles: the last is held to the first")
    with tempfile.TemporaryDirectory(prefix="stoker-soak-") as scratch:
        result = kept(memory(given.cycles, Path(scratch)))
    write(given.results / "serve" / "soak.json", [result])
    if not result["holds"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
