"""Replay buffers of other libraries with fbuf's storages; each module needs the library that it is named after."""
