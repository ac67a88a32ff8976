"""What the target makes of that text: read on the fly, or kept on disk."""
