"""Base classes through which storages, samplers, views, writers and transforms meet."""
