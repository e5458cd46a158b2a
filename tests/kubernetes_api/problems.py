"""What the server answers when it refuses: a `Status`, as clients read it."""

from __future__ import annotations

from tests.kubernetes_api.resources import Object, Resource


class Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        details: Object | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message
        self.details = details or {}
        self.retry_after_s = retry_after_s

    def to_status(self) -> Object:
        """As the body of the answer."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }


def _details(resource: Resource, name: str) -> Object:
    return {"name": name, "group": resource.group, "kind": resource.plural}


def not_found(resource: Resource, name: str) -> Refusal:
    """An object that is not there."""
    message = f'{resource.name} "{name}" not found'
    return Refusal(404, "NotFound", message, details=_details(resource, name))


def no_such_path() -> Refusal:
    """A kind that is not installed, or a path that leads nowhere."""
    return Refusal(404, "NotFound", "the server could not find the requested resource")


def already_exists(resource: Resource, name: str) -> Refusal:
    """A name that is taken."""
    message = f'{resource.name} "{name}" already exists'
    return Refusal(409, "AlreadyExists", message, details=_details(resource, name))


def conflict(resource: Resource, name: str) -> Refusal:
    """A change of an object that was changed meanwhile."""
    message = (
        f'Operation cannot be fulfilled on {resource.name} "{name}": the object has been modified; '
        "please apply your changes to the latest version and try again"
    )
    return Refusal(409, "Conflict", message, details=_details(resource, name))


def forbidden(resource: Resource, name: str, why: str) -> Refusal:
    """A request without the right, or over a quota."""
    message = f'{resource.name} "{name}" is forbidden: {why}'
    return Refusal(403, "Forbidden", message, details=_details(resource, name))


def invalid(resource: Resource, name: str, causes: list[str]) -> Refusal:
    """An object that breaks rules; each cause begins with the path of the field."""
    listed = causes[0] if len(causes) == 1 else f"[{', '.join(causes)}]"
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    message = f'{kind} "{name}" is invalid: {listed}'
    details = _details(resource, name) | {"kind": resource.kind}
    details["causes"] = [
        {"reason": "FieldValueInvalid", "message": each, "field": each.partition(":")[0]}
        for each in causes
    ]
    return Refusal(422, "Invalid", message, details=details)


def bad_request(message: str) -> Refusal:
    """A request that cannot be read."""
    return Refusal(400, "BadRequest", message)


def expired(message: str = "The resourceVersion for the provided watch is too old.") -> Refusal:
    """A list or a watch that goes on from where the server has forgotten."""
    return Refusal(410, "Expired", message)
