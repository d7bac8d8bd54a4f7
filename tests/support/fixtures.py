"""Fixtures that are one of some values: another tier takes a test, and gives it others."""

from typing import Any

import pytest


def fixed(*values: Any) -> Any:
    return pytest.fixture(params=values, ids=str)(lambda request: request.param)
