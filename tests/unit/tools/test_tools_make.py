"""`make test`: a call of pytest that finds no test is an error only where no test was named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("arguments", "exit_codes", "passes"),
    [
        ("", (0, 0, 5), True),
        ("", (5, 0, 5), False),
        ("", (0, 5, 5), False),
        ("tests/gpu", (5, 5, 0), True),
        ('-k "alone or first"', (5, 0, 5), True),
        ("-k 'alone or first'", (0, 5, 5), True),
        ("-x", (1, 0, 5), False),
        ("-x", (0, 2, 5), False),
    ],
)
def test_a_call_without_a_test_fails_only_where_none_was_named(
    arguments: str, exit_codes: tuple[int, int, int], passes: bool, tmp_path: Path
) -> None:
    """The exit codes are those of make's three calls of pytest, in their order."""
    stamps = [tmp_path / name for name in ("stamp", "tfjs", "triton")]
    for stamp in stamps:
        stamp.write_text("0 cpu\n")
    calls = tmp_path / "calls"
    calls.write_text("".join(f"{code}\n" for code in exit_codes))
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ "$2" = pytest ] || exit 0\n'
        f"code=$(head -n 1 '{calls}')\nsed -i 1d '{calls}'\nexit $code\n"
    )
    python.chmod(0o755)

    done = subprocess.run(
        [
            *("make", "--directory", str(ROOT), "test", f"ARGS={arguments}", f"BIN={tmp_path}"),
            *(f"STAMP={stamps[0]}", f"TFJS_STAMP={stamps[1]}", f"TRITON_STAMP={stamps[2]}"),
            *(f"UV={sys.executable}", f"PYTHON={sys.executable}", "OTHER="),
        ],
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode == 0) is passes, done.stderr
    if passes:
        assert calls.read_text() == ""
