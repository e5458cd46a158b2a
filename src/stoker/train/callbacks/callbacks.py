"""Calls Keras callbacks as `Model.fit` does."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import keras
from numpy.typing import NDArray

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.core.user_code import call, failure_of_user_code, load_function
from stoker.train.callbacks.hooks import STEP_HOOKS, needs_every_step, overrides_hook, plain_logs
from stoker.train.callbacks.state import capture, restore, settings_of

_LOG = logging.getLogger(__name__)

Callback: TypeAlias = keras.callbacks.Callback

GROUP = "callbacks"
"""Prefix of the keys of all arrays in the callbacks' state."""

_WRITERS: tuple[type[Any], ...] = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    *([keras.callbacks.OrbaxCheckpoint] if hasattr(keras.callbacks, "OrbaxCheckpoint") else []),
)
"""Callbacks that write files or send reports: only the chief runs them."""

_NEEDLESS: dict[type[Any], str] = {
    keras.callbacks.BackupAndRestore: "Stoker's own checkpoints resume a run by themselves, and "
    "exactly.",
    keras.callbacks.SwapEMAWeights: "Stoker keeps the average of use_ema or train.ema itself, "
    "validates it and exports it.",
}
"""Class of a callback whose task Stoker does itself -> explanation for the user."""


def writes_files(callback: Callback) -> bool:
    """Return whether a callback is one of Keras's that write files or send reports."""
    return isinstance(callback, _WRITERS)


