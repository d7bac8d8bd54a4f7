"""The host side-store: the only part of fbuf that knows callbacks, threads and zstd.

`store` keeps rows behind numbers (tickets), in numpy alone; `codec` and `arena` compress them; `owner` decides how long a
store lives; `callback` is how jitted code reaches it.
"""
