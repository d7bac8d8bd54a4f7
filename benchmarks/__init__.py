"""One script a question, each a ratio against a named peer: `python -m benchmarks --help`."""
