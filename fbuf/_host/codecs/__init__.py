"""Encoders of single columns: zstd, bit packing."""