@contextmanager
def user_callback_errors(what: str) -> Iterator[None]:
    """Convert an exception of a callback into one line.

    Args:
        what: The callback's class and the hook, for the message.

    Raises:
        ConfigError: The `with` block failed. The error names the user's file, line and function, even if
            one of Keras's callbacks called the function.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise failure_of_user_code(f"train.callbacks: {what}", error) from error


class Callbacks:
    """The user's callbacks and Keras's History, called by the loop as in `fit`.

    The order of calls is the same as in `fit`: `on_train_begin`; in each epoch `on_epoch_begin`, for each
    call of the compiled step `on_train_batch_begin` and `on_train_batch_end`, then `on_test_begin`,
    the test batches, `on_test_end`, and `on_epoch_end` with the metrics and their `val_`; at the
    end `on_train_end`, in which EarlyStopping restores the best weights. Logs become plain floats,
    sorted by name. All callbacks get the same dict, so that a callback sees what earlier ones added.
    A resumed run calls `set_state` before `on_train_begin`. If it resumes within an epoch, it does
    not call `on_epoch_begin` again, because a schedule that multiplies the learning rate would do so
    twice. A run that is interrupted, by an error or by its scheduler, does not call `on_train_end`.

    Every hook raises ConfigError if a callback fails, with the line of the user's file.
    """

    def __init__(
        self,
        model: keras.Model,
        callbacks: Sequence[Callback],
        *,
        steps: int,
        epochs: int,
        is_chief: bool = True,
    ) -> None:
        """Give the model, `steps` and `epochs` to every callback.

        Args:
            model: The compiled model.
            callbacks: The user's callbacks.
            steps: Steps per epoch.
            epochs: Total epochs.
            is_chief: Whether this worker writes files; other workers skip callbacks that write files.

        Raises:
            ConfigError: A callback is BackupAndRestore or SwapEMAWeights, or a callback failed.
        """
        for callback in callbacks:
            for kind, why in _NEEDLESS.items():
                if isinstance(callback, kind):
                    name = kind.__name__
                    raise ConfigError(
                        f"train.callbacks must not contain {name}", got=Plain(f"a {name}"), fix=why
                    )
        kept = [c for c in callbacks if is_chief or not isinstance(c, _WRITERS)]
        self._model = model
        self._settings = {id(callback): settings_of(callback) for callback in kept}
        with user_callback_errors("train.callbacks: set_model"):
            listed = keras.callbacks.CallbackList(
                kept, add_history=True, model=model, verbose=0, epochs=epochs, steps=steps
            )
        self._all: list[Callback] = listed.callbacks
        self._by_hook = {
            hook: [callback for callback in self._all if overrides_hook(callback, hook)]
            for hook in STEP_HOOKS
        }
        self._begun = self._over = False
        self._resumed_from: tuple[Mapping[str, Any], Mapping[str, NDArray[Any]]] | None = None
        self._warned: set[str] = set()
        self._at_end: tuple[dict[str, Any], dict[str, NDArray[Any]]] | None = None

    @property
    def has_batch_hooks(self) -> bool:
        """Whether a callback must be called for each step, not only for each call of several steps."""
        heard = self._by_hook["on_train_batch_begin"] + self._by_hook["on_train_batch_end"]
        return any(needs_every_step(callback) for callback in heard)

    @property
    def reads_batch_logs(self) -> bool:
        """Whether a callback has a hook for the end of a call; the loop must then read the metrics."""
        return bool(self._by_hook["on_train_batch_end"])

    @property
    def reads_test_logs(self) -> bool:
        """Whether a callback has a hook for the end of a validation batch."""
        return bool(self._by_hook["on_test_batch_end"])

    @property
    def stop_training(self) -> bool:
        """Whether a callback requested a stop; as in `fit`, the epoch then ends and is validated."""
        return bool(self._model.stop_training)

    @property
    def stop_evaluating(self) -> bool:
        """Whether a callback requested the end of this validation."""
        return bool(getattr(self._model, "stop_evaluating", False))

    @property
    def history(self) -> keras.callbacks.History:
        """Keras's `History`, which contains the logs of every epoch."""
        return next(c for c in self._all if isinstance(c, keras.callbacks.History))

    def on_train_begin(self) -> None:
        """Call this when training starts or resumes; restores the state from `set_state`, if there is one."""
        self._model.stop_training = self._over = False
        self._at_end = None
        if self._resumed_from is not None:
            for callback in self._all:
                if isinstance(callback, keras.callbacks.CSVLogger):
                    callback.append = True
        self._call_hooks("on_train_begin", {})
        self._begun = True
        if self._resumed_from is not None:
            self._restore(*self._resumed_from)
            self._resumed_from = None

    def on_epoch_begin(self, epoch: int) -> None:
        """Call this when an epoch starts; the first one is 0."""
        self._call_hooks("on_epoch_begin", epoch, {})

    def on_train_batch_begin(self, step: int) -> None:
        """Call this when a call of the compiled step starts; `step` is its first step, counted from 0 in each epoch.

        As in `fit` with `steps_per_execution`, hooks are called once per call of the compiled step.
        """
        self._call_step_hooks("on_train_batch_begin", step, {})

    def on_train_batch_end(self, step: int, logs: Mapping[str, Any]) -> None:
        """Call this when a call of the compiled step has ended.

        Args:
            step: The last step of the call. (`fit` passes the step at which a full call would have
                ended, even if the epoch ended before.)
            logs: `loss` and metrics: their means since the epoch started.
        """
        self._call_step_hooks("on_train_batch_end", step, logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Call this when an epoch has ended.

        Args:
            epoch: The epoch; the first one is 0.
            logs: `loss` and metrics; names from the validation have the prefix `val_`.

        Returns:
            The logs with the callbacks' additions, such as `learning_rate`.
        """
        arguments = plain_logs(logs)
        self._call_hooks("on_epoch_end", epoch, arguments)
        return arguments

    def on_test_begin(self) -> None:
        """Call this when validation starts."""
        self._model.stop_evaluating = False
        self._call_hooks("on_test_begin", {})

    def on_test_batch_begin(self, step: int) -> None:
        """Call this when a validation batch starts; the first one is 0."""
        self._call_step_hooks("on_test_batch_begin", step, {})

    def on_test_batch_end(self, step: int, logs: Mapping[str, Any]) -> None:
        """Call this when a validation batch has ended; names in `logs` have no prefix `val_`."""
        self._call_step_hooks("on_test_batch_end", step, logs)

    def on_test_end(self, logs: Mapping[str, Any]) -> None:
        """Call this when validation has ended; names in `logs` have no prefix `val_`."""
        self._call_hooks("on_test_end", plain_logs(logs))

    def on_train_end(self, logs: Mapping[str, Any]) -> None:
        """Call this when training has ended; no other hook is called later. `logs` are the last epoch's.

        The callbacks' state is captured before their `on_train_end`, because there they close files and
        drop state. A run that is resumed from this state calls `on_train_end` again. If the state of a
        callback cannot be captured, the finished training does not fail.
        """
        if not self._over:
            self._at_end = self._captured(fails=False)
        self._call_hooks("on_train_end", plain_logs(logs))
        self._begun, self._over = False, True

    def close(self) -> None:
        """Close the files of Keras's callbacks if a run ends without `on_train_end`."""
        if not self._begun:
            return
        self._begun = False
        for callback in self._all:
            for kind in (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard):
                if isinstance(callback, kind):
                    kind.on_train_end(callback)

    def state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return the state of every callback: JSON, and arrays by key.

        The state of a callback is the result of its `get_state`, if it has one. Otherwise, it consists of
        all attributes that are numbers, strings, None, arrays, or lists, tuples, sets and dicts of these; a
        warning names the other attributes once. After training has ended, it is the state before
        `on_train_end`.
        """
        return self._captured(fails=True) if self._at_end is None else self._at_end

    def _captured(self, *, fails: bool) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        facts: dict[str, Any] = {}
        arrays: dict[str, NDArray[Any]] = {}
        for name, callback in self._named():
            try:
                with user_callback_errors(f"{name}.get_state"):
                    facts[name], lost = capture(
                        callback,
                        settings=self._settings_of(callback),
                        key=f"{GROUP}/{name}",
                        arrays=arrays,
                    )
            except ConfigError as error:
                if fails:
                    raise
                _LOG.warning(
                    "training has ended, but the state of a callback is missing: %s", error.line()
                )
                continue
            if lost and name not in self._warned:
                self._warned.add(name)
                _LOG.warning(
                    "train.callbacks: a resumed run resets %s of %s; to keep it, define get_state()"
                    " and set_state(state)",
                    *(", ".join(lost), name),
                )
        return facts, arrays

    def set_state(self, facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the result of `state` in every callback.

        Args:
            facts: From `state`; a callback without an entry starts again, and a warning names it.
            arrays: From `state`.

        Before `on_train_begin`, the state is only kept, and it is restored later, because
        `on_train_begin` resets callbacks.
        """
        if self._begun:
            self._restore(facts, arrays)
        else:
            self._resumed_from = (facts, arrays)

    def _restore(self, facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        for name, callback in self._named():
            if name not in facts:
                _LOG.warning("train.callbacks: %s is new, so it starts without state", name)
                continue
            with user_callback_errors(f"{name}.set_state"):
                settings = self._settings_of(callback)
                restore(callback, facts[name], settings=settings, arrays=arrays)

    def _settings_of(self, callback: Callback) -> dict[str, Any]:
        return self._settings.get(id(callback), {})

    def _named(self) -> Iterator[tuple[str, Callback]]:
        seen: Counter[str] = Counter()
        for callback in self._all:
            kind = type(callback).__name__
            seen[kind] += 1
            yield kind if seen[kind] == 1 else f"{kind}-{seen[kind]}", callback

    def _call_hooks(self, hook: str, *arguments: Any) -> None:
        if self._over:
            return
        for callback in self._all:
            with user_callback_errors(f"{type(callback).__name__}.{hook}"):
                getattr(callback, hook)(*arguments)

    def _call_step_hooks(self, hook: str, step: int, logs: Mapping[str, Any]) -> None:
        if self._over or not self._by_hook[hook]:
            return
        arguments = plain_logs(logs)
        for callback in self._by_hook[hook]:
            with user_callback_errors(f"{type(callback).__name__}.{hook}"):
                # `fit` passes logs to batch hooks by keyword, and to other hooks by position.
                getattr(callback, hook)(step, logs=arguments)


def load_callbacks(folder: Path, reference: str) -> Callable[[], list[Callback]]:
    """Load the function that `train.callbacks: module:function` names.

    Args:
        folder: The user's folder.
        reference: `module:function`; the function has no arguments and returns callbacks.

    Returns:
        A function that creates them; it raises ConfigError if the user's function fails or returns
        something else.

    Raises:
        ConfigError: The function does not exist.
    """
    function = load_function(folder, reference, where="train.callbacks")

    def make() -> list[Callback]:
        made = call(function, what=f"train.callbacks: {reference}")
        return check_callbacks(made, what=reference)

    return make


def check_callbacks(made: object, *, what: str) -> list[Callback]:
    """Reject anything that is not a list of Keras callbacks.

    Raises:
        ConfigError: It is not a list, or an entry is not a callback; the first such entry is named.
    """
    listed = [made] if isinstance(made, keras.callbacks.Callback) else made
    rule = f"train.callbacks: {what} must return a list of keras.callbacks.Callback"
    if not isinstance(listed, list | tuple):
        raise ConfigError(rule, got=Plain(type(made).__name__), fix="E.g. return [MyCallback()].")
    for entry in listed:
        if isinstance(entry, type) and issubclass(entry, keras.callbacks.Callback):
            raise ConfigError(rule, got=Plain(f"the class {entry.__name__}"), fix="Call it.")
        if not isinstance(entry, keras.callbacks.Callback):
            raise ConfigError(rule, got=Plain(f"a list with {type(entry).__name__}"))
    return list(listed)
