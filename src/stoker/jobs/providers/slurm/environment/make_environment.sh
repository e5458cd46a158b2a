#!/bin/bash
# Makes the Python environment of a lock, once for all jobs that have the same lock.
#
#   make_environment.sh FOLDER PYTHON VERSION [LOCK]
#
# FOLDER is the environment: it gets its name in one rename, when it is whole. What a killed maker left, the next one removes.
# PYTHON is a version or a path, for uv; VERSION is that of Stoker; without LOCK it only looks whether it could be made.
# A failure is one line on stdout.
set -u
folder=$1 python=$2 version=$3 lock=${4:-}

fail() {
	echo "$*"
	exit 1
}

# What uv complains about, without its hints.
complaint() {
	sed -nE 's/^ *(error|cause): */ /p' "$1" | tr -s '\n ' ' '
}

if [ -x "$folder/bin/python" ]; then exit 0; fi
PATH=$PATH:${HOME:-}/.local/bin
command -v uv > /dev/null || fail "uv must be on the PATH of ${HOSTNAME:-this machine} to make the environment of the lock; install it: pip install uv"
[ -n "$lock" ] || exit 0

mkdir -p "${folder%/*}" && exec 9>> "$folder.lock" || fail "${folder%/*} must be a folder that can be written; set environments_folder of the target"
# A file system may have no locks. Then two makers may work at the same time, and the first rename counts.
if flock 9; then rm -rf "$folder".partial.*; fi
if [ -x "$folder/bin/python" ]; then exit 0; fi

part=$folder.partial.${HOSTNAME:-}.$$
trap 'rm -rf "$part" "$part.log"' EXIT
trap 'exit 1' HUP INT TERM
echo "stoker: makes the environment $folder, once for this lock" >&2
uv venv --quiet --relocatable --no-project --python "$python" "$part" 2> "$part.log" ||
	fail "uv cannot make an environment with Python $python:$(complaint "$part.log")"
uv pip sync --color never --no-progress --require-hashes --compile-bytecode --python "$part/bin/python" "$lock" 2> "$part.log" ||
	fail "uv cannot install the lock:$(complaint "$part.log")"
found=$("$part/bin/python" -I -c 'from importlib.metadata import version; print(version("stoker"))' 2> "$part.log") ||
	fail "the lock must contain stoker, and stoker==$version is what submitted the job"
[ "$found" = "$version" ] || fail "the lock must contain stoker==$version, which submitted the job; it has $found"
find "$part" -type f | wc -l > "$part/files"
if [ -e "$folder" ]; then mv -T "$folder" "$folder.partial.old"; fi # its Python is gone
mv -T "$part" "$folder" 2> "$part.log" || [ -x "$folder/bin/python" ] || fail "$folder cannot be made: $(cat "$part.log")"
