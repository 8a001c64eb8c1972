"""Server-side vectors, as one worker calls them."""
