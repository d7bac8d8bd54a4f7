"""Views of rows with `autoreset="same_step"`."""

import functools

from fbuf import views

Transition = functools.partial(views.Transition, autoreset="same_step")
Sequence = functools.partial(views.Sequence, autoreset="same_step")
Episode = functools.partial(views.Episode, autoreset="same_step")
