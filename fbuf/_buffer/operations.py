"""One jitted dispatch per method of `Buffer`."""

from __future__ import annotations

from fbuf._buffer import convert as _convert
from fbuf._buffer import priorities, read, write
from fbuf._buffer.state import on_open
from fbuf._core.dispatch import Operation

extend = Operation(on_open(write._extend_core))
update_priority = Operation(on_open(priorities._update_priority_core))
update_rows = Operation(on_open(write._update_rows_core))
clear = Operation(on_open(write._clear_core))
set_numbers = Operation(on_open(write._set_core))
rebuild = Operation(on_open(write._rebuild_core))
sample = Operation(on_open(read._sample_core))
rows_at = Operation(on_open(read._rows_core))
get = Operation(on_open(read._get_core))
all_rows = Operation(on_open(read._all_rows_core))
last = Operation(on_open(read._last_core))
can_sample = Operation(on_open(read._can_sample_core))
stats = Operation(on_open(read._stats_core))
convert = Operation(on_open(_convert._convert_core))
