"""File formats: checkpoints and data sets. NumPy only."""
