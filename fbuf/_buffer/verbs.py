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
from fbuf._core.dispatch import Verb

extend = Verb(_extend_core)


sample = Verb(_sample_core)


update_priority = Verb(_update_priority_core)


update_rows = Verb(_update_rows_core)


rows_at = Verb(_rows_core)


get = Verb(_get_core)


all_rows = Verb(_all_rows_core)


last = Verb(_last_core)


clear = Verb(_clear_core)


set_numbers = Verb(_set_core)


rebuild = Verb(_rebuild_core)


convert = Verb(_convert_core)


can_sample = Verb(_can_sample_core)


stats = Verb(_stats_core)
