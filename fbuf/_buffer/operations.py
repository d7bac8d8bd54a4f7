"""One jitted dispatch per method of `Buffer`."""

from __future__ import annotations

from fbuf._buffer.convert import _convert_core
from fbuf._buffer.read import (
    _all_rows_core,
    _can_sample_core,
    _get_core,
    _last_core,
    _rows_core,
    _sample_core,
    _stats_core,
)
from fbuf._buffer.write import (
    _clear_core,
    _extend_core,
    _rebuild_core,
    _set_core,
    _update_priority_core,
    _update_rows_core,
)
from fbuf._core.dispatch import Operation

extend = Operation(_extend_core)


sample = Operation(_sample_core)


update_priority = Operation(_update_priority_core)


update_rows = Operation(_update_rows_core)


rows_at = Operation(_rows_core)


get = Operation(_get_core)


all_rows = Operation(_all_rows_core)


last = Operation(_last_core)


clear = Operation(_clear_core)


set_numbers = Operation(_set_core)


rebuild = Operation(_rebuild_core)


convert = Operation(_convert_core)


can_sample = Operation(_can_sample_core)


stats = Operation(_stats_core)
