"""The peers, each in an environment of its own: they do not go together.

python benchmarks/serve/environments.py [--uv .tools/bin/uv] [fastapi kserve ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
ENVIRONMENTS = ROOT / ".venv-bench-serve"


def main() -> None:
    """Make those that are missing or of other requirements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv", default=str(ROOT / ".tools" / "bin" / "uv"))
    parser.add_argument("peers", nargs="*")
    given = parser.parse_args()
    for wanted in sorted(REQUIREMENTS.glob("*.txt")):
        name, stamp = wanted.stem, ENVIRONMENTS / wanted.stem / wanted.name
        if given.peers and name not in given.peers:
            continue
        if stamp.is_file() and stamp.read_text() == wanted.read_text():
            continue
        sys.stdout.write(f"setup: {name} into {ENVIRONMENTS / name}\n")
        folder = str(ENVIRONMENTS / name)
        venv = [given.uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, folder]
        subprocess.run(venv, check=True)
        sync = [given.uv, "pip", "sync", "--quiet", "--python", f"{folder}/bin/python", str(wanted)]
        subprocess.run(sync, check=True)
        stamp.write_text(wanted.read_text())


if __name__ == "__main__":
    main()
