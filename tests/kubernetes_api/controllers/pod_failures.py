"""The pod failure policy of a job: which failures end it, which do not count.

Source: Kubernetes, "Pod failure policy"; the words of the messages are those of the job controller.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.kubernetes_api.resources import Object


@dataclass(frozen=True)
class Verdict:
    """What a policy says of a failed pod."""

    action: str
    """FailJob, Ignore or Count."""

    message: str = ""


def judge(job: Object, pod: Object) -> Verdict:
    """Return what the first rule that matches says; Count if none does."""
    rules = (job["spec"].get("podFailurePolicy") or {}).get("rules", [])
    place = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    for number, rule in enumerate(rules):
        rest = f"matching {rule['action']} rule at index {number}"
        if (found := _by_exit_code(rule, pod)) is not None:
            name, code = found
            return Verdict(
                rule["action"],
                f"Container {name} for pod {place} failed with exit code {code} {rest}",
            )
        if (kind := _by_condition(rule, pod)) is not None:
            return Verdict(rule["action"], f"Pod {place} has condition {kind} {rest}")
    return Verdict("Count")


def _by_exit_code(rule: Object, pod: Object) -> tuple[str, int] | None:
    wanted = rule.get("onExitCodes")
    if not wanted:
        return None
    for status in pod.get("status", {}).get("containerStatuses") or []:
        code = status.get("state", {}).get("terminated", {}).get("exitCode", 0)
        if code == 0 or wanted.get("containerName") not in (None, status["name"]):
            continue
        if (code in wanted["values"]) is (wanted["operator"] == "In"):
            return status["name"], code
    return None


def _by_condition(rule: Object, pod: Object) -> str | None:
    for wanted in rule.get("onPodConditions") or []:
        for condition in pod.get("status", {}).get("conditions") or []:
            if (condition["type"], condition["status"]) == (wanted["type"], wanted["status"]):
                kind: str = condition["type"]
                return kind
    return None
