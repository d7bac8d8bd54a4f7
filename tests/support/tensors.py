"""Dtypes that torch and JAX share, and the memory of arrays and tensors."""

import jax
import numpy as np
import torch

NARROW = (
    "bool uint8 int8 uint16 int16 uint32 int32 float16 bfloat16 float32 complex64 float8_e4m3fn float8_e4m3fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
).split()
WIDE = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}
"""Dtypes that JAX has with `jax_enable_x64` only, and what it narrows them to."""


def pointer(x):
    if isinstance(x, jax.Array):
        return x.unsafe_buffer_pointer()
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()


def payload(x):
    """The bytes of an array or a tensor, without either library's help in converting."""
    if isinstance(x, torch.Tensor):
        x = x.contiguous()
        return bytes(x.reshape(-1).view(torch.uint8).numpy()) if x.numel() else b""
    return np.ascontiguousarray(x).tobytes()
