"""Shared code of the tests of torch: memory of arrays and tensors, and programs of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import jax
import numpy as np
import torch

from tests.support.paths import ROOT

NARROW = (
    "bool uint8 int8 uint16 int16 uint32 int32 float16 bfloat16 float32 complex64 float8_e4m3fn float8_e4m3fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
).split()
WIDE = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}
"""Dtypes that JAX has with `jax_enable_x64` only, and what it narrows them to."""


def pointer(x: Any) -> int:
    if isinstance(x, jax.Array):
        return x.unsafe_buffer_pointer()
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()


def payload(x: Any) -> bytes:
    """The bytes of an array or a tensor, without either library's help in converting."""
    if isinstance(x, torch.Tensor):
        x = x.contiguous()
        return bytes(x.reshape(-1).view(torch.uint8).numpy()) if x.numel() else b""
    return np.ascontiguousarray(x).tobytes()


def run_program(code: str, *, devices: int = 1, options: tuple[str, ...] = ()) -> list[str]:
    """What a process prints, by line; it must end well."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout.splitlines()
