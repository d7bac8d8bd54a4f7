"""Divide one buffer among several members: whether its parts allow it, and the buffer of one member.

Errors end with what the caller can do: `alone` is the argument by which one member holds everything, such as "shards=1";
where there is none, the part is to be left out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fbuf._algorithms.block_stats import UNIT
from fbuf._buffer.buffer import Buffer
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.view import AnchorRule
from fbuf.storages import Deduplicated
from fbuf.transforms import Chain


def check_multiple(call: str, name: str, value: int, members: int, of: str = "") -> None:
    """Raise unless the number can be divided among the members; `of` says of what they are the shards."""
    rest = value % members
    if rest:
        low = value - rest
        near = f"{low} or {low + members}" if low else f"{members}"
        raise ValueError(f"{call}: {name} is {value}, not a multiple of the {members} shards{of}. Use {near}.")


def check_split(
    call: str, buffer: Buffer, members: int, alone: str = "", merged: tuple[type, ...] = (), may_cover: bool = False
) -> None:
    """Raise for parts that need all rows, or their order, in one place.

    Args:
      call: The facade, for errors.
      buffer: The whole.
      members: D, two or more.
      alone: The argument for one member; see above.
      merged: Transforms whose memory the members merge.
      may_cover: Whether the members take part in one epoch of a sampler that draws every anchor.
    """
    leave = f"Use {alone}." if alone else "Leave it out."
    if not buffer.writer.streams:
        raise TypeError(f"{call}: {buffer.writer!r} needs all rows in one place; expected writers.Ring(). {leave}")
    _check_sampler(call, buffer.sampler, leave, f", or {alone}" if alone else "", may_cover)
    if buffer.lanes is None and (buffer.view.rule != AnchorRule() or buffer.sampler.by_episode):
        reader = buffer.sampler if buffer.sampler.by_episode else buffer.view
        raise ValueError(
            f"{call}: {reader!r} reads neighbouring rows, but without lanes those are on several shards. Use "
            f"lanes={members}, or another multiple of {members}."
        )
    for role, stages in (("on_write", buffer.on_write), ("on_read", buffer.on_read)):
        for name in _of_one_member(stages, merged):
            known = " or ".join(kind.__name__ for kind in merged)
            fix = f"Use transforms.{known}, or apply it in your step." if merged else leave
            raise TypeError(f"{call}: stage '{name}' of {role} would keep statistics of one shard. {fix}")


def _check_sampler(call: str, sampler: Sampler, leave: str, or_alone: str, may_cover: bool) -> None:
    use = f"Use samplers.Prioritized(){or_alone}."
    if "expected" in sampler.whole:  # a setting
        raise ValueError(f"{call}: {sampler!r} {sampler.whole}. {leave}")
    if sampler.whole:
        raise TypeError(f"{call}: {sampler!r} {sampler.whole}. {use}")
    if not may_cover:
        check_draw_mode(call, sampler, f"which several shards cannot do. {use}")
    elif sampler.once and sampler.normalize == "buffer":
        raise ValueError(f"{call}: {sampler!r} cannot bound its weights; expected another normalize. Use 'batch'.")


def check_draw_mode(call: str, sampler: Sampler, fix: str) -> None:
    """Raise for samplers whose draws depend on one another."""
    if sampler.once:
        raise ValueError(f"{call}: {sampler!r} draws without replacement, {fix}")


def _of_one_member(stages: Chain | None, merged: tuple[type, ...]) -> list[str]:
    """Return the stages with a memory that is not merged over members."""
    found: list[str] = []
    if stages is None:
        return found
    for name in stages.remembers:
        stage = stages[name]
        if isinstance(stage, Chain):
            found += _of_one_member(stage, merged)
        elif not isinstance(stage, merged):
            found.append(name)
    return found


def member_of(buffer: Buffer, members: int) -> Buffer:
    """Return the buffer of one member: 1 / D of the slots, of the lanes, and of the blocks of `Deduplicated`."""
    storage = buffer.storage
    if isinstance(storage, Deduplicated) and storage.blocks is not None:
        storage = dataclasses.replace(storage, blocks=_split_blocks(storage.blocks, members))
    lanes = None if buffer.lanes is None else buffer.lanes // members
    return dataclasses.replace(
        buffer, capacity=buffer.capacity // members, lanes=lanes, batch_size=None, storage=storage
    )


def _split_blocks(blocks: Any, members: int) -> Any:
    """Return the entries of one member's table, as a table may have them."""

    def one(number: int) -> int:
        return max(-(-number // (UNIT * members)), 2) * UNIT

    return (
        one(blocks) if isinstance(blocks, int) else tuple((name, one(number)) for name, number in dict(blocks).items())
    )
