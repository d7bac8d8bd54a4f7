"""Data sets that others made, as frozen buffers: the same verbs, views and samplers."""
