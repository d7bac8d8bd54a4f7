"""Algorithms on arrays: permutations, sum trees, draws, deduplicated blocks. Each is a pure function of JAX arrays."""
