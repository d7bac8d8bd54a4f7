"""What a drawn anchor means; `fbuf.parts.View` says what a view is."""

from fbuf.views._episode import Episode
from fbuf.views._hindsight import Hindsight
from fbuf.views._row import Row
from fbuf.views._sequence import Sequence
from fbuf.views._transition import Transition

__all__ = ["Episode", "Hindsight", "Row", "Sequence", "Transition"]
