#!/usr/bin/env bash
# What only a real cluster shows: tries a target of `provider: kubernetes` with small jobs, and prints a table.
#
#   kubernetes-check.sh EXPERIMENT TARGET
#
# EXPERIMENT is a folder with stoker.yaml whose training takes at least five minutes on the target; TARGET is a name in
# targets.yaml. It needs stoker, kubectl (with the same context and namespace) and about half an hour. It submits jobs of
# two workers, deletes one of their pods, evicts one, and removes all jobs that it made. It changes nothing else.
set -u -o pipefail

experiment=${1:?folder of an experiment}
target=${2:?name of a target}
wait_s=${CHECK_WAIT_S:-900} # longest wait for one change
results=()
made=()

note() { # RESULT WHAT DETAIL
	results+=("$1|$2|$3")
	printf '%-8s %s: %s\n' "$1" "$2" "$3"
}

field() { # JOB NAME: a field of its state
	stoker jobs show "$1" --json 2> /dev/null | python3 -c 'import json, sys; print(json.load(sys.stdin)["state"][sys.argv[1]])' "$2"
}

wait_for() { # JOB PHASE...: until it is in one of these phases
	local job=$1 until_s=$((SECONDS + wait_s)) phase
	shift
	while [ "$SECONDS" -lt "$until_s" ]; do
		phase=$(field "$job" phase)
		for wanted in "$@"; do
			if [ "$phase" = "$wanted" ]; then return 0; fi
		done
		sleep 5
	done
	return 1
}

wait_for_restart() { # JOB BEFORE: until it has started again more than BEFORE times, and runs; it may be quick
	local job=$1 before=$2 until_s=$((SECONDS + wait_s)) now
	while [ "$SECONDS" -lt "$until_s" ]; do
		now=$(field "$job" restarts)
		if [ "${now:-0}" -gt "$before" ] && [ "$(field "$job" phase)" = running ]; then return 0; fi
		sleep 5
	done
	return 1
}

submit() { # NAME OPTION...: prints the job's ID
	local name=$1
	shift
	stoker submit "$experiment" --on "$target" --workers 2 --set "name=$name" --json "$@" |
		python3 -c 'import json, sys; print(json.load(sys.stdin)["job"])'
}

object() { # JOB: the name of its objects
	local id
	id=$(field "$1" scheduler_id)
	echo "${id#*/}"
}

pod() { # JOB: one of its running pods
	kubectl get pods --selector "stoker/job=$(object "$1")" --field-selector status.phase=Running --output name | tail -n 1
}

clean() {
	for job in "${made[@]}"; do stoker stop "$job" > /dev/null 2>&1; done
}
trap clean EXIT

# 1 The target's answers before anything is submitted.
if said=$(stoker submit "$experiment" --on "$target" --workers 2 --dry-run 2>&1); then
	note ok 'manifests' 'the cluster accepts them (server-side dry run)'
else
	note FAILED 'manifests' "$(tail -n 1 <<< "$said")"
fi

# 2 Two workers find each other by name, through the NetworkPolicy.
job=$(submit "check-a-$$") && made+=("$job")
if wait_for "$job" running; then
	kind=$(field "$job" scheduler_id)
	note ok 'start' "two workers run (${kind%%/*})"
else
	note FAILED 'start' "$(field "$job" reason)"
fi
until_s=$((SECONDS + wait_s))
until stoker logs "$job" 2> /dev/null | grep -q 'epoch\|step'; do
	[ "$SECONDS" -lt "$until_s" ] || break
	sleep 5
done
if stoker logs "$job" 2> /dev/null | grep -q 'epoch\|step'; then
	note ok 'names and network' 'the workers train together'
else
	note FAILED 'names and network' "no step within $wait_s s; see stoker logs $job"
fi

