"""Which rows can be sampled, and the slots of writers that replace any row."""
