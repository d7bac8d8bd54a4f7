"""Rows and priorities on the host, in numpy alone: nothing here imports JAX.

`store` keeps rows behind tickets, `ragged` rows of any shape, `priorities` a tree of them. A store's `columns` hold rows as
they are or in chunks encoded by `codecs`; their bytes are in `memory` or in files (`io`). `fbuf._bridge` connects jitted code.
"""
