"""Columns of a host store: raw, chunked and compressed, in memory or in a file."""
