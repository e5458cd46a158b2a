"""Runs the supervisor of rollouts in the process that starts the workers."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from stoker.core.errors import EXIT_USER
from stoker.serve.process.worker import Worker
from stoker.serve.routing import Supervisor

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Seconds between two judgments of the rollouts."""

_NOT_OF_A_MODEL = {0, EXIT_USER, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
"""Exit codes that are not the fault of a model: the worker ended on request, or reported why it cannot continue."""


class RolloutWatch:
    """Calls a supervisor every second.

    It runs in a thread of its own, because a repository may hang while workers must be watched.
    """

    def __init__(
        self, supervisor: Supervisor, folder: Path, workers: Callable[[], Iterable[Worker]]
    ) -> None:
        """Start the thread.

        Args:
            supervisor: Called every second.
            folder: The folder that the workers share.
            workers: Returns the running workers.
        """
        self._supervisor, self._workers = supervisor, workers
        self._ended = threading.Event()
        supervisor.begin(folder)
        threading.Thread(target=self._run, name="stoker-rollouts", daemon=True).start()

    def died_of_a_version(self, worker: Worker) -> bool:
        """Whether a worker ended because of a version under rollout that it ran or loaded.

        This version then gets no more traffic.
        """
        code = worker.ended
        if worker.was_asked_to_end or code is None or code in _NOT_OF_A_MODEL:
            return False
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        try:
            return self._supervisor.worker_ended(worker.versions_in_use(), how=how)
        except Exception:  # noqa: BLE001 - the next worker must start anyway
            _log.exception("the end of a worker could not be reported to the rollouts")
            return False

    def end(self) -> None:
        """Stop the thread, without waiting for a call that hangs."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            try:
                self._supervisor.look(
                    [use for worker in self._workers() for use in worker.versions_in_use()]
                )
            except OSError as error:
                _log.error("the rollouts cannot be judged: %s", error)
            except Exception:  # noqa: BLE001 - one failure must not stop the supervision
                _log.exception("the rollouts cannot be judged")
