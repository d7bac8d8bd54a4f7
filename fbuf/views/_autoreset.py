"""What row follows the end of an episode: how environments reset themselves, which a view of episodes must know."""

from __future__ import annotations

from fbuf._indexing.anchors import CUT, END, RESET


def check_autoreset(view: str, autoreset: str | None, ends: tuple[str, ...]) -> None:
    """Raise if the value is missing where rows end episodes."""
    if autoreset is None and ends:
        raise ValueError(
            f"{view}: autoreset is missing; rows end episodes ({', '.join(ends)}), and the view must know what row follows. "
            f'Write autoreset="next_step" for gymnasium.vector environments (their default mode), or '
            f'autoreset="same_step" for SAME_STEP mode and manual resets; JAX environments differ, see fbuf/ENVIRONMENTS.md.'
        )


def last_bit(autoreset: str | None) -> int:
    """Return the flags of the last row of an episode."""
    return RESET | CUT if autoreset == "next_step" else END
