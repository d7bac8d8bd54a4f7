"""Scopes change nothing else in a program."""

from __future__ import annotations

import contextlib

import jax
import pytest

from fbuf._buffer import operations
from tests.contracts.test_scopes import lowered, make


def test_scopes_change_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with_scopes = lowered(make())
    jax.clear_caches()  # else the second would find the traces of the first
    monkeypatch.setattr(jax, "named_scope", lambda name: _Nothing())
    for verb in (
        operations.extend,
        operations.sample,
        operations.update_priority,
        operations.update_rows,
        operations.stats,
    ):
        monkeypatch.setattr(verb, "core", verb.core.__wrapped__)
    without = lowered(make())
    jax.clear_caches()
    assert "fbuf.sample" not in without.as_text(debug_info=True)
    assert with_scopes.as_text() == without.as_text()


class _Nothing(contextlib.ContextDecorator):
    """Not a scope."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...
