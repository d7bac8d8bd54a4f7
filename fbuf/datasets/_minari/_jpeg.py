"""Images as Minari packs them: JPEG, one a step, where a space looks like images."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import numpy as np


def decoder(call: str, name: str) -> Any:
    """`PIL.Image`.

    Raises:
      ImportError: Pillow is missing.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            f"{call}: leaf '{name}' is packed as JPEG, and Pillow is missing ({error}). Run pip install \"fbuf[minari]\"."
        ) from None
    return Image


def decode(call: str, name: str, image: Any, packed: Iterable[Any], shape: tuple[int, ...]) -> np.ndarray:
    """uint8[n, *shape] from `n` files.

    Raises:
      ValueError: one is no JPEG, or of another size; looked at before it is unpacked.
    """
    out = []
    for data in packed:
        data = bytes(data)
        if data[:3] != b"\xff\xd8\xff":
            raise ValueError(f"{call}: leaf '{name}' is no JPEG ({data[:8]!r}); expected one a step. It is damaged.")
        try:
            with image.open(io.BytesIO(data), formats=("JPEG",)) as opened:
                size = (opened.height, opened.width, len(opened.getbands()))
                if size not in (shape, (*shape, 1)):
                    raise ValueError(
                        f"{call}: leaf '{name}' has an image of {list(size)}; expected {list(shape)}, as its space says."
                    )
                out.append(np.asarray(opened, np.uint8).reshape(shape))
        except OSError as error:
            raise ValueError(f"{call}: leaf '{name}' has a damaged image ({error}).") from None
    return np.stack(out) if out else np.zeros((0, *shape), np.uint8)
