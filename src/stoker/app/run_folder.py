"""One run: `runs/<name>/<UTC time>-<4 hex>/`, its lock, and the record of each stage.

run.json          settings, inputs by name, accepted changes of inputs, outcome
lock              held (flock) by the process that works on the run
folder.json       files of the experiment folder at the start of the run
stages/X.json     record of the finished stage X: its inputs, its output folder, the hash of every file
reads/X.json      what the user's code has read in stage X so far
data/ ...         output of a stage that ran in this run
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stoker.app.context import CHECKPOINTS, StageResult
from stoker.core.config import nearest
from stoker.core.errors import BusyError, ConfigError, DataError, Plain
from stoker.core.files import (
    alone,
    full_disk_is_named,
    publish_folder,
    read_json,
    remove,
    scratch_folder,
    sha256_file,
    sweep,
    writable,
    write_atomic,
    write_json,
)
from stoker.core.fingerprint import fingerprint
from stoker.core.incarnation import (
    RUN_OF_JOB,
    own_incarnation,
    parse_incarnation,
    require_newest,
)
from stoker.core.lock_file import owner_line
from stoker.core.reads.reads import Reads, Snapshot, snapshot
from stoker.train.checkpoints.identity import Identity, IdentityChange, changes, require_same
from stoker.train.checkpoints.store import places, read_manifest

_RUN = "run.json"
_LOCK = "lock"
_STAGES = "stages"
_READS = "reads"
_FOLDER = "folder.json"
_TRAINED = "train"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Selects the run to continue, and which of its outputs are reused."""

    run: str | None = None
    """ID of the run; None: the newest unfinished run with equal inputs, or a new run if there is none."""

    accept_change: bool = False
    """Whether to continue although settings, code, data or versions have changed since the start."""

    again: bool = False
    """Whether to run the last stage again even if nothing has changed."""


NEWEST = Resume()
"""Continue the newest unfinished run, or start a new one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRecord:
    """Record of a finished stage: its inputs, output and result."""

    stage: str
    """Name of the stage."""

    key: str
    """Fingerprint of the stage's inputs other than data: code, settings, library versions, earlier stages."""

    columns: tuple[str, ...]
    """Raw columns that the stage read; empty if it reads no data."""

    data: str
    """Fingerprint of the data in these columns; empty if there are none."""

    output: str
    """Output folder, relative to the run; it may be in an earlier run."""

    files: dict[str, str]
    """File of the output -> SHA-256."""

    result: StageResult
    """Facts for later stages and the summary."""

    took_s: float
    """Wall time in the run that produced the output, seconds."""

    made_by: str
    """ID of the run that produced the output."""

    content: str
    """Fingerprint of the part of the output that may differ although the inputs are equal (trained weights may differ
    on a GPU, or if the user's code reads a file); empty if there is no such part."""

    reads: Reads = field(default_factory=Reads)
    """What the user's code read in this stage, with its state at the start of the run."""

    @property
    def identity(self) -> str:
        """Return the fingerprint that later stages depend on."""
        parts = {"stage": self.stage, "key": self.key, "data": self.data, "content": self.content}
        return fingerprint(parts)


