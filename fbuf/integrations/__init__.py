"""fbuf's storages in other libraries' programs."""
