"""`fbuf.save` and `fbuf.load`: a buffer's state as a checkpoint folder, and back, on top of `fbuf._formats.checkpoint`.

`_save` and `_load` are the two ways; `_leaves` cuts arrays into blocks and makes them again, `_fingerprint` marks blocks,
`_held` copies what changed, `_saving` writes it in a thread; `_parts` leaves out of a state what can be worked out,
`_describe` and `_spec` put the buffer and its rows into the manifest, `_match` compares them, `_room` looks whether they fit,
`_move` and `_places` make the state of another capacity or storage.
"""
