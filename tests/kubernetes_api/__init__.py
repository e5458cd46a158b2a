"""A Kubernetes API server of our own on 127.0.0.1, with controllers and pods that are processes of this machine.

No machine of the project can run a real one (no kube-apiserver, k3s or kind without downloads or Docker), so tests
of jobs on Kubernetes run the official client on this one. It is written after the documentation of Kubernetes and
the sources of JobSet, and strict: what a real server refuses or drops is refused here.

    storage      objects, revisions, conflicts, finalizers, graceful deletion; what changed since a revision, and 410
    server/      api (verbs, lists in pages, watches with bookmarks), http (the wire), access (tokens, RBAC, access
                 reviews), admission (defaults, rules of each kind, quotas), schemas (unknown fields 400, wrong ones
                 422), selectors, patches, faults (lost answers, 429, 500, streams that break off)
    controllers/ jobs (Indexed Job, pod failure policy, suspension, deadlines), job_sets (restarts by failure rules), tf_jobs (restarts by
                 exit code), kueue (quota, pending workloads, preemption), scheduler (nodes, preemption), garbage
    node/        kubelet (starts, ends and loses pods), containers (variables, volumes, users), pod_process (a pod's
                 namespaces: mounts with a private /etc/hosts and root, processes, host name), container_log
    cluster      all of it together, and what a test does to it

What it checks: that requests are ones that a server of this version takes, that a client survives every answer
named above, and that a job's processes do the right thing when pods start late, end, are evicted, preempted,
killed and started again.

What only a real cluster can show: the real Kueue, JobSet and TFJob controllers (those here are short versions);
CEL rules and webhooks beyond those in `admission`; server-side apply; real images, their
pulls and registries; cgroup limits (an out-of-memory kill is played); network policies, Services and DNS with its
delays (all pods share this machine's network, so ports must differ); storage drivers, `fsGroup` on them and
ReadWriteMany across machines; GPUs; API priority and fairness; TLS and client certificates; clocks that differ.
"""
