"""Copies the files that a job writes on a cluster: growing and rotated logs, and facts of its starts."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path

from stoker.core.errors import Plain, UserError
from stoker.core.files import write_atomic
from stoker.core.incarnation import INCARNATIONS
from stoker.jobs.logs import LOGS

HEAD_BYTES = 64
"""Number of first bytes by which a log is identified, also after a rotation; they contain a time."""

FACTS = ("outcome", "stop")

_LOG = re.compile(rf"{LOGS}/([A-Za-z0-9_-]+\.log)(?:\.(\d+))?")
_START = re.compile(rf"{INCARNATIONS}/\d+")

FETCH = f"""
cd "$1" 2> /dev/null || exit 0
shift
declare -A known
while [ $# -ge 3 ]; do known[$1]+="$2 $3 "; shift 3; done
send() {{
	exec 3< "$1" || return
	local size offset=0 head=- own=${{1%.log*}}.log words
	size=$(stat -L -c %s /dev/fd/3)
	read -ra words <<< "${{known[$own]:-}}"
	for ((i = 0; i < ${{#words[@]}}; i += 2)); do
		local has=${{words[i + 1]}} first
		if [ "$has" -gt "$size" ] || [ "$has" -lt "$offset" ]; then continue; fi
		first=$(head -c "$((has < {HEAD_BYTES} ? has : {HEAD_BYTES}))" /dev/fd/3 | sha256sum)
		if [ "${{first%% *}}" = "${{words[i]}}" ]; then offset=$has head=${{words[i]}}; fi
	done
	printf '%s %s %s %s\\n' "$1" "$head" "$offset" "$((size - offset))"
	tail -c "+$((offset + 1))" /dev/fd/3 | head -c "$((size - offset))"
}}
for name in {" ".join(FACTS)} {INCARNATIONS}/* {LOGS}/*.log.* {LOGS}/*.log; do
	if [ -f "$name" ]; then send "$name"; fi
done
exit 0
"""
"""Script that runs on the login node. Its arguments are the job's folder, and three words for each part of a log that
this machine has: name of the log's newest part, SHA-256 of the part's first bytes, size. For each file it prints a
line and then new bytes. The line has the name, the SHA-256 of the part that the bytes continue, the offset, and the
number of bytes."""


def known_logs(place: Path) -> list[str]:
    """Return the name, the hash of the first bytes and the size of each part of a log on this machine."""
    words = []
    for path in _parts(place):
        words += [f"{LOGS}/{_family(path)}", _head(path), str(path.stat().st_size)]
    return words


def apply(answer: bytes, place: Path) -> None:
    """Write the output of `FETCH` into a job's folder on this machine.

    Raises:
        UserError: the output is truncated or invalid.
    """
    logs, facts = [], {}
    while answer:
        line, _, answer = answer.partition(b"\n")
        name, head, size = _header(line)
        content, answer = answer[:size], answer[size:]
        if len(content) < size:
            raise _damaged(line)
        if found := _LOG.fullmatch(name):
            logs.append((int(found[2] or 0), name, (found[1], head), content))
        elif name in FACTS or _START.fullmatch(name):
            facts[name] = content
    parts = {(_family(path), _head(path)): path for path in _parts(place)}
    # Write the oldest part first: a newer part may get the name of an older part, which must have been renamed by
    # then.
    for _, name, key, content in sorted(logs, reverse=True):
        _write_log(place / name, parts.get(key), content)
    for name, content in facts.items():
        if not (place / name).exists() or content:
            write_atomic(place / name, content)
    for name in FACTS:
        if name not in facts:
            (place / name).unlink(missing_ok=True)


def _parts(place: Path) -> list[Path]:
    return sorted(path for path in (place / LOGS).glob("*.log*") if _family(path))


def _family(path: Path) -> str:
    """Return the name of the newest part of a log; empty if the file is not part of a log."""
    found = _LOG.fullmatch(f"{LOGS}/{path.name}")
    return found[1] if found else ""


def _write_log(path: Path, before: Path | None, added: bytes) -> None:
    """Append to a part of a log, which may have had another name before a rotation; write it if it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if before is None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # replace the other part of this name, which a reader may have open
    elif before != path:
        os.replace(before, path)
    if added or before is None:
        with path.open("ab") as stream:
            stream.write(added)


def _header(line: bytes) -> tuple[str, str, int]:
    """Return the name, the hash of the part to continue, and the number of bytes."""
    words = line.decode(errors="replace").split(" ")
    if len(words) != 4 or not (words[2].isdecimal() and words[3].isdecimal()):
        raise _damaged(line)
    return words[0], words[1], int(words[3])


def _damaged(line: bytes) -> UserError:
    return UserError(
        "the login node must send complete files of the job",
        got=Plain(line[:80].decode(errors="replace")),
        fix="Run the same command again.",
    )


def _head(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.sha256(stream.read(HEAD_BYTES)).hexdigest()
