"""psd-run --on kubernetes: manifests, secrets, and kubectl. Must not know processes."""
