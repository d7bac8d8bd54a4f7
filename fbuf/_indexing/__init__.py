"""Which slots hold rows, and which of them can be sampled."""
