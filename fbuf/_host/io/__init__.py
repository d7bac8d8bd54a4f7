"""Files, directories and locks."""
