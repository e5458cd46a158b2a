# Of all starts, here in the job's folder:
#   exits/N/RANK  exit code of each worker of start N; exits/N/srun: of srun
#   run           path of the run that the workers make
#   failures      a line for each start that failed, at most max_restarts of them are followed by another start
#   outcome       exit code and reason, once the job is over
#   stop          there once `stoker stop` was called

# What Slurm calls this job. The plain number of an array's last task is that of the whole array.
number=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
number=${number:-$SLURM_JOB_ID}

say() { echo "stoker: $(date -u +%FT%TZ) $*"; }

# end CODE REASON: the job is over.
end() {
	is_current || leave
	printf '%s %s\n' "$1" "$2" > outcome.new && mv outcome.new outcome
	say "$2"
	exit "$1"
}

# What Slurm says of this job, "" if it has forgotten it; waits until the controller answers.
fact() {
	local answer
	until answer=$(scontrol show job --oneliner "$number" 2>&1); do
		if [[ $answer == *'Invalid job id'* ]]; then return; fi # it ended long ago
		sleep 5
	done
	[[ $answer =~ (^| )"$1"=([^ ]*) ]] && echo "${BASH_REMATCH[2]}"
}

# Whether this start of the job is still the one that counts. After a lost machine, a cancellation or a requeue by
# somebody else it is not, and must not decide anything any more.
is_current() {
	[ "$(fact JobState)" = RUNNING ] && [ "$(fact Restarts)" = "${SLURM_RESTART_COUNT:-0}" ]
}

# Slurm has decided already what becomes of the job.
leave() {
	say 'this start is over'
	exit 0
}

# Waits until Slurm ends it, at most $1 seconds. A script that ends by itself between the notice of a preemption and that moment
# counts as done: Slurm would not start it again. Once Slurm has decided, the end of the script frees the machines.
stay() {
	say 'waits for its end by Slurm'
	local until_s=$((SECONDS + $1))
	while [ "$SECONDS" -lt "$until_s" ]; do
		sleep 3 &
		wait $!
		is_current || leave
	done
}

# start_again WHY: ends this start, and puts the job into the queue again.
start_again() {
	is_current || leave
	say "$1: starts again"
	scontrol requeue "$number" || end 1 "$1, and Slurm refused to start it again"
	exit 0
}

# After the workers have saved because of a signal: who sent it? A cancellation, a requeue by somebody else and a time limit
# change the job's state before Slurm sends its first signal, and a preemption sets PreemptTime.
saved() {
	if [ -e stop ]; then
		scancel "$number"
		leave
	fi
	is_current || leave
	if [[ $(fact PreemptTime) == 2* ]]; then
		stay "$preempted_s" # and if it is not ended, it goes on
	fi
	start_again 'saved'
}

# The comment of the job, which the accounting keeps, also gets the ID of the run.
note_run() {
	local run
	if [ -s run ]; then
		run=$(< run)
		scontrol update "JobId=$number" "Comment=${comment%\}}, \"run\": \"${run##*/}\"}"
	fi
}

failed() {
	is_current || leave
	say "$1"
	printf 'start %s: %s\n' "$incarnation" "$1" >> failures || end 1 "$1, and its folder cannot be written: no restart"
	local times
	times=$(wc -l < failures)
	[ "$times" -le "$max_restarts" ] || end 1 "$1; $times starts failed, and max_restarts is $max_restarts"
	start_again "$1"
}

# A request to end the workers goes to the step that srun runs; srun itself takes TERM as "kill the workers". It is repeated,
# as srun loses one that comes before its workers run; a worker gets the first only.
late= deadline_s=0
tell() {
	say "got $1: the workers save"
	if [ -z "$received" ]; then
		deadline_s=$((SECONDS + save_s))
		(while sleep 3; do kill -ALRM $$ 2> /dev/null || break; done) &
	fi
	received=$1
	pass_on
}
pass_on() {
	if [ "$SECONDS" -ge "$deadline_s" ]; then late=yes; fi
	if [ -s "$exits/srun.pid" ]; then kill -USR1 "$(cat "$exits/srun.pid")" 2> /dev/null; fi
}

#@ environment, modules and setup of the target

if [ -e outcome ] && read -r code why < outcome && [ "$code" = 0 ]; then exit 0; fi # a second submission
if [ -e stop ]; then saved; fi # its signal may have come before the first line
for name in "${secrets[@]}"; do
	[ -n "${!name+set}" ] || end 2 "secret $name is not in the job's environment; set it where the job is submitted, or in the target's setup"
done

incarnation=$("${starter[@]}" "$python" -m stoker job-start "$place")
code=$?
if [ "$code" = 2 ]; then end 2 'the job cannot start; see logs/slurm.log'; fi
if [ "$code" != 0 ]; then failed "stoker job-start ended with exit code $code"; fi
say "start $incarnation on $SLURM_JOB_NODELIST"
exits=exits/$incarnation
mkdir -p "$exits"

trap 'pass_on' ALRM
for signal in URG USR1 TERM; do trap "tell $signal" "$signal"; done
if [ -n "$received" ]; then say "got $received before the workers began" && saved; fi

# What the workers print is in logs/task-RANK.log, which is bounded; here is what they print on stderr before that is open.
# In a process group of its own, as Slurm sends TERM to that of the script.
(
	trap '' USR1 TERM
	set -m
	srun --export=ALL --input=none --output=none --error=all --label --mpi=none --kill-on-bad-exit=1 --wait=0 "${step[@]}" \
		"${launcher[@]}" "$python" -m stoker.jobs.providers.slurm.worker "$place/$exits" \
		"$python" -m stoker job-task "$place" --incarnation "$incarnation" &
	echo $! > "$exits/srun.pid"
	wait $!
	echo $? > "$exits/srun"
) &
supervised=$!
while kill -0 "$supervised" 2> /dev/null && [ -z "$late" ]; do wait "$supervised"; done
note_run
if [ -n "$late" ]; then say "the workers have not saved within $save_s s"; saved; fi

saved=0 reason=
for ((rank = 0; rank < workers; rank++)); do
	code=$(cat "$exits/$rank" 2> /dev/null)
	case $code in
		0) ;;
		2 | 3) end "$code" "worker $rank ended with exit code $code, which a restart would repeat; see logs/task-$rank.log" ;;
		75) saved=1 ;;
		76) leave ;; # a later start has begun
		'') reason=${reason:-worker $rank was killed} ;;
		137) reason=${reason:-worker $rank was killed} ;; # most often because another one failed
		*) [[ $reason == *'exit code'* ]] || reason="worker $rank ended with exit code $code" ;;
	esac
done
code=$(cat "$exits/srun" 2> /dev/null)
if [ "$code" = 0 ] && [ "$saved" = 0 ] && [ -z "$reason" ]; then end 0 'done'; fi
if [ -n "$received" ] || { [ "$saved" = 1 ] && [ -z "$reason" ]; }; then saved; fi
failed "${reason:-srun ended with exit code ${code:-unknown}}"
