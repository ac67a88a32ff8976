"""The decoding loop, and what ends it."""
