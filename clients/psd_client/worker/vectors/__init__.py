"""One worker's calls for server-side vectors."""
