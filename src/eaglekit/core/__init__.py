"""Pure functions and frozen objects: trees, sampling, verification, counters."""
