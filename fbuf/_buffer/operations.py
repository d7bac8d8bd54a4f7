"""One jitted dispatch per method of `Buffer`."""

from __future__ import annotations

from fbuf._buffer import convert as _convert
from fbuf._buffer import priorities, read, write
from fbuf._core.dispatch import Operation

extend = Operation(write._extend_core)
update_priority = Operation(priorities._update_priority_core)
update_rows = Operation(write._update_rows_core)
clear = Operation(write._clear_core)
set_numbers = Operation(write._set_core)
rebuild = Operation(write._rebuild_core)
sample = Operation(read._sample_core)
all_anchors = Operation(read._all_anchors_core)
sample_at = Operation(read._sample_at_core)
rows_at = Operation(read._rows_core)
get = Operation(read._get_core)
all_rows = Operation(read._all_rows_core)
last = Operation(read._last_core)
can_sample = Operation(read._can_sample_core)
can_add = Operation(read._can_add_core)
stats = Operation(read._stats_core)
convert = Operation(_convert._convert_core)
