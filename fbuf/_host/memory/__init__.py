"""Arenas: memory that a store grows, frees and saves."""
