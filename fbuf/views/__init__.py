"""Assemble batches from the rows around a drawn anchor; `fbuf.parts.View` is the interface."""

from fbuf.views._hindsight import Hindsight
from fbuf.views._row import Row
from fbuf.views._sequence import Episode, Sequence
from fbuf.views._transition import Transition

__all__ = ["Episode", "Hindsight", "Row", "Sequence", "Transition"]
