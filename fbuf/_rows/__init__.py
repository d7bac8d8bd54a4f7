"""Rows leaf by leaf and block by block: of a source in order of time, and of a state."""
