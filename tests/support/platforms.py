"""Trace for the CPU what is lowered for another platform."""

import contextlib
from unittest import mock

from fbuf._core import control_flow


def _gpu(*args, cpu=None, gpu=None, default):
    return (gpu or default)(*args)


def _tpu(*args, cpu=None, gpu=None, default):
    return default(*args)


def as_on_tpus() -> contextlib.AbstractContextManager[object]:
    """Trace the code of TPUs."""
    return mock.patch.object(control_flow, "platform_dependent", _tpu)


def as_on_gpus() -> contextlib.AbstractContextManager[object]:
    """Trace the code of GPUs."""
    return mock.patch.object(control_flow, "platform_dependent", _gpu)
