"""Rows that `Replay.add` collects, and draws in NumPy from a state and these rows, bit for bit those of `Buffer.sample`.

`row_block` keeps rows until one call writes them. `draws` draws uniformly, `epoch` each row once, and `prioritized` by
priority, with the updates of `priority_update`; `deferred` is what these do later than asked, `choose` says which buffers have
such draws. `rings` and `anchors` know which rows are held and can be drawn; `reads` reads them.
"""
