"""Polls the model config file while the server runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from stoker.core.errors import ConfigError
from stoker.core.files import sha256_file
from stoker.serve.servables.model_config import ModelConfig, read_model_config

_log = logging.getLogger(__name__)

Configs = tuple[ModelConfig, ...]


class ConfigFile:
    """The model config file, which is applied again when it has changed."""

    def __init__(self, path: Path, configs: Configs, configure: Callable[[Configs], None]) -> None:
        """Args: path: the file; configs: its content at the start; configure: applies new content."""
        self._path, self._configs, self._configure = path, configs, configure
        self._seen: tuple[int, int] | None = None
        self._tried = ""
        self._is_missing = False

    def look(self) -> None:
        """Apply the file if it has changed. An error in the file is logged once, and the models stay as they are.

        A changed file is read only when two checks in a row find the same size and time, because it may still be
        written.
        """
        try:
            stat = self._path.stat()
            before, self._seen = self._seen, (stat.st_size, stat.st_mtime_ns)
            digest = sha256_file(self._path) if self._seen == before else self._tried
        except OSError as error:
            if not self._is_missing:
                _log.error(
                    "the model config file cannot be read, so the models stay as they are: %s (%s)",
                    self._path,
                    error.strerror,
                )
            self._seen, self._is_missing = None, True
            return
        self._is_missing = False
        if digest == self._tried:
            return
        self._tried = digest
        try:
            configs = read_model_config(self._path)
        except ConfigError as error:
            _log.error(
                "the model config file is invalid, so the models stay as they are: %s", error.line()
            )
            return
        if configs != self._configs:
            self._configs = configs
            _log.info("%s has changed and is applied", self._path)
            self._configure(configs)
