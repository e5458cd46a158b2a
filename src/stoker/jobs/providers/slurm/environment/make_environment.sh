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

# What a program complains about; of uv without its hints.
complaint() {
	case $1 in
	*'No space left'* | *'quota exceeded'*) echo " a disk is full: that of ${folder%/*}, or of the cache of uv" ;;
	*) printf '%s\n' "$1" | sed -nE 's/^ *(error|cause|mv): */ /p' | tr -s '\n ' ' ' ;;
	esac
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
trap 'rm -rf "$part"' EXIT
trap 'exit 1' HUP INT TERM
echo "stoker: makes the environment $folder, once for this lock" >&2
# What they say is kept in no file, whose disk may be full.
said=$(uv venv --quiet --relocatable --no-project --python "$python" "$part" 2>&1) ||
	fail "uv cannot make an environment with Python $python:$(complaint "$said")"
said=$(uv pip sync --color never --no-progress --require-hashes --compile-bytecode --python "$part/bin/python" "$lock" 2>&1) ||
	fail "uv cannot install the lock:$(complaint "$said")"
found=$("$part/bin/python" -I -c 'from importlib.metadata import version; print(version("stoker"))' 2> /dev/null) ||
	fail "the lock must contain stoker, and stoker==$version is what submitted the job"
[ "$found" = "$version" ] || fail "the lock must contain stoker==$version, which submitted the job; it has $found"
find "$part" -type f | wc -l 2> /dev/null > "$part/files" || fail "$folder cannot be made: the disk of ${folder%/*} is full"
if [ -e "$folder" ]; then mv -T "$folder" "$folder.partial.old"; fi # its Python is gone
said=$(mv -T "$part" "$folder" 2>&1) || [ -x "$folder/bin/python" ] || fail "$folder cannot be made:$(complaint "$said")"
