# mypy: ignore-errors
"""Starts the training as another Python process, as launchers do, and a Python that is none."""

import subprocess
import sys

print(subprocess.check_output([sys.executable, "-c", "print('no training')"], text=True).strip())
sys.exit(subprocess.call([sys.executable, "-m", "package.train", *sys.argv[1:]]))