class Run:
    """A run's folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def id(self) -> str:
        """Name of the folder."""
        return self.root.name

    def about(self) -> dict[str, Any]:
        """Return the content of `run.json`."""
        about: dict[str, Any] = read_json(self.root / _RUN)
        return about

    def finish(self, outcome: str) -> None:
        """Mark the run as finished, so that it is not continued."""
        write_json(self.root / _RUN, self.about() | {"finished": _now(), "outcome": outcome})

    def record(self, stage: str) -> StageRecord | None:
        """Return the record of a stage; None if the stage is not done or its record cannot be read."""
        path = self.root / _STAGES / f"{stage}.json"
        if not path.exists():
            return None
        try:
            raw = read_json(path)
            reads = Reads(**raw.get("reads", {}))
            return StageRecord(**(raw | {"columns": tuple(raw["columns"]), "reads": reads}))
        except (DataError, TypeError, KeyError):
            return None

    def write_record(self, record: StageRecord) -> None:
        """Publish the record of a stage; its output must already be flushed to the disk."""
        write_json(self.root / _STAGES / f"{record.stage}.json", asdict(record))

    def reads(self) -> Reads:
        """Return what the user's code has read in all stages so far."""
        found = Reads()
        for path in sorted((self.root / _READS).glob("*.json")):
            found = found.and_also(Reads(**read_json(path)))
        for path in sorted((self.root / _STAGES).glob("*.json")):
            record = self.record(path.stem)
            found = found if record is None else found.and_also(record.reads)
        return found

    def reads_of(self, stage: str) -> Reads:
        """Return what the user's code has read in an unfinished stage, in earlier processes."""
        path = self.root / _READS / f"{stage}.json"
        return Reads(**read_json(path)) if path.exists() else Reads()

    def write_reads(self, stage: str, reads: Reads) -> None:
        """Record what the user's code has read in a stage that is not done yet."""
        write_json(self.root / _READS / f"{stage}.json", asdict(reads))

    def forget_reads(self) -> None:
        """Forget all recorded reads, because the user accepted a change in them."""
        require_newest()
        shutil.rmtree(self.root / _READS, ignore_errors=True)
        (self.root / _FOLDER).unlink(missing_ok=True)
        for path in sorted((self.root / _STAGES).glob("*.json")):
            if (record := self.record(path.stem)) is not None:
                self.write_record(replace(record, reads=Reads()))

    def folder_at_begin(self, folder: Path, outputs: Collection[Path]) -> Snapshot:
        """Return the state of the experiment folder at the start of the run; for a new run, take it now."""
        path = self.root / _FOLDER
        if not path.exists() or not (self.root / _TRAINED).exists():
            # Before training, the run has not created any file in the experiment folder.
            write_json(path, snapshot(folder, outputs=outputs))
        return {name: tuple(state) for name, state in read_json(path).items()}

    def changes(self) -> tuple[dict[str, Any], ...]:
        """Return the accepted changes of the inputs since the start of the run, the oldest first."""
        return tuple(self.about().get("changes", ()))

    def accept(
        self, found: Iterable[IdentityChange], *, now: Identity, settings: Mapping[str, Any]
    ) -> None:
        """Replace the recorded inputs of the run, and record what has changed."""
        about = self.about()
        change = {"at": _now(), "differs": [str(each) for each in found]}
        inputs = {part: dict(names) for part, names in now.items()}
        write_json(
            self.root / _RUN,
            about
            | {"inputs": inputs, "fingerprint": fingerprint(inputs), "settings": dict(settings)}
            | {"finished": None, "outcome": None}
            | {"changes": [*about.get("changes", ()), change]},
        )

    def forget(self, stage: str) -> None:
        """Remove a stage's record."""
        require_newest()
        (self.root / _STAGES / f"{stage}.json").unlink(missing_ok=True)

    def remove_output(self, stage: str, folder: str) -> None:
        """Remove the output that this run produced for a stage, and the reads of that stage."""
        require_newest()
        shutil.rmtree(self.root / folder, ignore_errors=True)
        (self.root / _READS / f"{stage}.json").unlink(missing_ok=True)

    def output(self, record: StageRecord) -> Path:
        """Return the output folder of a stage."""
        return Path(os.path.normpath(self.root / record.output))

    def sweep(self) -> None:
        """Remove partial files of a killed process; the caller must hold the run's lock."""
        sweep(self.root, "*")
        sweep(self.root / _STAGES, "*")


def damage(folder: Path, files: Mapping[str, str]) -> str | None:
    """Return what is damaged in a stage's output, or None if every file is unchanged."""
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is not there"
        if sha256_file(path) != expected:
            return f"{path} was changed or damaged"
    return None


def runs_newest_first(runs_root: Path) -> list[Run]:
    """Return every run below `runs/<name>/`, newest first."""
    if not runs_root.is_dir():
        return []
    found = sorted((p for p in runs_root.iterdir() if (p / _RUN).is_file()), reverse=True)
    return [Run(path) for path in found]


OPEN_S = 300.0
"""Maximum time to wait for another process that opens a run, seconds. That process compares inputs, and may be
suspended."""


@contextmanager
def open_run(
    runs_root: Path,
    *,
    identity: Identity,
    settings: Mapping[str, Any],
    resume: Resume,
    folder: Path | None = None,
) -> Iterator[tuple[Run, bool]]:
    """Continue a run or create a new one, and hold its lock.

    Args:
        runs_root: `runs/<name>/`.
        identity: Settings, code, source and versions.
        settings: Settings to write to the `run.json` of a new run.
        resume: The run to continue; by default the newest unfinished run with equal inputs, else a new run.
        folder: The experiment's folder. The recorded reads are compared with its current content.

    Yields:
        The run, and whether it is continued.

    Raises:
        BusyError: another process works on the run, or takes longer than `OPEN_S` to open one; the message
            names its pid and host.
        ConfigError: no run has the given ID.
        UserError: the run started with other inputs, and the change was not accepted; the message names the
            differences.
    """
    with ExitStack() as held:
        fix = "Write elsewhere with --set runs=DIR."
        with (
            writable(runs_root, what="the runs folder", fix=fix),
            alone(runs_root / ".lock", give_up_s=OPEN_S),
        ):
            # The lock keeps two simultaneous starts from both creating a run.
            sweep(runs_root, "*")
            found = _named(runs_root, resume.run) or _unfinished(runs_root, identity, folder)
            run = found or _new_run(runs_root, identity, settings)
            held.enter_context(_locked(run))
        before, now = with_reads(run, identity, folder)
        if changed := require_same(before, now, accept_change=resume.accept_change):
            run.accept(changed, now=identity, settings=settings)
            run.forget_reads()
        run.sweep()
        yield run, found is not None


