"""Priorities of flashbax's other buffers."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("flashbax")

from tests.more.interop.test_flashbax import test_priorities_are_those_of_flashbax  # noqa: E402, F401


@pytest.fixture(params=[("flat", 6), ("item", 19)], ids=str)
def buffer_kind(request: pytest.FixtureRequest) -> Any:
    return request.param
