"""Jobs on Kubernetes: settings, manifests, the API, what it answers, and what runs in a pod."""
