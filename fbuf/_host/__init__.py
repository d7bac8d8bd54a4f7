"""The host side-store: the only part of fbuf that knows callbacks, threads and zstd.

`store` keeps rows behind numbers (tickets), in numpy alone: as they are (`ring`) or compressed (`chunks`, by a `codec`, in an
`arena`), by one Protocol (`part`), with changed rows beside them (`patches`); `plan` fetches rows; `checkpoint` makes arrays of
a store and back. `owner` decides how long a store lives; `callback` is how jitted code reaches it.
"""


class OnHost:
    """What the pytree nodes are that name rows or priorities of a store: told from arrays without importing the store."""

    __slots__ = ()
