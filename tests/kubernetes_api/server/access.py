"""Who may do what: tokens, the rules of roles, and SelfSubjectAccessReview."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.kubernetes_api.problems import Refusal
from tests.kubernetes_api.resources import Object, Resource

EVERYTHING: Object = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}


@dataclass
class Access:
    """The users of the cluster and their rights."""

    tokens: dict[str, str] = field(default_factory=dict)
    """Token -> user; another token is refused with 401."""

    anonymous: str = ""
    """User of requests without a token, which are refused by default."""

    rules: list[Object] = field(default_factory=lambda: [EVERYTHING])
    """Rules of roles, as a Role has them, of all users in all namespaces."""

    def user(self, authorization: str) -> str:
        """Return the user of a request."""
        if self.anonymous and not authorization:
            return self.anonymous
        kind, _, token = authorization.partition(" ")
        if kind != "Bearer" or token not in self.tokens:
            raise Refusal(401, "Unauthorized", "Unauthorized")
        return self.tokens[token]

    def allows(self, verb: str, group: str, resource: str) -> bool:
        """Whether a rule allows a verb on a resource, e.g. `get` on `pods/log`."""
        return any(
            _holds(rule, "apiGroups", group)
            and _holds(rule, "resources", resource)
            and _holds(rule, "verbs", verb)
            for rule in self.rules
        )

    def require(self, user: str, verb: str, resource: Resource, target: Object) -> None:
        """Refuse a request without the right.

        Args:
            user: Who asks.
            verb: `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, `deletecollection`.
            resource: The kind.
            target: `namespace`, `name` and `subresource` of the request.
        """
        name = "/".join(filter(None, (resource.plural, target["subresource"])))
        if self.allows(verb, resource.group, name):
            return
        where = f'in the namespace "{target["namespace"]}"' if target["namespace"] else ""
        what = f'"{name}" in API group "{resource.group}" {where or "at the cluster scope"}'
        shown = f'{resource.name} "{target["name"]}"' if target["name"] else resource.name
        message = f'{shown} is forbidden: User "{user}" cannot {verb} resource {what}'
        raise Refusal(403, "Forbidden", message, details={"kind": resource.plural})

    def review(self, request: Object) -> Object:
        """Answer a SelfSubjectAccessReview."""
        attributes = request.get("spec", {}).get("resourceAttributes", {})
        name = "/".join(filter(None, (attributes.get("resource"), attributes.get("subresource"))))
        allowed = self.allows(attributes.get("verb", ""), attributes.get("group", ""), name)
        status: Object = {"allowed": allowed}
        if not allowed:
            status["reason"] = "no RBAC policy matched"
        return request | {"metadata": {}, "status": status}


def _holds(rule: Object, name: str, value: str) -> bool:
    listed = rule.get(name, [])
    _, slash, subresource = value.partition("/")
    wild = {"*", f"*/{subresource}"} if slash else {"*"}
    return value in listed or bool(wild & set(listed))
