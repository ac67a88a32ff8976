"""One file per speculative method."""
