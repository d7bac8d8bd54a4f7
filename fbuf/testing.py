"""`assert_inplace`: proof that a jitted step updates a donated buffer in place.

That a result lies where its input lay proves nothing (XLA may copy out and back); the temporary bytes of the compiled
program do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fbuf._core.pytree import tree_bytes

__all__ = ["Memory", "assert_inplace", "measure"]


def __dir__() -> list[str]:
    return __all__  # what is imported here is no part of it


class Memory(NamedTuple):
    """What one compiled call needs besides the donated buffer, in bytes."""

    temporary: int  # scratch memory of the program
    given: int  # arguments that are not donated
    made: int  # results that do not reuse a donated argument
    reused: int  # bytes of donated arguments that results reuse
    bound: int  # `temporary` may be no more


def measure(fn: Callable[..., Any], *args: Any, donate: int | tuple[int, ...] = 0) -> Memory:
    """Compiles `jax.jit(fn, donate_argnums=donate)` for `args` (arrays or shapes) and reads its memory analysis."""
    donated = (donate,) if isinstance(donate, int) else donate
    compiled = jax.jit(fn, donate_argnums=donated).lower(*args).compile()
    analysis: Any = compiled.memory_analysis()
    given = sum(tree_bytes(a) for i, a in enumerate(args) if i not in donated)
    made = int(analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
    reused = int(analysis.alias_size_in_bytes)
    return Memory(int(analysis.temp_size_in_bytes), given, made, reused, 3 * (given + made) + 64 * 1024)


def assert_inplace(
    fn: Callable[..., Any], *args: Any, donate: int | tuple[int, ...] = 0, bound: int | None = None
) -> Memory:
    """Fails if `fn` copies what it is donated.

    Args:
      fn: A step `(state, ...) -> ...` that returns the new state among its results.
      *args: Its arguments, or `jax.ShapeDtypeStruct`s of them; nothing runs.
      donate: Positions of the donated arguments.
      bound: Most temporary bytes allowed; default three times the other arguments and results, and 64 KiB. A step with a
        network in it needs more: give what it takes without the buffer.
    Returns:
      The figures.
    Raises:
      AssertionError: there are more temporary bytes, or a donated array was not reused.

    Example:
      >>> import fbuf, fbuf.testing, jax, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(capacity=100_000)
      >>> state = buffer.init(jnp.zeros(8))
      >>> fbuf.testing.assert_inplace(buffer.extend, state, jnp.ones((32, 8))).temporary < 10_000
      True
    """
    memory = measure(fn, *args, donate=donate)
    donated = (donate,) if isinstance(donate, int) else donate
    buffer_bytes = sum(tree_bytes(args[i]) for i in donated)
    if buffer_bytes - memory.reused > 64 * 1024:
        raise AssertionError(
            f"assert_inplace: {buffer_bytes - memory.reused} of the {buffer_bytes} donated bytes are not reused. Return "
            f"the new state, every leaf of the shape and dtype it came with."
        )
    most = memory.bound if bound is None else bound
    if memory.temporary > most:
        raise AssertionError(
            f"assert_inplace: the step needs {memory.temporary} temporary bytes; expected at most {most}. It copies part "
            f"of the {buffer_bytes} bytes it is donated. Usual causes: the state `sample` returned was dropped; `peek`, "
            f"`get` or `rows` before a write; a state chosen with jnp.where instead of lax.cond or mask=."
        )
    return memory
