"""The chain: runs the stages whose inputs have changed, reuses the output of the other stages, and records both."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, cast

from stoker.app.context import Context, Stage, StageResult, StageResults, Work
from stoker.app.experiment import Experiment, data_fingerprint, prepare_source
from stoker.app.identity import run_identity
from stoker.app.import_tensorflow import import_tensorflow
from stoker.app.own_stages import stages_of
from stoker.app.run_folder import (
    NEWEST,
    Resume,
    Run,
    StageRecord,
    damage,
    open_run,
    read_changes,
    runs_newest_first,
    unfinished_training,
)
from stoker.app.stages import STAGES
from stoker.core.errors import CheckFailed, Plain, UserError
from stoker.core.files import (
    full_disk_is_named,
    hash_folder,
    lasting_folder,
    publish_folder,
    scratch_folder,
    sweep,
)
from stoker.core.fingerprint import fingerprint, library_versions
from stoker.core.log_lines import set_facts
from stoker.core.reads.hooks import observing
from stoker.core.reads.observer import Observer
from stoker.core.reads.reads import Reads
from stoker.core.signals import ends_when_asked
from stoker.core.user_code import require_function
from stoker.data.dataset import load_dataset
from stoker.data.ingest import fingerprint_of, list_source
from stoker.data.sources.files.listing import Listing
from stoker.telemetry.scrape_server import require_own_address
from stoker.telemetry.wall_time import WallTime


class Listener(Protocol):
    """Receives the events of a chain."""

    def log(self, line: str) -> None:
        """Show a line permanently."""

    def stage_began(self, stage: str) -> None:
        """Called when a stage starts its work."""

    def progress(self, line: str, share: float | None) -> None:
        """Show the current activity and the completed share of the stage; None: the share is unknown."""

    def stage_ended(self, outcome: StageOutcome) -> None:
        """Called when a stage is done or skipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOutcome:
    """Outcome of one stage in this run."""

    stage: str
    """Name of the stage."""

    skipped: bool
    """Whether an earlier output was reused."""

    why: str
    """Why the stage ran, or the run from which its output was reused."""

    took_s: float
    """Wall time in seconds; for a skipped stage, the time of the check."""

    output: Path
    """Output folder of the stage."""

    result: StageResult
    """Recorded result of the stage."""


def results_by_stage(outcomes: Iterable[StageOutcome]) -> StageResults:
    """Return stage -> result, with a type for each stage."""
    return cast(StageResults, {outcome.stage: outcome.result for outcome in outcomes})


@dataclass(frozen=True, kw_only=True)
class ChainResult:
    """Result of one pass over the chain."""

    run: Path
    """The run's folder."""

    outcomes: tuple[StageOutcome, ...]
    """Outcomes of the stages, in the order of the chain."""

    wall: WallTime = field(default_factory=WallTime)
    """Account of this process's wall time."""

    @property
    def results(self) -> StageResults:
        """The recorded result of each stage of this pass."""
        return results_by_stage(self.outcomes)

    @property
    def warnings(self) -> list[str]:
        """The warnings of all stages, including skipped ones, whose warnings are not logged again."""
        return [line for each in self.outcomes for line in each.result.get("warnings", ())]

    def output(self, stage: str) -> Path:
        """Return the output folder of a stage of this pass."""
        return next(outcome.output for outcome in self.outcomes if outcome.stage == stage)

    def context(
        self, experiment: Experiment, progress: Callable[[str, float | None], None]
    ) -> Context:
        """Return the input that a stage after this pass would get, for work that is not recorded.

        Args:
            experiment: The experiment, with the data of this pass.
            progress: As in `Context`.
        """
        return Context(
            experiment=experiment,
            run_id=self.run.name,
            outputs={outcome.stage: outcome.output for outcome in self.outcomes},
            identities={},
            results=self.results,
            progress=progress,
        )


@dataclass
class _Pass:
    """One pass over the chain: the run, and the outcomes so far."""

    experiment: Experiment
    run: Run
    listener: Listener
    resume: Resume
    wall: WallTime
    source: str
    listing: Listing | None
    outputs: dict[str, Path] = field(default_factory=dict)
    identities: dict[str, str] = field(default_factory=dict)
    outcomes: list[StageOutcome] = field(default_factory=list)


