"""Replay buffers of other libraries on fbuf's storages. A module imports its library only where it needs it."""