def _named(runs_root: Path, run_id: str | None) -> Run | None:
    if run_id is None:
        return None
    known = {run.id: run for run in runs_newest_first(runs_root)}
    if run_id not in known:
        raise ConfigError(
            f"--resume must name a run in {runs_root}",
            got=run_id,
            fix=nearest(run_id, list(known)),
        )
    return known[run_id]


def with_reads(run: Run, identity: Identity, folder: Path | None) -> tuple[Identity, Identity]:
    """Return the old and the current identity of a run, with the files and variables that the user's code read."""
    before: Identity = run.about().get("inputs", {})
    read = Reads() if folder is None else run.reads()
    if folder is None or not read:
        return before, identity
    return (
        {**before, **read.as_identity()},
        {**identity, **read.now(folder).as_identity()},
    )


def read_changes(read: Reads, folder: Path) -> tuple[IdentityChange, ...]:
    """Return the files and variables whose content has changed."""
    return changes(read.as_identity(), read.now(folder).as_identity())


def _unfinished(runs_root: Path, identity: Identity, folder: Path | None) -> Run | None:
    run_fingerprint = fingerprint(identity)
    for run in runs_newest_first(runs_root):
        try:
            about = run.about()
            same = about.get("fingerprint") == run_fingerprint and about.get("finished") is None
            if same and not changes(*with_reads(run, identity, folder)):
                return run
        except (DataError, TypeError):
            continue
    return None


def _new_run(runs_root: Path, identity: Identity, settings: Mapping[str, Any]) -> Run:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    final = runs_root / f"{stamp}-{secrets.token_hex(2)}"
    about = {
        "fingerprint": fingerprint(identity),
        "inputs": {part: dict(names) for part, names in identity.items()},
        "started": _now(),
        "finished": None,
        "outcome": None,
        "settings": dict(settings),
    }
    # Publish the folder together with its run.json, because a folder without run.json would never be read again.
    with scratch_folder(final) as made:
        write_json(made / _RUN, about)
        publish_folder(made, final)
    return Run(final)


@contextmanager
def _locked(run: Run) -> Iterator[None]:
    own, path = own_incarnation(), run.root / _LOCK
    with ExitStack() as held, full_disk_is_named(run.root):
        while True:
            stream = held.enter_context(path.open("a+", encoding="utf-8"))
            try:
                # The kernel releases the lock when the process that holds it ends, for any reason.
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                stream.seek(0)
                owner, _, start = stream.read().strip().partition("\n")
            if own is None or not own.replaces(parse_incarnation(start)):
                raise BusyError(
                    f"only one process at a time may work on run {run.id}",
                    got=Plain(f"{owner or 'another process'} works on it"),
                    fix="Wait until that process exits, or stop it.",
                )
            # The lock belongs to an earlier start of this job, which may be suspended or cut off from the network.
            # Delete the lock file and create another: the earlier start keeps a lock on the deleted file, and can no
            # longer publish.
            own.require_newest()
            path.unlink(missing_ok=True)
            # partial files that the earlier start may still have open
            for left in run.root.glob(".*.partial"):
                remove(left)
        stream.truncate(0)
        stream.write(f"{owner_line()}\n")
        stream.write("".join(own.to_environment().values()) if own else "")
        stream.flush()
        if own is not None:
            write_atomic(own.job / RUN_OF_JOB, str(run.root.resolve()))
        yield


_SHOWN_CHANGES = 3
"""Maximum number of changed inputs that the line about an unfinished training names."""


def unfinished_training(run: Run, identity: Identity, folder: Path) -> str | None:
    """Return a line about the newest earlier run that began to train, if it did not finish training.

    Args:
        run: The new run.
        identity: Its identity.
        folder: The experiment folder.

    Returns:
        The line; None if there is no such run.
    """
    for earlier in runs_newest_first(run.root.parent):
        if earlier.id == run.id:
            continue
        if earlier.record(_TRAINED) is not None:
            return None
        if (step := _checkpointed_step(earlier)) is not None:
            return _unfinished_line(earlier, step, identity, folder)
    return None


def _checkpointed_step(run: Run) -> int | None:
    for path in reversed(places(run.root / _TRAINED / CHECKPOINTS)):
        with suppress(DataError):  # damaged: try the checkpoint before it
            return read_manifest(path).step
    return None


def _unfinished_line(run: Run, step: int, identity: Identity, folder: Path) -> str:
    try:
        found = changes(*with_reads(run, identity, folder))
    except DataError:
        return f"run {run.id} stopped training at step {step}; its run.json is damaged"
    named = "; ".join(map(str, found[:_SHOWN_CHANGES]))
    more = f"; and {len(found) - _SHOWN_CHANGES} more" if len(found) > _SHOWN_CHANGES else ""
    return (
        f"run {run.id} stopped training at step {step} with other inputs ({named}{more}): "
        f"--resume {run.id} --accept-change continues it"
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
