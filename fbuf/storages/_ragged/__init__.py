"""`Ragged`: rows of variable length, parsed eagerly or while tracing."""
