"""Data sets made from a user's arrays."""
