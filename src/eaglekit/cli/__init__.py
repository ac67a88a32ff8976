"""The commands: one file for those with many options, the others in `main`."""
