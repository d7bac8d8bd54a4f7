"""Rows of variable length."""
