"""The kind of target `provider: slurm`."""

from __future__ import annotations

from stoker.jobs.provider import ProviderKind
from stoker.jobs.providers.slurm.provider import SlurmProvider
from stoker.jobs.providers.slurm.settings import SlurmTarget

KIND = ProviderKind(settings=SlurmTarget, make=SlurmProvider)