def run_chain(
    experiment: Experiment,
    listener: Listener,
    *,
    until: str = "push",
    resume: Resume = NEWEST,
    works: Mapping[str, Work] = MappingProxyType({}),
    wall: WallTime | None = None,
) -> ChainResult:
    """Run the chain up to a stage; stages with unchanged inputs are skipped.

    Args:
        experiment: What to run.
        listener: Receives the events.
        until: The last stage.
        resume: The run to continue, and whether the last stage runs again.
        works: Functions that replace the work of stages, for example to train on several processes.
        wall: Account of this process's wall time; None: a new account that starts now.

    Raises:
        UserError: an error in the user's data, settings or code; the run can be continued.
        CheckFailed: a gate failed; nothing is pushed, and the run is finished.
    """
    wall = wall or WallTime()
    with wall.within("other_stages"):
        prepare_source(experiment, listener.log)
    listing = None if experiment.own_dataset else list_source(experiment.files)
    source = fingerprint_of(listing) if listing else data_fingerprint(experiment)
    identity = run_identity(experiment, source=source)
    stages = _checked_stages(until, experiment, works)
    with (
        ends_when_asked(),
        open_run(
            experiment.runs_root,
            identity=identity,
            settings=experiment.to_json(),
            resume=resume,
            folder=experiment.folder,
        ) as (run, continued),
    ):
        set_facts(run=run.id)
        listener.log(f"run {run.id}" + (" (continued)" if continued else ""))
        if not continued and (line := unfinished_training(run, identity, experiment.folder)):
            listener.log(line)
        # Take the snapshot before the stages, because files that appear later were created by the run.
        run.folder_at_begin(experiment.folder, experiment.unobserved)
        state = _Pass(experiment, run, listener, resume, wall, source, listing)
        for stage in stages:
            force = stage.always or (resume.again and stage is stages[-1])
            try:
                with wall.within("start" if stage.name == "train" else "other_stages"):
                    _do_stage(stage, state, force=force)
            except CheckFailed:
                run.finish(f"{stage.name}: refused")
                raise
            if stage.name == "train":
                wall.enter("ending")
        if until == STAGES[-1].name:
            run.finish("pushed")
        return ChainResult(run=run.root, outcomes=tuple(state.outcomes), wall=wall)


def _checked_stages(
    until: str, experiment: Experiment, works: Mapping[str, Work]
) -> tuple[Stage, ...]:
    """Return the stages to run, after checking early what the last stages will need."""
    stages = stages_of(experiment)
    stages = stages[: [stage.name for stage in stages].index(until) + 1]
    names = [stage.name for stage in stages]
    if "train" in names:
        _require_metrics_address(experiment)
    if until == STAGES[-1].name:
        _require_folder(experiment.models_root)
    _require_code(experiment, names)
    return tuple(
        dataclasses.replace(stage, work=works.get(stage.name, stage.work)) for stage in stages
    )


def _require_code(experiment: Experiment, stages: Sequence[str]) -> None:
    """Check before any stage runs that the user functions exist."""
    named = {
        "preprocessing": ("transform", experiment.preprocessing),
        "model": ("train", experiment.model),
        "train.callbacks": ("train", experiment.train.callbacks),
    }
    for where, (stage, reference) in named.items():
        if reference is not None and stage in stages:
            require_function(experiment.folder, reference, where=where)


def _require_metrics_address(experiment: Experiment) -> None:
    """Check before any stage runs that the metrics can be served on their address."""
    settings = experiment.train
    # With several machines, only the chief serves metrics. It may be another machine, and warns if it cannot.
    if settings.metrics_port is not None and "TF_CONFIG" not in os.environ:
        require_own_address(settings.metrics_host, setting="train.metrics_host")


def _require_folder(models: Path) -> None:
    """Check before training that the model repository can be written."""
    try:
        models.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the model repository {models} must be a folder that can be written",
            got=Plain(error.strerror or str(error)),
            fix="Name another folder with --set models=DIR.",
        ) from None


def _do_stage(stage: Stage, state: _Pass, *, force: bool) -> None:
    run, listener = state.run, state.listener
    began_s = time.monotonic()
    context = Context(
        experiment=state.experiment,
        run_id=run.id,
        outputs=state.outputs,
        identities=state.identities,
        results=results_by_stage(state.outcomes),
        progress=listener.progress,
        accept_change=state.resume.accept_change or bool(run.changes()),
        wall=state.wall,
        source=state.source,
        listing=state.listing,
    )
    key = fingerprint({"inputs": dict(stage.inputs(context)), "versions": library_versions()})
    record, skipped, why = None, False, ""
    if not force:
        record, why = _find_earlier(stage, state, key)
        skipped = record is not None
    if record is None:
        _clear(stage, run, keep=state.resume.run is not None and not force)
        listener.stage_began(stage.name)
        if stage.tensorflow:
            with state.wall.within("start"):
                import_tensorflow(compiles=True)
                from stoker.train.setup.strategy import claim_devices

                claim_devices(state.experiment.train)
        record = _work(stage, run, context, key)
    state.outputs[stage.name] = run.output(record)
    state.identities[stage.name] = record.identity
    outcome = StageOutcome(
        stage=stage.name,
        skipped=skipped or bool(record.result.get("already")),
        why=why,
        took_s=time.monotonic() - began_s,
        output=run.output(record),
        result=record.result,
    )
    state.outcomes.append(outcome)
    listener.stage_ended(outcome)
    if refused := record.result.get("refused"):
        raise CheckFailed(
            f"every check of stage {stage.name} must pass",
            got=Plain("; ".join(refused)),
            fix=f"Nothing is pushed. See {outcome.output / 'report.html'}.",
        )


