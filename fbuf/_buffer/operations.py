"""One jitted dispatch per method of `Buffer`, of checked arguments."""

from __future__ import annotations

from fbuf._buffer import convert as _convert
from fbuf._buffer import priorities, read, write
from fbuf._buffer.state import on_open
from fbuf._core.dispatch import Operation

extend = Operation(on_open(write._extend_core))
update_priority = Operation(on_open(priorities._update_priority_core))
update_rows = Operation(on_open(write._update_rows_core))
cut = Operation(on_open(write._cut_core))
clear = Operation(on_open(write._clear_core))
set_numbers = Operation(on_open(write._set_core))
rebuild = Operation(on_open(write._rebuild_core))
sample = Operation(on_open(read._sample_core))
all_anchors = Operation(on_open(read._all_anchors_core))
sample_at = Operation(on_open(read._sample_at_core))
rows_at = Operation(on_open(read._rows_core))
get = Operation(on_open(read._get_core))
window_index = Operation(on_open(read._window_index_core))
read_priorities = Operation(on_open(priorities._priorities_core))
all_rows = Operation(on_open(read._all_rows_core))
last = Operation(on_open(read._last_core))
size = Operation(on_open(read._size_core))
can_sample = Operation(on_open(read._can_sample_core))
can_add = Operation(on_open(read._can_add_core))
stats = Operation(on_open(read._stats_core))
convert = Operation(on_open(_convert._convert_core))
