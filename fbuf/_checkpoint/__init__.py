"""`fbuf.save` and `fbuf.load`: a buffer's state as a checkpoint folder, and back, on top of `fbuf._formats.checkpoint`.

Read `save` and `load` first. `device_arrays` cuts arrays into blocks, `async_save` copies and writes them in a thread,
`state_arrays` omits what can be recomputed, `config_json` and `row_schema` describe the buffer and its rows, `compatibility`
compares them, and `resize` moves a state to another capacity or storage.
"""