def _clear(stage: Stage, run: Run, *, keep: bool) -> None:
    """Remove the stage's output in this run, unless the stage can continue from it.

    Args:
        stage: The stage that runs next.
        run: The run.
        keep: Keep the output even if the stage was done, because the user named the run to continue.
    """
    unfinished = run.record(stage.name) is None
    run.forget(stage.name)
    if not (stage.in_place and (unfinished or keep)):
        run.remove_output(stage.name, stage.folder)


def _work(stage: Stage, run: Run, context: Context, key: str) -> StageRecord:
    began_s = time.monotonic()
    changed = list(run.changes())
    final = run.root / stage.folder
    with _folder_for(stage, final, key) as folder:
        with _observed(stage, run, context.experiment) as reads:
            done = stage.work(context, folder)
        files = hash_folder(folder)
        if folder != final:
            publish_folder(folder, final)
    result = done.result.copy()
    if stage.in_place and changed:
        # The result records accepted changes, so that the model's lineage shows them.
        result["changes"] = changed
    record = StageRecord(
        stage=stage.name,
        key=key,
        columns=done.columns,
        data=_data_fingerprint(stage, context.outputs | {stage.name: final}, done.columns),
        output=stage.folder,
        files=files,
        result=result,
        took_s=time.monotonic() - began_s,
        made_by=run.id,
        content=done.content,
        reads=reads(),
    )
    with full_disk_is_named(final):
        run.write_record(record)
    return record


@contextmanager
def _observed(stage: Stage, run: Run, experiment: Experiment) -> Iterator[Callable[[], Reads]]:
    """Observe what the user's code reads in a stage, and record each read as it happens."""
    if not stage.runs_user_code:
        yield Reads
        return
    observer = Observer(
        experiment.folder,
        at_begin=run.folder_at_begin(experiment.folder, experiment.unobserved),
        before=run.reads_of(stage.name).besides(run.reads()),
        outputs=experiment.unobserved,
        followed=experiment.followed_sources,
        write=functools.partial(run.write_reads, stage.name),
    )
    with observing(observer):
        yield lambda: observer.reads


@contextmanager
def _folder_for(stage: Stage, final: Path, key: str) -> Iterator[Path]:
    if stage.resumable:
        with lasting_folder(final, key) as folder:
            yield folder
        return
    if not stage.in_place:
        with scratch_folder(final) as folder:
            yield folder
        return
    with full_disk_is_named(final):
        final.mkdir(parents=True, exist_ok=True)
        sweep(final, "*")
        yield final


def _find_earlier(stage: Stage, state: _Pass, key: str) -> tuple[StageRecord | None, str]:
    """Return the newest undamaged record of an earlier run with equal inputs, and a note for the user."""
    run, experiment, why = state.run, state.experiment, ""
    for earlier in [run, *(r for r in runs_newest_first(experiment.runs_root) if r.id != run.id)]:
        record = earlier.record(stage.name)
        if record is None or record.key != key:
            continue
        if record.data != _data_fingerprint(stage, state.outputs, record.columns):
            continue
        if record.reads.listings:
            # Files that another stage of the earlier run created do not count as changes.
            reads = record.reads.besides(earlier.reads())
            record = dataclasses.replace(record, reads=reads)
        if changed := read_changes(record.reads, experiment.folder):
            why = f"{changed[0]}: made again"
            continue
        if wrong := damage(earlier.output(record), record.files):
            why = f"{wrong}: made again"
            continue
        if earlier is run:
            return record, f"done in this run ({record.made_by})" if record.made_by == run.id else (
                f"unchanged since run {record.made_by}"
            )
        return _pointed(record, earlier, run), f"unchanged since run {record.made_by}"
    return None, why


def _pointed(record: StageRecord, earlier: Run, run: Run) -> StageRecord:
    relative = os.path.relpath(earlier.output(record), run.root)
    pointed = dataclasses.replace(record, output=relative)
    run.write_record(pointed)
    return pointed


def _data_fingerprint(stage: Stage, outputs: dict[str, Path], columns: tuple[str, ...]) -> str:
    if not columns or stage.name == "ingest":
        return ""
    return load_dataset(outputs["ingest"]).fingerprint_of(columns)
