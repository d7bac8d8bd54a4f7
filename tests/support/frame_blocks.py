"""Frames cut into blocks by hand, as bytes."""

import numpy as np


def frames_of(row):
    """Bytes `[frames, height, bytes of a line]` of one row of a leaf."""
    shape = row.shape
    if str(row.dtype).endswith(("int2", "int4")):
        row = row.astype(np.int8)  # as they are moved: a byte each, with its sign
    if row.ndim < 2:
        frames = row.reshape(1, 1, -1)
    elif row.ndim == 2:
        frames = row[None]
    elif shape[-1] == 4 and shape[-2] > 4 and shape[-3] > 4:  # frames stacked along the last axis
        frames = np.stack([lead[..., i] for lead in row.reshape(-1, *shape[-3:]) for i in range(4)])
    elif shape[-1] in (1, 2, 3):  # colours
        frames = row.reshape(-1, *shape[-3:])
    else:
        frames = row.reshape(-1, *shape[-2:])
    lines = np.ascontiguousarray(frames).reshape(*frames.shape[:2], -1)
    return lines.view(np.uint8).reshape(*frames.shape[:2], -1)


def cut_by_hand(rows, high, wide):
    """Blocks of `high` lines and `wide` bytes of each row, in order, padded with zeros."""
    out = []
    for row in rows:
        blocks = []
        for frame in frames_of(row):
            height, line = frame.shape
            down, across = -(-height // high), -(-line // wide)
            whole = np.zeros((down * high, across * wide), np.uint8)
            whole[:height, :line] = frame
            for i in range(down):
                for j in range(across):
                    blocks.append(whole[i * high : (i + 1) * high, j * wide : (j + 1) * wide].tobytes())
        out.append(blocks)
    return out
