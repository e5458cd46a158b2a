"""The four dashboards, by subject."""

from __future__ import annotations

from stoker.monitor.boards.gpu import GPUS
from stoker.monitor.boards.rollout import ROLLOUT
from stoker.monitor.boards.serving import SERVING
from stoker.monitor.boards.training import TRAINING

BOARDS = (TRAINING, GPUS, SERVING, ROLLOUT)
