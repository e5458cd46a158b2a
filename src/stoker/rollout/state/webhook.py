"""Settings of the web services that a rollout calls before it continues, and after a rollback."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

from stoker.core.errors import ConfigError
from stoker.rollout.http_call import check_url

MomentName = Literal["stage", "promotion", "end", "rollback"]


class Moment(StrEnum):
    """When a webhook is called."""

    STAGE = "stage"
    """Before a stage; the rollout waits for status 2xx."""

    PROMOTION = "promotion"
    """Before the stage with all traffic; the rollout waits for status 2xx."""

    END = "end"
    """Before the rollout is completed; the rollout waits for status 2xx."""

    ROLLBACK = "rollback"
    """After a rollback; the rollback does not wait for the call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Webhook:
    """A web service that is called before the rollout continues, and after a rollback."""

    url: str
    """URL that gets a POST with JSON."""

    at: tuple[MomentName, ...] = get_args(MomentName)
    """The moments at which the service is called."""

    def __post_init__(self) -> None:
        check_url(self.url, where="A webhook")
        if not self.at:
            raise ConfigError(
                "A webhook must set `at`, the moments when it is called", fix="E.g. at: [stage]."
            )


def parse_webhook(text: str) -> Webhook:
    """Parse `URL` (called at each `Moment`) or, for example, `stage,rollback=URL`.

    Raises:
        ConfigError: the text has neither form.
    """
    moments, equals, url = text.partition("=")
    if not equals or ":" in moments:
        return Webhook(url=text)
    at: tuple[MomentName, ...] = ()
    for name in moments.split(","):
        known = [each for each in get_args(MomentName) if each == name.strip()]
        if not known:
            raise ConfigError(
                f"{name!r} is not a moment of a webhook",
                got=text,
                fix=f"Write one or more of {','.join(get_args(MomentName))}=URL, or URL.",
            )
        at += tuple(known)
    return Webhook(url=url, at=at)
