"""The GPU suite: `run.py test|bench|merge`; see README.md in this folder.

It needs no virtual environment and no network: it uses the Python that starts it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import tarfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("train", "images"))]
sys.path.insert(0, str(ROOT / "src"))

import experiments  # noqa: E402 - next to this file, which is in no package
import records  # noqa: E402 - as above
from card import watched  # noqa: E402 - as above
from children import FailedError, TimedOutError  # noqa: E402 - as above
from situation import Situation  # noqa: E402 - as above
from steps import Step, StepResult, run_step, run_steps  # noqa: E402 - as above

from stoker.cluster.doctor.gpus import read_gpus  # noqa: E402 - as above

RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"

WORK = ROOT / "build" / "gpu" / "work"
"""Data, experiments and caches. Their code is imported, so no other user may be able to write here."""

BENCH_BUDGET_S = 480.0
"""Time for all parts together, seconds."""

TEST_LIMIT_S = 90.0
"""Time for one test file, seconds."""

CPU_LIMIT_S = 1800.0
"""Time for all tests in one process on the CPU, which may be shared with other tests, seconds."""

CPU_SLOWER = 4
"""Factor for time limits on the CPU, which may be two busy cores."""

AT_ONCE = 10
"""Test files that run in parallel on a GPU: each mostly starts TensorFlow on one core."""

PREPARE_S = 100.0
"""Longest time for making the data, seconds."""

MIN_SHARE = 0.6
"""A part does not start with less than this share of its time limit left."""

TAIL_LINES = 60
"""Lines of a failed step's log in the summary."""


def limit_of(part: str) -> float:
    """Longest time of a part: at most 100 s."""
    return float(importlib.import_module(f"parts.{part}").LIMIT_S)


