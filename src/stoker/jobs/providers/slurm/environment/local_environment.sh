#!/bin/bash
# Runs a command with a copy of an environment on this machine's own disk, where imports of many files are fast.
#
#   local_environment.sh FOLDER COMMAND...
#
# FOLDER/bin/python in COMMAND becomes that of the copy. All tasks of the machine use one copy, whose name is that of FOLDER.
# If it cannot be copied, e.g. because the disk is full, COMMAND runs with FOLDER itself.
set -u
shared=$1
shift
copies=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/stoker-environments-$UID
copy=$copies/${shared##*/}

# A cleaner of /tmp removes files that nobody has read for a while.
is_whole() {
	[ -x "$copy/bin/python" ] && [ "$(find "$copy" -type f | wc -l)" -ge "$(cat "$shared/files")" ]
}

make_copy() (
	mkdir -p -m 700 "$copies" && [ -O "$copies" ] && exec 9>> "$copy.lock" && flock 9 || exit 1
	if is_whole; then exit 0; fi
	rm -rf "$copy".partial.*
	trap 'rm -rf "$copy".partial.*' EXIT
	cp -a "$shared" "$copy.partial.new" || exit 1
	if [ -e "$copy" ]; then mv -T "$copy" "$copy.partial.old" || exit 1; fi
	mv -T "$copy.partial.new" "$copy"
)

python=$copy/bin/python
if ! make_copy; then
	echo "stoker: the environment cannot be copied to $copies of ${HOSTNAME:-this machine}; its tasks use $shared" >&2
	python=$shared/bin/python
fi
command=()
for word in "$@"; do
	if [ "$word" = "$shared/bin/python" ]; then word=$python; fi
	command+=("$word")
done
exec "${command[@]}"
