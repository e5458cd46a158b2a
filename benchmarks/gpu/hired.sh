#!/usr/bin/env bash
# What runs on the hired machine; README.md in this folder says how it gets there.
#
#   hired.sh part FOLDER       keep the parts of TensorFlow that came with this call
#   hired.sh test | bench      unpack once, then what `make test-gpu` or `make bench-gpu` runs;
#                              ONLY=, BUDGET= and OUT= as there, DEVICE=cpu to try all of this without a GPU
#   hired.sh step CHOICE...    ResNet-50's step in memory (resnet_step.py), after `bench` in the same machine;
#                              CROP=224 BATCH=256, and TensorFlow's own variables, which it is there to try
#
# Nothing is piped: what is printed lies in files under $OUT even where this is cut off.
set -u
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
PARTS=${PARTS:-/opt/stoker-parts}
SITE=${SITE:-/opt/stoker-site}
OUT=${OUT:-$ROOT/build/gpu/out}
mkdir -p "$OUT" "$PARTS"

unpack() {
	unset PYTHONDONTWRITEBYTECODE
	if [ ! -f "$SITE/env.sh" ]; then
		timeout -k 2 60 bash "$ROOT/.gpu/tools/unpack.sh" "$PARTS" "$SITE" >"$OUT/unpack.txt" 2>&1 ||
			{ tail -5 "$OUT/unpack.txt"; exit 1; }
		# Without compiled files each process would compile TensorFlow's and Keras's source: 10 s of CPU.
		timeout -k 2 60 python3 -m compileall -q -j 0 "$SITE/site" "$ROOT/src" >"$OUT/compile.txt" 2>&1
	fi
	set +u # it adds to variables that need not be set
	. "$SITE/env.sh"
}

case "${1:-}" in
part)
	mv "$2"/part-* "$PARTS"/ && ls "$PARTS"
	;;
test | bench)
	unpack
	# A time-out around the runner's own ones: its process tree ends with it.
	timeout -k 5 "${LIMIT:-590}" python3 "$HERE/run.py" "$1" --device "${DEVICE:-gpu}" --out "$OUT" --only "${ONLY:-}" --budget "${BUDGET:-0}" \
		>"$OUT/run.txt" 2>&1
	code=$?
	tail -80 "$OUT/run.txt"
	exit $code
	;;
step)
	unpack
	shift
	export PYTHONPATH="$ROOT/src:$PYTHONPATH"
	timeout -k 5 "${LIMIT:-90}" python3 "$HERE/resnet_step.py" "$ROOT/build/gpu/work/images" "${CROP:-224}" "${BATCH:-256}" "$@" \
		>>"$OUT/step.txt" 2>>"$OUT/step-errors.txt"
	code=$?
	tail -3 "$OUT/step.txt"
	exit $code
	;;
*)
	sed -n 2,11p "${BASH_SOURCE[0]}"
	exit 2
	;;
esac
