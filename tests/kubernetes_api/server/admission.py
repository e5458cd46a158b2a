"""What happens to an object before it is stored: defaults, the rules of its kind, quotas, and Kueue's hold."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any

from tests.kubernetes_api import quantities
from tests.kubernetes_api.problems import forbidden, invalid
from tests.kubernetes_api.resources import (
    ACCOUNTS,
    CONFIG_MAPS,
    JOB_SETS,
    JOBS,
    LOCAL_QUEUES,
    PODS,
    PRIORITIES,
    QUOTAS,
    SECRETS,
    Object,
    Resource,
    copied,
)
from tests.kubernetes_api.storage import Storage

QUEUE = "kueue.x-k8s.io/queue-name"
"""Label of a job that Kueue admits."""

MAX_BYTES = 1 << 20
"""Of a ConfigMap or a Secret."""

_REASONS = (
    *("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded"),
    "PodFailurePolicy",
)
"""Of failed jobs, which a rule of a JobSet may name."""

_RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")


def admitted(storage: Storage, resource: Resource, item: Object) -> Object:
    """Return an object as it is to be stored; refuse what breaks a rule of its kind, or a quota."""
    item = copied(item)
    _defaults(storage, resource, item)
    causes = _rules(resource, item)
    if causes:
        raise invalid(resource, item["metadata"].get("name", ""), causes)
    _require_quota(storage, resource, item)
    return item


def forbidden_changes(resource: Resource, before: Object, after: Object) -> list[str]:
    """Return what an update must not change, as the causes of a 422."""
    old, new = before.get("spec", {}), after.get("spec", {})
    if resource is JOBS:
        names = ["completionMode", "podFailurePolicy", "backoffLimitPerIndex", "selector"]
        may_change = old.get("suspend") and not before.get("status", {}).get("startTime")
        names += [] if may_change else ["template"]
    elif resource is JOB_SETS:
        names = ["failurePolicy", "successPolicy", "network"]
        names += [] if old.get("suspend") or new.get("suspend") else ["replicatedJobs"]
    elif resource is PODS:
        names = ["nodeName", "volumes", "restartPolicy"]
    else:
        return []
    changed = [name for name in names if old.get(name) != new.get(name)]
    return [f"spec.{name}: Invalid value: field is immutable" for name in changed]


def _defaults(storage: Storage, resource: Resource, item: Object) -> None:
    if resource is JOBS:
        _of_job(item["spec"])
    elif resource is JOB_SETS:
        _of_job_set(item)
    elif resource is PODS:
        _of_pod(storage, item)
    has_queue = QUEUE in (item["metadata"].get("labels") or {})
    parents = item["metadata"].get("ownerReferences") or []
    if has_queue and resource in (JOBS, JOB_SETS) and not parents and _has_kueue(storage):
        item["spec"]["suspend"] = True
    if resource is SECRETS and "stringData" in item:
        given = {
            name: base64.b64encode(value.encode()).decode()
            for name, value in item.pop("stringData").items()
        }
        item["data"] = (item.get("data") or {}) | given


def _has_kueue(storage: Storage) -> bool:
    return bool(storage.items(LOCAL_QUEUES))


def _of_job(spec: Object) -> None:
    indexed = spec.get("completionMode") == "Indexed"
    if spec.get("completions") is None and spec.get("parallelism") is None:
        spec["completions"] = 1
    spec.setdefault("parallelism", 1)
    spec.setdefault("completionMode", "NonIndexed")
    spec.setdefault("suspend", False)
    spec.setdefault("backoffLimit", 2**31 - 1 if "backoffLimitPerIndex" in spec and indexed else 6)
    replaced = "Failed" if spec.get("podFailurePolicy") else "TerminatingOrFailed"
    spec.setdefault("podReplacementPolicy", replaced)
    _of_pod_spec(spec["template"].setdefault("spec", {}))


def _of_pod_spec(spec: Object) -> None:
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("schedulerName", "default-scheduler")
    spec.setdefault("securityContext", {})
    for container in spec.get("containers", []):
        container.setdefault("imagePullPolicy", "IfNotPresent")
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        requests = (container.get("resources") or {}).get("limits") or {}
        if requests:
            given = container["resources"].get("requests") or {}
            container["resources"]["requests"] = requests | given


def _of_pod(storage: Storage, item: Object) -> None:
    spec = item["spec"]
    _of_pod_spec(spec)
    spec.setdefault("restartPolicy", "Always")
    account = spec.setdefault("serviceAccountName", "default")
    namespace = item["metadata"]["namespace"]
    if storage.find(ACCOUNTS, namespace, account) is None:
        why = f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
        raise forbidden(PODS, item["metadata"].get("name", ""), why)
    if name := spec.get("priorityClassName"):
        found = storage.find(PRIORITIES, "", name)
        if found is None:
            why = f"no PriorityClass with name {name} was found"
            raise forbidden(PODS, item["metadata"].get("name", ""), why)
        spec["priority"] = found["value"]
    spec.setdefault("priority", 0)
    item["status"] = {"phase": "Pending"}


def _of_job_set(item: Object) -> None:
    spec = item["spec"]
    spec.setdefault("successPolicy", {"operator": "All"})
    spec.setdefault("startupPolicy", {"startupPolicyOrder": "AnyOrder"})
    network = spec.setdefault("network", {})
    network.setdefault("enableDNSHostnames", True)
    network.setdefault("publishNotReadyAddresses", True)
    if spec.get("failurePolicy"):
        spec["failurePolicy"].setdefault("restartStrategy", "Recreate")
    for each in spec.get("replicatedJobs", []):
        each.setdefault("replicas", 1)
        each.setdefault("groupName", "default")
        each["template"].setdefault("spec", {}).setdefault("completionMode", "Indexed")
        pod = each["template"]["spec"].setdefault("template", {}).setdefault("spec", {})
        pod.setdefault("restartPolicy", "OnFailure")


def _rules(resource: Resource, item: Object) -> list[str]:
    checks: dict[str, Callable[[Object], list[str]]] = {
        "jobs": lambda each: _job_rules(each["spec"], "spec", each["metadata"].get("name", "")),
        "jobsets": _job_set_rules,
        "configmaps": _size,
        "secrets": _size,
        "pods": lambda each: _pod_rules(each["spec"], "spec", ("Always", "OnFailure", "Never")),
    }
    check = checks.get(resource.plural)
    return check(item) if check else []


def _size(item: Object) -> list[str]:
    data = item.get("data") or {}
    total = sum(len(str(value)) for value in data.values())
    total += sum(len(value) * 3 // 4 for value in (item.get("binaryData") or {}).values())
    return ["data: Too long: may not be more than 1048576 bytes"] if total > MAX_BYTES else []


def _job_rules(spec: Object, where: str, name: str) -> list[str]:
    causes = []
    completions, parallelism = spec.get("completions"), spec.get("parallelism", 1)
    if spec["completionMode"] == "Indexed":
        if completions is None:
            causes.append(f"{where}.completions: Required value: when completion mode is Indexed")
        elif len(f"{name}-{completions - 1}") > 63:
            causes.append(
                f'metadata.name: Invalid value: "{name}": must be no more than 63 characters'
            )
    if any(value is not None and value < 0 for value in (completions, parallelism)):
        causes.append(f"{where}: Invalid value: must be greater than or equal to 0")
    template = spec["template"]["spec"]
    causes += _pod_rules(template, f"{where}.template.spec", ("OnFailure", "Never"))
    if spec.get("podFailurePolicy"):
        if template.get("restartPolicy") != "Never":
            rule = 'only "Never" is supported when podFailurePolicy is specified'
            causes.append(f"{where}.template.spec.restartPolicy: Invalid value: {rule}")
        if spec["podReplacementPolicy"] != "Failed":
            causes.append(
                f'{where}.podReplacementPolicy: Unsupported value: supported values: "Failed"'
            )
        for number, each in enumerate(spec["podFailurePolicy"]["rules"]):
            causes += _failure_rule(each, f"{where}.podFailurePolicy.rules[{number}]")
    return causes


def _failure_rule(rule: Object, where: str) -> list[str]:
    codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
    if bool(codes) == bool(conditions):
        return [
            f"{where}: Invalid value: specifying one of onExitCodes and onPodConditions is required"
        ]
    if rule["action"] not in ("FailJob", "FailIndex", "Ignore", "Count"):
        return [f'{where}.action: Unsupported value: "{rule["action"]}"']
    if conditions and any("status" not in each for each in conditions):
        return [f"{where}.onPodConditions.status: Required value"]
    values: list[int] = (codes or {}).get("values", [])
    if values != sorted(set(values)):
        return [f"{where}.onExitCodes.values: Invalid value: must be ordered and unique"]
    if codes and codes["operator"] == "In" and 0 in values:
        return [f"{where}.onExitCodes.values: Invalid value: must not be 0 for the In operator"]
    return []


def _pod_rules(spec: Object, where: str, policies: tuple[str, ...]) -> list[str]:
    causes = []
    if spec.get("restartPolicy") not in policies:
        causes.append(
            f'{where}.restartPolicy: Unsupported value: "{spec.get("restartPolicy", "")}"'
        )
    volumes = [each["name"] for each in spec.get("volumes") or []]
    if len(set(volumes)) < len(volumes):
        causes.append(f"{where}.volumes: Duplicate value")
    for number, container in enumerate(spec.get("containers") or []):
        inside = f"{where}.containers[{number}]"
        if not container.get("image"):
            causes.append(f"{inside}.image: Required value")
        causes += [
            f'{inside}.volumeMounts.name: Not found: "{mount["name"]}"'
            for mount in container.get("volumeMounts") or []
            if mount["name"] not in volumes
        ]
        causes += _resource_rules(container.get("resources") or {}, f"{inside}.resources")
    return causes


def _resource_rules(resources: Object, where: str) -> list[str]:
    causes = []
    for kind in ("limits", "requests"):
        for name, value in (resources.get(kind) or {}).items():
            if quantities.parse(value) is None:
                causes.append(f'{where}.{kind}[{name}]: Invalid value: "{value}"')
    if causes:
        return causes
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for name, value in requests.items():
        limit = limits.get(name)
        requested = quantities.value(value)
        if limit is not None and requested > quantities.value(limit):
            causes.append(
                f"{where}.requests: Invalid value: must be less than or equal to {name} limit"
            )
        if "/" in name and (limit is None or requested != quantities.value(limit)):
            causes.append(f"{where}.limits[{name}]: Required value: Limit must be set and equal")
    return causes


def _job_set_rules(item: Object) -> list[str]:
    spec, name = item["spec"], item["metadata"].get("name", "")
    causes, known = [], []
    for number, each in enumerate(spec.get("replicatedJobs") or []):
        where = f"spec.replicatedJobs[{number}]"
        known.append(each["name"])
        job = each["template"]["spec"]
        longest = f"{name}-{each['name']}-{each['replicas'] - 1}"
        pod = f"{longest}-{(job.get('completions') or 1) - 1}-abcde"
        if len(longest) > 63 or len(pod) > 63:
            causes.append(
                f'{where}.name: Invalid value: "{longest}": must be no more than 63 characters'
            )
        checked = copied(job)
        _of_job(checked)
        causes += _job_rules(checked, f"{where}.template.spec", longest)
    subdomain = spec["network"].get("subdomain", "")
    if len(subdomain) > 63:
        causes.append("spec.network.subdomain: Invalid value: must be no more than 63 characters")
    return causes + _policy_rules(spec.get("failurePolicy") or {}, known)


def _policy_rules(policy: Object, known: list[str]) -> list[str]:
    causes, names = [], []
    for number, rule in enumerate(policy.get("rules") or []):
        where = f"spec.failurePolicy.rules[{number}]"
        names.append(rule["name"])
        if not _RULE_NAME.fullmatch(rule["name"]):
            causes.append(f'{where}.name: Invalid value: "{rule["name"]}"')
        causes += [
            f'{where}.targetReplicatedJobs: Invalid value: "{target}"'
            for target in rule.get("targetReplicatedJobs") or []
            if target not in known
        ]
        causes += [
            f'{where}.onJobFailureReasons: Invalid value: "{reason}"'
            for reason in rule.get("onJobFailureReasons") or []
            if reason not in _REASONS
        ]
        for pattern in rule.get("onJobFailureMessagePatterns") or []:
            try:
                re.compile(pattern)
            except re.error:
                causes.append(f'{where}.onJobFailureMessagePatterns: Invalid value: "{pattern}"')
    if len(set(names)) < len(names):
        causes.append("spec.failurePolicy.rules: Invalid value: rule names are not unique")
    return causes


def _require_quota(storage: Storage, resource: Resource, item: Object) -> None:
    namespace = item["metadata"].get("namespace", "")
    for quota in storage.items(QUOTAS, namespace) if namespace else []:
        hard = quota["spec"].get("hard", {})
        requested = _use(resource, item)
        if resource is PODS:
            _require_given(quota, requested, item)
        over = [
            name
            for name, amount in requested.items()
            if name in hard
            and amount + _used(storage, namespace, name) > quantities.value(hard[name])
        ]
        if over:
            parts = []
            for title, amounts in (
                ("requested", requested),
                ("used", {name: _used(storage, namespace, name) for name in over}),
                ("limited", hard),
            ):
                listed = ",".join(f"{name}={_shown(amounts[name])}" for name in over)
                parts.append(f"{title}: {listed}")
            why = f"exceeded quota: {quota['metadata']['name']}, {', '.join(parts)}"
            raise forbidden(resource, item["metadata"].get("name", ""), why)


def _require_given(quota: Object, requested: dict[str, float], item: Object) -> None:
    missing = [
        name
        for name in quota["spec"].get("hard", {})
        if name.startswith(("requests.", "limits.")) and "/" not in name and name not in requested
    ]
    if missing:
        listed = "; ".join(
            f"{name} for: {item['spec']['containers'][0]['name']}" for name in missing
        )
        why = f"failed quota: {quota['metadata']['name']}: must specify {listed}"
        raise forbidden(PODS, item["metadata"].get("name", ""), why)


def _use(resource: Resource, item: Object) -> dict[str, float]:
    use: dict[str, float] = {f"count/{resource.name}": 1}
    if resource in (CONFIG_MAPS, SECRETS) or resource.plural in (
        "services",
        "persistentvolumeclaims",
    ):
        use[resource.plural] = 1
    if resource is PODS:
        use["pods"] = 1
        for kind in ("requests", "limits"):
            for name, amount in quantities.of_pod(item["spec"], kind).items():
                use[f"{kind}.{name}"] = amount
    return use


def _used(storage: Storage, namespace: str, name: str) -> float:
    kinds: dict[str, Resource] = {
        "count/jobs.batch": JOBS,
        "count/jobsets.jobset.x-k8s.io": JOB_SETS,
    }
    kinds |= {"configmaps": CONFIG_MAPS, "secrets": SECRETS}
    resource = kinds.get(name, PODS)
    items = [
        each
        for each in storage.items(resource, namespace)
        if each.get("status", {}).get("phase") not in ("Succeeded", "Failed")
    ]
    return sum(_use(resource, each).get(name, 0.0) for each in items)


def _shown(amount: Any) -> str:
    return f"{amount:g}" if isinstance(amount, float | int) else str(amount)
