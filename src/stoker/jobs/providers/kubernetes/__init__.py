"""Jobs on Kubernetes: settings, manifests, the API and its errors, and the program in a pod."""
