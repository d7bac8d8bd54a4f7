"""Test that flushed rows survive a power failure after any call of the file system, whatever is tidied after the flush."""

import pytest

from fbuf._host.memory import file_arena
from fbuf._host.store import row_updates
from tests.support import power
from tests.support.tables import by_tier


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(file_arena.FileArena, "small", 1024)
    monkeypatch.setattr(row_updates, "_LEAST", 512)


@pytest.mark.parametrize(
    "kind, seed", by_tier(("dictionaries", 6), more=[("raw", 15), ("chunks", 3), ("own", 15), ("noise", 6)])
)
def test_flushed_rows_survive_a_power_failure_after_any_call(kind, seed, tmp_path):
    cases, calls = power.check_prefixes(kind, seed, tmp_path, 60, prefixes=30)
    assert cases > 10 and calls.count(calls[0]) == 1


@pytest.mark.parametrize("kind, seed, removed", by_tier(("dictionaries", 6, "segment"), more=[("noise", 6, "open")]))
def test_removed_and_renamed_files_were_replaced_on_the_disk(kind, seed, removed, tmp_path):
    cases, calls = power.check_prefixes(kind, seed, tmp_path, 60)
    gone = {call[1] for call in calls if call[0] == "unlink"}
    assert cases > 10 and any(removed in name for name in gone)
    assert "changes" in {call[1] for call in calls if call[0] == "rename"}, "the log of row updates was not rewritten"
