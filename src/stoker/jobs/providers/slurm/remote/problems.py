"""Translates errors of ssh into the user's terms."""

from __future__ import annotations

from stoker.core.errors import Plain, UserError

_PROBLEMS = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": (
        "the host key of {login} must be the one that this machine knows",
        "Ask the cluster's administrators whether it was changed; then remove the old one: ssh-keygen -R HOST.",
    ),
    "Host key verification failed": (
        "the host key of {login} must be known",
        "Connect once by hand, and compare the key: ssh {login}.",
    ),
    "Permission denied": (
        "{login} must let you in without a question",
        "Load your key (ssh-add), or open a connection that is shared (ControlMaster in ~/.ssh/config): ssh {login}.",
    ),
    "Too many authentication failures": (
        "{login} must let you in without a question",
        "Name the key in ~/.ssh/config: IdentityFile and IdentitiesOnly yes.",
    ),
}
"""Part of a message of ssh -> rule and remedy for the user."""

_UNREACHABLE = (
    "the login node {login} must be reachable",
    "Check its name in `via` of the target and your network (VPN): ssh {login}. Running jobs go on without it.",
)


def ssh_problem(login: str, said: str) -> UserError:
    """Return the error to raise if ssh could not connect.

    Args:
        login: The destination.
        said: The output of ssh.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip(" @\r")]
    found = next((words for part, words in _PROBLEMS.items() if part in said), _UNREACHABLE)
    rule, fix = (text.format(login=login) for text in found)
    return UserError(rule, got=Plain(lines[-1] if lines else "no connection"), fix=fix)