def test(given: argparse.Namespace) -> int:
    """Run every file in tests/gpu with its timeout; return the exit code."""
    wanted = given.only
    files = sorted((ROOT / "tests" / "gpu").rglob("test_gpu_*.py"))
    names = [file.stem.removeprefix("test_gpu_") for file in files]
    _require_known(wanted, names)
    chosen = [f for f, name in zip(files, names, strict=True) if not wanted or name in wanted]
    options = ["-m", "gpu and not slow" if given.quick else "gpu"]
    options += ["-q", "--color=no", "-p", "no:cacheprovider", "--durations=5"]
    # Plugins installed on another machine may emit warnings, which are errors here.
    plugins = ["-p", "pytest_timeout"]
    on_cpu = str(int(given.device == "cpu"))
    env = {"STOKER_GPU_TESTS_ON_CPU": on_cpu, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    groups = [[file] for file in chosen] if given.device == "gpu" else [chosen]
    steps = [
        Step(
            name=group[0].stem if len(group) == 1 else "test_gpu",
            argv=(sys.executable, "-m", "pytest", *plugins, *options, *map(str, group)),
            timeout_s=TEST_LIMIT_S if given.device == "gpu" else CPU_LIMIT_S,
            env=env | _environment(given.device),
        )
        for group in groups
        if group
    ]
    out = Summary(given.out, "test-gpu.txt")
    logs = given.work / "logs"
    at_once = AT_ONCE if given.device == "gpu" else 1
    results = run_steps(steps, logs, at_once=at_once, on_end=out.add)
    out.logs(logs)
    return int(any(result.status != "passed" for result in results))


def bench(given: argparse.Namespace) -> int:
    """Run every part for which time is left, the most important first; return the exit code."""
    _require_known(given.only, list(records.ORDER))
    began_s = time.monotonic()
    slower = CPU_SLOWER if given.device == "cpu" else 1
    budget_s = given.budget or BENCH_BUDGET_S * slower
    out = Summary(given.out, "bench-gpu.txt")
    logs = given.work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    results_file = given.out / ("gpu.json" if given.device == "gpu" else "gpu-cpu.json")
    command = (sys.executable, str(HERE / "run.py"), "part")
    options = ("--out", str(given.out), "--work", str(given.work), "--device", given.device)
    failed = False
    for part in (
        "prepare",
        *(name for name in records.ORDER if not given.only or name in given.only),
    ):
        left_s = budget_s - (time.monotonic() - began_s)
        longest_s = PREPARE_S if part == "prepare" else limit_of(part)
        limit_s = min(longest_s * slower, left_s)
        if limit_s < MIN_SHARE * longest_s * slower:
            out.write(f"not run    {part}: {left_s:.0f} s are left; ONLY={part} runs it alone")
            failed = True
            continue
        step = Step(
            name=part,
            argv=(*command, part, *options, "--limit", f"{limit_s - 3:.0f}"),
            timeout_s=limit_s,
            env=_environment(given.device),
        )
        if part == "prepare":
            result = run_step(step, logs / "prepare.log")
        else:
            result = _measured(step, results_file, logs, device=given.device)
        out.add(result)
        out.logs(logs)
        failed = failed or result.status != "passed"
    for line in _shown(results_file):
        out.write(line)
    if given.device == "gpu" and results_file.is_file():
        records.merge(RESULTS, results_file)
    return int(failed)


def _measured(step: Step, results_file: Path, logs: Path, *, device: str) -> StepResult:
    """Run one part and watch the card; its record is completed whatever happens."""
    with watched(step.mark) as watch:
        result = run_step(step, logs / f"{step.name}.log")
    record = records.read(results_file).get(step.name)
    if record is not None and record["mark"] == step.mark:
        on_gpu = device == "gpu"
        refused = watch.refusals if watch.card else ["NVML shows no card"]
        seen = {"card": watch.card, "during": watch.during(), "refused": refused}
        record |= seen if on_gpu else {"card": {}, "during": {}, "refused": []}
        record |= {"status": result.status, "took_s": round(result.wall_s, 1)}
        records.put(results_file, record)
    return result


def part(given: argparse.Namespace) -> int:
    """Run one part in this process; return the exit code."""
    if given.name == "prepare":
        at = Situation(
            part="prepare",
            device=given.device,
            results=given.work / "prepare.json",
            work=given.work,
            limit_s=given.limit,
        )
        return prepare(at)
    name = "gpu.json" if given.device == "gpu" else "gpu-cpu.json"
    at = Situation(
        part=given.name,
        device=given.device,
        results=given.out / name,
        work=given.work,
        limit_s=given.limit,
    )
    try:
        importlib.import_module(f"parts.{given.name}").measure(at)
    except (FailedError, TimedOutError):
        traceback.print_exc()
        return 1
    finally:
        at.children.close()
    return 0


def prepare(at: Situation) -> int:
    """Make the data and run the stages before training, once for all parts; the exit code."""
    at.records()
    for folder in (
        experiments.images(at.work / "images", at.photographs(), at.sizes),
        experiments.texts(at.work / "texts", at.sizes),
    ):
        at.children.stoker("transform", folder).done(at.left_s())
    return 0


def smoke(given: argparse.Namespace) -> int:
    """Run every part on the CPU in this process, for `make test`; return the exit code."""
    given.device, given.limit = "cpu", 300.0
    os.environ.update(_environment("cpu"))
    failed = []
    for given.name in ["prepare"] + [
        name for name in records.ORDER if not given.only or name in given.only
    ]:
        began_s = time.monotonic()
        try:
            code = part(given)
        except Exception:  # noqa: BLE001 - the next part is tried too; the code tells
            traceback.print_exc()
            code = 1
        sys.stdout.write(
            f"{'failed' if code else 'passed'} {given.name} {time.monotonic() - began_s:.1f} s\n"
        )
        failed += [given.name] * bool(code)
    return int(bool(failed))


def merge(given: argparse.Namespace) -> int:
    """Merge other files of records into the committed one; return the exit code."""
    parts = records.merge(RESULTS, *given.files)
    sys.stdout.write(f"{RESULTS}: {', '.join(parts) or 'no part'}\n")
    return 0


class Summary:
    """Lines for the user, in a file and on standard output, each written immediately."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._stream = folder, (folder / name).open("w", buffering=1)

    def write(self, line: str) -> None:
        """One line."""
        for stream in (self._stream, sys.stdout):
            stream.write(line + "\n")
            stream.flush()

    def add(self, result: StepResult) -> None:
        """Report a finished step; for a failed one, also the end of its log."""
        self.write(result.line())
        if result.status != "passed":
            lines = Path(result.log).read_text(errors="replace").splitlines()[-TAIL_LINES:]
            self.write("\n".join(f"    {line}" for line in lines))

    def logs(self, folder: Path) -> None:
        """Pack all logs into one file: the machine returns only a few files."""
        made = self._folder / "logs.tar.gz.new"
        with tarfile.open(made, "w:gz") as archive:
            archive.add(folder, arcname="logs")
        made.replace(self._folder / "logs.tar.gz")


def _shown(path: Path) -> list[str]:
    lines = []
    parts = records.read(path)
    for figure in [
        f for record in parts.values() for f in records.figures_of(record)
    ] + records.derived(parts):
        verdict = {True: "holds", False: "MISSED", None: ""}[figure["holds"]]
        value = "none" if figure["value"] is None else f"{figure['value']:g}"
        lines.append(f"{figure['name']}: {value} {figure['unit']} {figure.get('refused', verdict)}")
    return lines


def _environment(device: str) -> dict[str, str]:
    """Make package and tests importable without an installation; on the CPU, hide a GPU."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"} if device == "cpu" else {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | hidden


def _require_known(wanted: Sequence[str], names: Sequence[str]) -> None:
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        raise SystemExit(
            f"ONLY must name some of {', '.join(names)}. Received: {', '.join(unknown)}."
        )


def _require_device(device: str) -> None:
    gpus = read_gpus()
    if device == "gpu" and not gpus.states:
        raise SystemExit(
            f"a GPU must be there. Received: none ({gpus.unread}). DEVICE=cpu runs the suite small on the CPU."
        )


def arguments() -> argparse.ArgumentParser:
    """The command line of every command."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    for name, function in (("test", test), ("bench", bench), ("part", part), ("smoke", smoke)):
        command = commands.add_parser(name, description=function.__doc__)
        command.set_defaults(function=function)
        if name == "test":
            command.add_argument("--quick", action="store_true", help="without the slow ones")
        if name == "part":
            command.add_argument("name")
            command.add_argument("--limit", type=float, default=100.0)
        command.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
        command.add_argument("--only", type=_names, default=[], help="names with commas between")
        command.add_argument("--budget", type=float, default=0.0, help="seconds for all of it")
        command.add_argument("--out", type=Path, default=ROOT / "build" / "gpu" / "out")
        command.add_argument("--work", type=Path, default=WORK)
    command = commands.add_parser("merge", description=merge.__doc__)
    command.add_argument("files", type=Path, nargs="+")
    command.set_defaults(function=merge)
    return parser


def main() -> None:
    """Run the command that the command line names."""
    given = arguments().parse_args()
    if given.command in ("test", "bench"):
        _require_device(given.device)
    raise SystemExit(given.function(given))


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    main()
