"""Frames in leaves: which leaves look like frames, frames as images, images as PNG files. NumPy and zlib only."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np


def is_frames(shape: tuple[int, ...]) -> bool:
    """Return whether the item of a leaf is a frame `[H, W]`, `[H, W, 1 or 3]`, or a stack `[S, H, W, ...]` or `[H, W, 4]`."""
    if len(shape) == 4:
        return shape[3] in (1, 3) and min(shape[1:3]) >= 4
    if len(shape) == 3:
        return min(shape[:2] if shape[2] in (1, 3, 4) else shape[1:]) >= 4
    return len(shape) == 2 and min(shape) >= 4


def is_picture(shape: tuple[int, ...], dtype: object) -> bool:
    """Return whether to show it as frames unasked: they are uint8, or too large for a matrix of numbers."""
    if not is_frames(shape):
        return False
    height, width = shape[1:3] if len(shape) == 4 or (len(shape) == 3 and shape[2] not in (1, 3, 4)) else shape[:2]
    return dtype == np.uint8 or min(height, width) >= 12


def as_stacks(rows: np.ndarray) -> np.ndarray:
    """Return rows `[B, ...]` as stacks of frames `[B, S, H, W, 1 or 3]`."""
    item = rows.shape[1:]
    if len(item) == 2:
        return rows[:, None, :, :, None]
    if len(item) == 3 and item[2] in (1, 3):
        return rows[:, None]
    if len(item) == 3:
        return (np.moveaxis(rows, 3, 1) if item[2] == 4 else rows)[..., None]
    return rows


def to_images(rows: np.ndarray) -> np.ndarray:
    """Return float[B, S, H, W, 3] in [0, 1] of rows `[B, ...]`: uint8 from 0 to 255, others from least to largest."""
    whole = as_stacks(rows).astype(np.float64)
    if rows.dtype == np.uint8:
        whole = whole / 255
    elif rows.dtype != bool:
        finite = whole[np.isfinite(whole)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        whole = np.nan_to_num((whole - low) / (high - low if high > low else 1.0), nan=0.0, posinf=1.0, neginf=0.0)
    return np.broadcast_to(whole, (*whole.shape[:-1], 3))


def shrunk(images: np.ndarray, size: int) -> np.ndarray:
    """Return images `[..., H, W, C]` whose longer side is at most `size` pixels: means of whole pixels."""
    height, width, channels = images.shape[-3:]
    times = -(-max(height, width) // size)
    if times <= 1:
        return images
    height, width = max(height // times, 1), max(width // times, 1)
    cut = images[..., : height * times, : width * times, :]
    tiles = cut.reshape(
        *images.shape[:-3], height, min(times, cut.shape[-3]), width, min(times, cut.shape[-2]), channels
    )
    return tiles.mean(axis=(-4, -2))


def png(image: np.ndarray) -> bytes:
    """Return the PNG file of an image float[H, W, 3] in [0, 1]; grey if its channels are equal."""
    pixels = (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8)
    grey = bool((pixels == pixels[..., :1]).all())
    pixels = pixels[..., 0] if grey else pixels
    height, width = pixels.shape[:2]
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0 if grey else 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def data_uri(file: bytes) -> str:
    """Return a PNG as the address of itself, for HTML without other files."""
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"