# 3 A pod that is killed: all start again from the last checkpoint, counted.
before=$(field "$job" restarts)
victim=$(pod "$job")
kubectl delete "$victim" --grace-period=0 --force > /dev/null 2>&1
if wait_for_restart "$job" "${before:-0}"; then
	note ok 'killed pod' "runs again; restarts: $(field "$job" restarts)"
else
	note FAILED 'killed pod' "$(field "$job" phase): $(field "$job" reason)"
fi

# 4 An eviction: the workers save within their grace, and start again, not counted.
before=$(field "$job" restarts)
victim=$(pod "$job")
name=${victim#pod/}
namespace=$(kubectl get "$victim" --output 'jsonpath={.metadata.namespace}')
if kubectl create --raw "/api/v1/namespaces/$namespace/pods/$name/eviction" -f - > /dev/null 2>&1 <<- END; then
	{"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "$name", "namespace": "$namespace"}}
END
	if wait_for_restart "$job" "${before:-0}"; then
		saved=$(stoker logs "$job" | grep -c 'exit code 75\|ended with 75\|saved')
		note ok 'eviction' "runs again; restarts: $(field "$job" restarts); lines about saves: $saved"
	else
		note FAILED 'eviction' "$(field "$job" phase): $(field "$job" reason)"
	fi
else
	note skipped 'eviction' 'you may not create pods/eviction'
fi

# 5 Kueue: a suspension must not use up max_restarts (jobset#1117).
# Not by its definition: only administrators may read those.
if kubectl get --raw /apis/kueue.x-k8s.io > /dev/null 2>&1 && kind=$(field "$job" scheduler_id) && [ "${kind%%/*}" = jobset ]; then
	before=$(kubectl get jobset "$(object "$job")" --output 'jsonpath={.status.restartsCountTowardsMax}')
	workload=$(kubectl get workloads --output name --selector "kueue.x-k8s.io/job-uid=$(kubectl get jobset "$(object "$job")" --output 'jsonpath={.metadata.uid}')")
	if [ -n "$workload" ] && kubectl patch "$workload" --type merge --patch '{"spec": {"active": false}}' > /dev/null 2>&1; then
		suspended=no
		if wait_for "$job" restarting waiting; then suspended=yes; fi
		kubectl patch "$workload" --type merge --patch '{"spec": {"active": true}}' > /dev/null
		if [ "$suspended" = no ]; then
			note FAILED 'suspension by Kueue' "the job was not suspended within $wait_s s"
		elif wait_for "$job" running; then
			after=$(kubectl get jobset "$(object "$job")" --output 'jsonpath={.status.restartsCountTowardsMax}')
			if [ "${before:-0}" = "${after:-0}" ]; then
				note ok 'suspension by Kueue' 'no restart was counted'
			else
				note FAILED 'suspension by Kueue' "counted restarts went from ${before:-0} to ${after:-0}"
			fi
		else
			note FAILED 'suspension by Kueue' "$(field "$job" phase): $(field "$job" reason)"
		fi
	else
		note skipped 'suspension by Kueue' 'the job has no workload, or you may not change it'
	fi
else
	note skipped 'suspension by Kueue' 'no Kueue, or the target is not a JobSet'
fi

# 6 An end by hand: the workers save, and all objects go.
name=$(object "$job")
stoker stop "$job" > /dev/null
left=$(kubectl get jobs,configmaps,services,networkpolicies,pods --selector "stoker/job=$name" --output name 2> /dev/null | wc -l)
if [ "$(field "$job" phase)" = stopped ] && [ "$left" -eq 0 ]; then
	note ok 'stop' 'all objects are gone'
else
	note FAILED 'stop' "$(field "$job" phase), $left objects left"
fi

echo
printf '%-8s | %-22s | %s\n' result what detail
printf '%s\n' '---------+------------------------+-------------------------------------'
failed=0
for line in "${results[@]}"; do
	IFS='|' read -r result what detail <<< "$line"
	printf '%-8s | %-22s | %s\n' "$result" "$what" "$detail"
	[ "$result" != FAILED ] || failed=1
done
exit "$failed"
