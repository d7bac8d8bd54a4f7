"""Sample from several buffers: a frozen value over a `MixtureState`, as `Buffer` is over a `BufferState`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

import jax
import jax.numpy as jnp

from fbuf._buffer import checks as _buffer_checks
from fbuf._buffer import operations
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.checks import refuse_donated
from fbuf._buffer.mixture import checks, draw
from fbuf._buffer.mixture.checks import check_same_leaves
from fbuf._buffer.mixture.state import COUNTERS, MixtureConfig, MixtureState
from fbuf._buffer.state import BufferState
from fbuf._core.component import HidesInternals, component, public_names
from fbuf._core.dispatch import Operation
from fbuf._core.pytree import PyTree, tree_bytes
from fbuf._core.sample import Index, Sample
from fbuf._members import quota

if TYPE_CHECKING:
    from fbuf._buffer.plan import Plan, PlanSettings
    from fbuf._buffer.summary import Summary

Sizes = int | Mapping[str, int]
Shares = Mapping[str, Any] | None


@component
class Mixture(MixtureConfig, metaclass=HidesInternals):
    r"""Sample from several buffers of any capacity, storage, sampler and view as one.

    Attributes:
      buffers: By name: `{"online": buffer, "offline": other}`, in the order of `source`. Their batches must have equal
        leaves, shapes and dtypes; their rows need not.
      fractions: Share of the batch of each buffer, by name, with sum 1. None: equal.
      quota: How fractions f become B rows. "exact": f B rows of each, rounded by largest remainder, in order of the
        buffers. "random": a buffer is drawn for each row with probability f. "all": the rows of `sample(state, key,
        {"online": 64, "offline": 192})`.
      target: What `weight` corrects. "union": unequal probabilities over the rows of all buffers. "source": unequal
        probabilities within each buffer; the fractions are intended.
      beta: Exponent of the weights; `sample(..., beta=...)` overrides it for one call, `set(state, beta=...)` for all.
      normalize: Divide weights by the largest in the "batch", or not at all (None).
      if_empty: Rows of a buffer without drawable anchors: "share", they are drawn from the others by their fractions (never
        with fraction 0) and counted as `moved_rows`; "mask", they are masked. With "all": masked.
      annealed: Store the fractions in the state, so that `set(state, fractions=...)` changes them without recompilation.

    With share :math:`g_s` of a batch from buffer s (its rows over B; with "random" the probability of the source),
    :math:`n_s` anchors and :math:`P_s(i)` the probability of anchor i in a draw of its sampler, `probability` is
    :math:`q(i) = g_s P_s(i)`. `weight` is :math:`(N q(i))^{-\beta}` with :math:`N = \sum_s n_s` over the sampled buffers
    (target "union"), or :math:`(n_s P_s(i))^{-\beta}` (target "source"). The weights and `beta` of the samplers are not used.

    Fractions may be traced: `sample(state, key, 256, fractions={"offline": schedule(step)})` changes the quotas without
    recompilation; other buffers share the rest by their fractions. Each buffer then draws up to B anchors and reads only
    the returned rows; samplers with memory (`Epoch`, `Consume`) lose none. Host storages do no extra work; device reads
    take memory for B rows of each buffer.

    Cost: with constant exact quotas that of `sample` of each buffer for its quota; else the draws of S batches of B anchors.

    Example (offline to online, with an annealed fraction):
      >>> import fbuf, jax, jax.numpy as jnp
      >>> mixture = fbuf.Mixture(
      ...     {"online": fbuf.prioritized(1000), "offline": fbuf.uniform(5000)},
      ...     fractions={"online": 0.25, "offline": 0.75},
      ... )
      >>> row = {"obs": jnp.zeros(3), "reward": 0.0}
      >>> state = mixture.init({"online": row, "offline": row})
      >>> recorded = {"obs": jnp.ones((50, 3)), "reward": jnp.ones(50)}
      >>> state = mixture.extend(state, "offline", recorded)

      >>> def step(state, step, key):
      ...     state = mixture.add(state, "online", row)
      ...     offline = jnp.maximum(0.0, 1 - step / 4)
      ...     state, batch = mixture.sample(state, key, 8, fractions={"offline": offline})
      ...     td_error = batch.data["reward"] + 0.1  # of your network
      ...     state = mixture.update_priority(state, batch.index, td_error)
      ...     return state, batch.index.source
      >>> step = jax.jit(step, donate_argnums=0)
      >>> for i in range(5):
      ...     state, source = step(state, i, jax.random.key(i))
      ...     print(source)
      [1 1 1 1 1 1 1 1]
      [0 0 1 1 1 1 1 1]
      [0 0 0 0 1 1 1 1]
      [0 0 0 0 0 0 1 1]
      [0 0 0 0 0 0 0 0]
    """

    _internal = frozenset({"check_same_batches", "check_state", "first_fractions", "shares"})

    __dir__ = public_names

    def __getattr__(self, name: str) -> Any:
        """Raise an error that names the buffer method to use."""
        fix = ""
        if name in _OF_BUFFERS and "buffers" in self.__dict__:
            one = repr(self.names[0])
            args = f"({_OF_BUFFERS[name].format(one)})" if _OF_BUFFERS[name] else ""
            fix = f"; its buffers have. Write mixture[{one}].{name}{args}."
        raise AttributeError(f"'Mixture' object has no attribute {name!r}{fix}", name=name, obj=self)

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffers", checks.checked_buffers(self.buffers))
        if self.fractions is not None:
            object.__setattr__(self, "fractions", checks.checked_fractions(self.fractions, self.names))
        if not isinstance(self.annealed, bool):
            raise TypeError(f"Mixture: annealed is {self.annealed!r}; expected a bool. Write annealed=True.")
        if self.quota == "all" and (self.fractions is not None or self.annealed):
            raise ValueError('Mixture: quota is "all"; expected fractions=None and annealed=False.')
        _buffer_checks.check_number("Mixture", "beta", self.beta)
        object.__setattr__(self, "beta", float(self.beta))

    def __getitem__(self, name: str) -> Buffer:
        return dict(self.members)[self._known("Mixture", name)]

    def init(self, examples: Mapping[str, Any]) -> MixtureState:
        """Return the state of a mixture.

        Args:
          examples: By name one row, as for `Buffer.init`; or the `BufferState` of a buffer with rows, for example a data
            set. It is shared, not copied: do not donate it elsewhere.
        Raises:
          ValueError: a name is missing or unknown, a state belongs to another buffer, or batches of the buffers differ.
          TypeError, MemoryError: as `Buffer.init`.
        Cost: that of the buffers; each is traced once to compare batches.

        Example:
          >>> import fbuf, jax.numpy as jnp
          >>> expert, online = fbuf.uniform(100), fbuf.uniform(10)
          >>> recorded = expert.extend(expert.init({"t": 0}), {"t": jnp.arange(100)})
          >>> mixture = fbuf.Mixture({"expert": expert, "online": online})
          >>> state = mixture.init({"expert": recorded, "online": {"t": 0}})
          >>> int(mixture.size(state))
          100
        """
        call = "Mixture.init"
        self._check_examples(call, "init", examples, "one row, or a BufferState,")
        states: dict[str, BufferState] = {}
        for name, buffer in self.members:
            given = examples[name]
            if isinstance(given, BufferState):
                buffer.check_state(given)
            states[name] = given if isinstance(given, BufferState) else buffer.init(given)
        self.check_same_batches(call, states)
        return MixtureState(
            buffers=states,
            fractions=self.first_fractions(),
            beta=jnp.full((), self.beta, jnp.float32),
            counters=jnp.zeros((len(COUNTERS),), jnp.uint32),
        )

    def first_fractions(self) -> jax.Array | None:
        """Return the fractions of a new state, float32[S]; None unless `annealed`."""
        return quota.normalized(jnp.asarray(self.shares, jnp.float32)) if self.annealed else None

    def check_same_batches(self, call: str, states: Mapping[str, BufferState]) -> None:
        """Raise unless the batches of all buffers have the same leaves. Each buffer is traced once; nothing runs."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        found = []
        checks.refuse_64_bits(call, self.members, states)
        for name, buffer in self.members:

            def data(state: BufferState, key: jax.Array, buffer: Buffer = buffer) -> Any:
                return buffer.peek(state, key, 1).data

            found.append((name, jax.eval_shape(data, states[name], key)))
        check_same_leaves(call, found)

    def replace(self, state: MixtureState, states: Mapping[str, BufferState]) -> MixtureState:
        """Return the state with the states of some buffers replaced, for methods that a mixture lacks.

        Example:
          >>> import fbuf
          >>> mixture = fbuf.Mixture({"online": fbuf.prioritized(10), "offline": fbuf.uniform(10)})
          >>> state = mixture.init({"online": 0.0, "offline": 0.0})
          >>> online = mixture["online"].set(state["online"], alpha=0.5)
          >>> state = mixture.replace(state, {"online": online})
        """
        call = "Mixture.replace"
        self._check(call, "replace(state, {'online': ...})", state)
        for name, given in states.items():
            self[self._known(call, name)].check_state(given)
        return dataclasses.replace(state, buffers={**state.buffers, **states})

    def add(
        self, state: MixtureState, name: str, row: PyTree, *, priority: Any = None, mask: Any = None
    ) -> MixtureState:
        """Add one row to buffer `name`; see `Buffer.add`.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mixture = fbuf.Mixture({"online": fbuf.prioritized(10), "offline": fbuf.uniform(10)}, annealed=True)
          >>> state = mixture.init({"online": {"t": 0}, "offline": {"t": 0}})
          >>> state = mixture.add(state, "online", {"t": 7})
          >>> int(mixture.size(state))
          1
        """
        self._check("Mixture.add", "add(state, name, row)", state)
        buffer = self[self._known("Mixture.add", name)]
        return self._with(state, name, buffer.add(state[name], row, priority=priority, mask=mask))

    def extend(
        self, state: MixtureState, name: str, rows: PyTree, *, priority: Any = None, mask: Any = None
    ) -> MixtureState:
        """Add rows to buffer `name`; see `Buffer.extend`.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mixture = fbuf.Mixture({"online": fbuf.prioritized(10), "offline": fbuf.uniform(10)}, annealed=True)
          >>> state = mixture.init({"online": {"t": 0}, "offline": {"t": 0}})
          >>> state = mixture.extend(state, "online", {"t": jnp.arange(5)})
          >>> state = mixture.extend(state, "offline", {"t": jnp.arange(10, 20)})
          >>> int(mixture.size(state))
          15
        """
        self._check("Mixture.extend", "extend(state, name, rows)", state)
        buffer = self[self._known("Mixture.extend", name)]
        return self._with(state, name, buffer.extend(state[name], rows, priority=priority, mask=mask))

    def update_priority(
        self, state: MixtureState, index: Index, td_error: Any, *, mask: Any = None, eta: Any = 0.9
    ) -> MixtureState:
        """Set priorities of drawn rows, each in its buffer; see `Buffer.update_priority`.

        Rows of buffers without priorities are skipped.

        Args:
          index: `batch.index`, `[B]`.
          td_error, mask, eta: As for `Buffer.update_priority`.
        Raises:
          TypeError: no buffer has priorities, or `index` is not one of a mixture.
          ValueError: shapes differ.
        Cost: O(B log C) a buffer with priorities.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mixture = fbuf.Mixture({"online": fbuf.prioritized(10), "offline": fbuf.uniform(10)}, annealed=True)
          >>> state = mixture.init({"online": {"t": 0}, "offline": {"t": 0}})
          >>> state = mixture.extend(state, "online", {"t": jnp.arange(5)})
          >>> state = mixture.extend(state, "offline", {"t": jnp.arange(10, 20)})
          >>> state, batch = mixture.sample(state, jax.random.key(0), 4)
          >>> state = mixture.update_priority(state, batch.index, jnp.ones(4))
        """
        call = "Mixture.update_priority"
        self._check(call, "update_priority(state, index, td_error)", state)
        if not any(buffer.sampler.prioritized for _, buffer in self.members):
            raise TypeError(f"{call}: no buffer has priorities. Use sampler=fbuf.samplers.Prioritized().")
        _buffer_checks.check_eta(call, eta)
        index = _buffer_checks.check_index(call, index, (1, 2), "source")
        td_error = jnp.asarray(td_error)
        return _update_priority(self, state, index, td_error, mask, jnp.asarray(eta, jnp.float32))[0]

    def update_rows(self, state: MixtureState, index: Index, fields: PyTree, *, mask: Any = None) -> MixtureState:
        """Replace some leaves of drawn rows, each in its buffer; see `Buffer.update_rows`.

        All buffers whose rows can change must have these leaves. Rows of data sets are unchanged, and counted.

        Raises:
          TypeError, ValueError: as `Buffer.update_rows`.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mixture = fbuf.Mixture({"online": fbuf.prioritized(10), "offline": fbuf.uniform(10)}, annealed=True)
          >>> state = mixture.init({"online": {"t": 0}, "offline": {"t": 0}})
          >>> state = mixture.extend(state, "online", {"t": jnp.arange(5)})
          >>> state = mixture.extend(state, "offline", {"t": jnp.arange(10, 20)})
          >>> state, batch = mixture.sample(state, jax.random.key(0), 4)
          >>> state = mixture.update_rows(state, batch.index, {"t": batch.data["t"] + 100})
        """
        call = "Mixture.update_rows"
        self._check(call, "update_rows(state, index, fields)", state)
        return _update_rows(self, state, _buffer_checks.check_index(call, index, (1, 2), "source"), fields, mask)[0]

    def window_index(self, state: MixtureState, index: Index) -> Index:
        """Return the rows `[B, T]` of sampled windows; see `Buffer.window_index`. All views have windows of equal length.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(10, view=fbuf.views.Sequence(3, episode_end=()))
          >>> mixture = fbuf.Mixture({"online": buffer, "offline": buffer})
          >>> state = mixture.init({"online": {"t": 0}, "offline": {"t": 0}})
          >>> state = mixture.extend(state, "online", {"t": jnp.arange(5)})
          >>> state, batch = mixture.sample(state, jax.random.key(0), 4)
          >>> rows = mixture.window_index(state, batch.index)
          >>> state = mixture.update_rows(state, rows, {"t": batch.data["t"] + 100})
        """
        call = "Mixture.window_index"
        self._check(call, "window_index(state, index)", state)
        for _, buffer in self.members:
            _buffer_checks.check_windows(call, buffer.view)
        return _window_index(self, state, _buffer_checks.check_index(call, index, (1,), "source"))[1]

    def route(self, index: Index, name: str) -> Index:
        """Return the rows of one buffer as its `Index`, other rows masked; for methods that a mixture lacks.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mixture = fbuf.Mixture({"online": fbuf.prioritized(10), "offline": fbuf.uniform(10)}, annealed=True)
          >>> state = mixture.init({"online": {"t": 0}, "offline": {"t": 0}})
          >>> state = mixture.extend(state, "online", {"t": jnp.arange(5)})
          >>> state = mixture.extend(state, "offline", {"t": jnp.arange(10, 20)})
          >>> state, batch = mixture.sample(state, jax.random.key(0), 4)
          >>> rows = mixture["offline"].get(state["offline"], mixture.route(batch.index, "offline"))
          >>> rows.mask.tolist() == (batch.index.source == 1).tolist()
          True
        """
        call = "Mixture.route"
        name = self._known(call, name)
        return draw.of(_buffer_checks.check_index(call, index, (1, 2), "source"), self.names.index(name), self[name])

    def cut(self, state: MixtureState, name: str, lanes: Any = None) -> MixtureState:
        """End the running episodes of buffer `name`; see `Buffer.cut`.

        Example:
          >>> import fbuf, jax.numpy as jnp
          >>> view = fbuf.views.Sequence(2, episode_end=())
          >>> mixture = fbuf.Mixture({"online": fbuf.uniform(10, view=view), "offline": fbuf.uniform(10, view=view)})
          >>> state = mixture.init({"online": {"t": 0}, "offline": {"t": 0}})
          >>> state = mixture.cut(mixture.add(state, "online", {"t": 1}), "online")
          >>> bool(mixture["online"].can_sample(mixture.add(state, "online", {"t": 2})["online"]))
          False
        """
        self._check("Mixture.cut", "cut(state, name)", state)
        return self._with(state, name, self[self._known("Mixture.cut", name)].cut(state[name], lanes))

    def clear(self, state: MixtureState, name: str | None = None) -> MixtureState:
        """Remove every row of buffer `name`, or of all; see `Buffer.clear`.

        Raises:
          TypeError: a buffer is a data set. Name the buffers to clear.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mixture = fbuf.Mixture({"online": fbuf.prioritized(10), "offline": fbuf.uniform(10)}, annealed=True)
          >>> state = mixture.init({"online": {"t": 0}, "offline": {"t": 0}})
          >>> state = mixture.extend(state, "online", {"t": jnp.arange(5)})
          >>> state = mixture.extend(state, "offline", {"t": jnp.arange(10, 20)})
          >>> int(mixture.size(mixture.clear(state, "online")))
          10
        """
        self._check("Mixture.clear", "clear(state, name)", state)
        names = self.names if name is None else (self._known("Mixture.clear", name),)
        return dataclasses.replace(state, buffers={**state.buffers, **{n: self[n].clear(state[n]) for n in names}})

    def set(
        self,
        state: MixtureState,
        name: str | None = None,
        *,
        fractions: Shares = None,
        beta: Any = None,
        **numbers: Any,
    ) -> MixtureState:
        """Replace annealed numbers without recompilation.

        Args:
          state: From `init` or an earlier call.
          name: A buffer, whose sampler's `numbers` are set: `set(state, "online", alpha=0.5)`.
          fractions: Of the mixture, by name; other buffers share the rest. It must be `annealed`.
          beta: Of the mixture.
        Raises:
          ValueError: the mixture is not `annealed`, or a number is out of range or unknown.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mixture = fbuf.Mixture({"online": fbuf.prioritized(10), "offline": fbuf.uniform(10)}, annealed=True)
          >>> state = mixture.init({"online": {"t": 0}, "offline": {"t": 0}})
          >>> state = mixture.extend(state, "online", {"t": jnp.arange(5)})
          >>> state = mixture.extend(state, "offline", {"t": jnp.arange(10, 20)})
          >>> state = mixture.set(state, fractions={"online": 0.75}, beta=0.6)
          >>> state = mixture.set(state, "online", alpha=0.5)
        """
        call = "Mixture.set"
        self._check(call, "set(state, beta=...)", state)
        if name is not None:
            if beta is not None:
                numbers["beta"] = beta
            if fractions is not None:
                raise ValueError(f"{call}: fractions belong to the mixture, not to '{name}'. Leave the name out.")
            return self._with(state, name, self[self._known(call, name)].set(state[name], **numbers))
        if numbers:
            first = next(iter(numbers))
            raise ValueError(
                f"{call}: '{first}' is unknown; expected fractions or beta. Write set(state, '{self.names[0]}', {first}=...)."
            )
        if fractions is not None:
            if not self.annealed:
                raise ValueError(f"{call}: annealed is False. Use Mixture(annealed=True), or sample(fractions=...).")
            new = quota.normalized(checks.traced_fractions(call, fractions, self.names, self.shares))
            state = dataclasses.replace(state, fractions=new)
        given = checks.checked_beta(call, beta)
        return state if given is None else dataclasses.replace(state, beta=given)

    def sample(
        self, state: MixtureState, key: jax.Array, batch_size: Sizes, *, fractions: Shares = None, beta: Any = None
    ) -> tuple[MixtureState, Sample]:
        """Draw a batch from all buffers. Carry the returned state: it orders this read before later writes.

        Args:
          state: From `init` or an earlier call.
          key: PRNG key, typed or raw; consumed.
          batch_size: B, a Python int; with quota="all" rows of each buffer, by name.
          fractions: For this call, by name, traced or not; other buffers share the rest. Negative fractions and NaN count as 0.
          beta: For this call.
        Returns:
          The state, and a `Sample` with leaves `[B, ...]`. Missing rows have `mask` False and zeros.
        Raises:
          ValueError, TypeError: a number is out of range, or batches of the buffers differ (at trace time).
        Cost: see `Mixture`.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mixture = fbuf.Mixture({"online": fbuf.prioritized(10), "offline": fbuf.uniform(10)}, annealed=True)
          >>> state = mixture.init({"online": {"t": 0}, "offline": {"t": 0}})
          >>> state = mixture.extend(state, "online", {"t": jnp.arange(5)})
          >>> state = mixture.extend(state, "offline", {"t": jnp.arange(10, 20)})
          >>> state, batch = mixture.sample(state, jax.random.key(0), 8, fractions={"online": 0.25})
          >>> batch.data["t"].shape, batch.index.source.tolist().count(0)
          ((8,), 2)
        """
        args = self._checked_draw("Mixture.sample", state, key, batch_size, fractions, beta)
        return _sample(self, state, key, *args[:2], static=args[2:])

    def peek(
        self, state: MixtureState, key: jax.Array, batch_size: Sizes, *, fractions: Shares = None, beta: Any = None
    ) -> Sample:
        """Return the batch of `sample` without the state, for evaluation and for `vmap` over keys.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mixture = fbuf.Mixture({"online": fbuf.prioritized(10), "offline": fbuf.uniform(10)}, annealed=True)
          >>> state = mixture.init({"online": {"t": 0}, "offline": {"t": 0}})
          >>> state = mixture.extend(state, "online", {"t": jnp.arange(5)})
          >>> state = mixture.extend(state, "offline", {"t": jnp.arange(10, 20)})
          >>> mixture.peek(state, jax.random.key(0), 8).weight.shape
          (8,)
        """
        args = self._checked_draw("Mixture.peek", state, key, batch_size, fractions, beta)
        return _sample(self, state, key, *args[:2], static=args[2:])[1]

    def _checked_draw(
        self, call: str, state: MixtureState, key: Any, batch_size: Any, fractions: Any, beta: Any
    ) -> tuple[jax.Array | None, jax.Array | None, tuple[int, ...] | None, int]:
        """Return fractions and beta as arrays, quotas if they are known, and B."""
        form = f"{call.rsplit('.', 1)[1]}(state, key, batch_size)"
        self._check(call, form, state)
        checks.refuse_64_bits(call, self.members, state.buffers)
        given = checks.checked_beta(call, beta)
        if self.quota == "all":
            if fractions is not None:
                raise ValueError(f'{call}: fractions is given; expected None with quota="all".')
            sizes: tuple[int, ...] | None = checks.checked_sizes(call, batch_size, self.names)
            total = sum(sizes or ())
        else:
            sizes, total = None, batch_size
            if isinstance(batch_size, Mapping):
                raise TypeError(f'{call}: batch_size is a dict; expected an int, or quota="all".')
        total, _ = _buffer_checks.check_draw(call, form, self.members[0][1], key, total, {})
        if sizes is not None:
            return None, given, sizes, total
        if fractions is not None:
            return checks.traced_fractions(call, fractions, self.names, self.shares), given, None, total
        if self.annealed:
            return state.fractions, given, None, total
        if self.quota == "random":
            return jnp.asarray(self.shares, jnp.float32), given, None, total
        return None, given, quota.quotas(self.shares, total), total

    def can_sample(self, state: MixtureState) -> jax.Array:
        """Return whether a batch can be drawn, bool[]. With quota "all" or if_empty "mask" every sampled buffer must have
        anchors.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mixture = fbuf.Mixture({"online": fbuf.prioritized(10), "offline": fbuf.uniform(10)}, annealed=True)
          >>> state = mixture.init({"online": {"t": 0}, "offline": {"t": 0}})
          >>> bool(mixture.can_sample(state))
          False
        """
        self._check("Mixture.can_sample", "can_sample(state)", state)
        return _can_sample(self, state)[1]

    def size(self, state: MixtureState) -> jax.Array:
        """Return the rows held by all buffers, int32[].

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mixture = fbuf.Mixture({"online": fbuf.prioritized(10), "offline": fbuf.uniform(10)}, annealed=True)
          >>> state = mixture.init({"online": {"t": 0}, "offline": {"t": 0}})
          >>> state = mixture.extend(state, "online", {"t": jnp.arange(5)})
          >>> state = mixture.extend(state, "offline", {"t": jnp.arange(10, 20)})
          >>> int(mixture.size(state))
          15
        """
        self._check("Mixture.size", "size(state)", state)
        sizes = [buffer.size(state[name]) for name, buffer in self.members]
        return jnp.sum(jnp.stack(sizes), dtype=jnp.int32)

    def stats(self, state: MixtureState) -> dict[str, jax.Array]:
        """Return scalars to log: those of the buffers as `online/size`, and the counters of the mixture.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mixture = fbuf.Mixture({"online": fbuf.prioritized(10), "offline": fbuf.uniform(10)}, annealed=True)
          >>> state = mixture.init({"online": {"t": 0}, "offline": {"t": 0}})
          >>> state = mixture.extend(state, "online", {"t": jnp.arange(5)})
          >>> state = mixture.extend(state, "offline", {"t": jnp.arange(10, 20)})
          >>> int(mixture.stats(state)["online/size"])
          5
        """
        from fbuf._buffer.summary import unlearnt

        self._check("Mixture.stats", "stats(state)", state)
        found: dict[str, jax.Array] = _stats(self, state)[1]
        eager = ((name, unlearnt(buffer, state[name])) for name, buffer in self.members)
        return found | {f"{name}/{key}": count for name, counts in eager for key, count in counts.items()}

    def nbytes(self, state: MixtureState) -> dict[str, int]:
        """Return the bytes held: `device`, `host`, `disk`. Eager.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mixture = fbuf.Mixture({"online": fbuf.prioritized(10), "offline": fbuf.uniform(10)}, annealed=True)
          >>> state = mixture.init({"online": {"t": 0}, "offline": {"t": 0}})
          >>> state = mixture.extend(state, "online", {"t": jnp.arange(5)})
          >>> state = mixture.extend(state, "offline", {"t": jnp.arange(10, 20)})
          >>> sorted(mixture.nbytes(state))
          ['device', 'disk', 'host']
        """
        self._check("Mixture.nbytes", "nbytes(state)", state)
        total = {"device": tree_bytes(dataclasses.replace(state, buffers={})), "host": 0, "disk": 0}
        for name, buffer in self.members:
            sizes = buffer.nbytes(state[name])
            total = {place: size + sizes[place] for place, size in total.items()}
        return total

    def flush(self, state: MixtureState) -> None:
        """Wait until every row is on disk; see `Buffer.flush`. Eager.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mixture = fbuf.Mixture({"online": fbuf.prioritized(10), "offline": fbuf.uniform(10)}, annealed=True)
          >>> state = mixture.init({"online": {"t": 0}, "offline": {"t": 0}})
          >>> state = mixture.extend(state, "online", {"t": jnp.arange(5)})
          >>> state = mixture.extend(state, "offline", {"t": jnp.arange(10, 20)})
          >>> mixture.flush(state)
        """
        self._check("Mixture.flush", "flush(state)", state)
        for name, buffer in self.members:
            buffer.flush(state[name])

    def plan(self, examples: Mapping[str, PyTree], **settings: Unpack[PlanSettings]) -> dict[str, Plan]:
        """Return the memory plan of each buffer, by name; see `Buffer.plan`. Traced quotas read B rows of each buffer.

        Args:
          examples: One row for each buffer.
          **settings: Of `Buffer.plan`, for all.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mixture = fbuf.Mixture({"online": fbuf.prioritized(10), "offline": fbuf.uniform(10)}, annealed=True)
          >>> state = mixture.init({"online": {"t": 0}, "offline": {"t": 0}})
          >>> plans = mixture.plan({"online": {"t": 0}, "offline": {"t": 0}})
        """
        self._check_examples("Mixture.plan", "plan", examples, "one row")
        return {name: buffer.plan(examples[name], **settings) for name, buffer in self.members}

    def summary(self, state: MixtureState, *, compare: int | None = 1 << 14) -> dict[str, Summary]:
        """Return a summary of each buffer, by name; see `Buffer.summary`. Eager.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mixture = fbuf.Mixture({"online": fbuf.prioritized(10), "offline": fbuf.uniform(10)}, annealed=True)
          >>> state = mixture.init({"online": {"t": 0}, "offline": {"t": 0}})
          >>> state = mixture.extend(state, "online", {"t": jnp.arange(5)})
          >>> state = mixture.extend(state, "offline", {"t": jnp.arange(10, 20)})
          >>> sorted(mixture.summary(state))
          ['offline', 'online']
        """
        self._check("Mixture.summary", "summary(state)", state)
        return {name: buffer.summary(state[name], compare=compare) for name, buffer in self.members}

    def _known(self, call: str, name: Any) -> str:
        if not isinstance(name, str):
            raise TypeError(f"{call}: name is {type(name).__name__}; expected one of {', '.join(self.names)}.")
        if name not in self.names:
            raise ValueError(f"{call}: name is {name!r}; expected one of {', '.join(self.names)}.")
        return name

    def _check_examples(self, call: str, verb: str, examples: Any, what: str) -> None:
        if not isinstance(examples, Mapping) or set(examples) != set(self.names):
            got = ", ".join(map(str, examples)) if isinstance(examples, Mapping) else type(examples).__name__
            fix = f"{verb}({{{', '.join(f'{name!r}: row' for name in self.names)}}})"
            raise ValueError(f"{call}: examples is {got}; expected {what} for each buffer. Write {fix}.")

    def _with(self, state: MixtureState, name: str, new: BufferState) -> MixtureState:
        return dataclasses.replace(state, buffers={**state.buffers, name: new})

    def _check(self, call: str, form: str, state: Any) -> None:
        if not isinstance(state, MixtureState):
            raise TypeError(f"{call}: state is {type(state).__name__}; expected MixtureState. The order is {form}.")
        if set(state.buffers) != set(self.names) or (state.fractions is None) == self.annealed:
            had = f"{', '.join(state.buffers)}{'' if state.fractions is None else ', annealed'}"
            raise ValueError(f"{call}: state of {had}; expected {', '.join(self.names)}{', annealed' * self.annealed}.")
        for own in state.buffers.values():
            refuse_donated(call, own)
            _buffer_checks.refuse_stacked(call, type(self), own)

    def check_state(self, state: MixtureState) -> None:
        """Raise if another mixture made the state. At trace time only."""
        self._check("Mixture", "(state, ...)", state)
        for name, buffer in self.members:
            buffer.check_state(state[name])


_OF_BUFFERS = {field.name: "" for field in dataclasses.fields(Buffer)} | {
    "get": "state[{0}], mixture.route(batch.index, {0})",
    "rows": "state[{0}]",
    "priorities": "state[{0}], mixture.route(batch.index, {0})",
    "last": "state[{0}], n",
    "rebuild": "state[{0}]",
    "convert": "other, state[{0}]",
    "grow": "state[{0}]",
    "resume": "row",
}
"""Members of buffers that a mixture lacks, with arguments as text for `format` with the name of a buffer."""


def _can_sample_core(mixture: MixtureConfig, state: MixtureState) -> tuple[MixtureState, jax.Array]:
    there = draw.available(mixture, dict(state.buffers)) > jnp.int32(0)
    shares = jnp.asarray(mixture.shares, jnp.float32) if state.fractions is None else state.fractions
    drawn = shares > jnp.float32(0)
    if mixture.quota == "all" or mixture.if_empty == "mask":
        return state, jnp.all(there | ~drawn)
    return state, jnp.any(there & drawn)


def _stats_core(mixture: MixtureConfig, state: MixtureState) -> tuple[MixtureState, dict[str, jax.Array]]:
    out: dict[str, jax.Array] = {name: state.counters[i] for i, name in enumerate(COUNTERS)} | {"beta": state.beta}
    if mixture.quota == "all":
        shares = None
    else:
        usual = quota.normalized(jnp.asarray(mixture.shares, jnp.float32))
        shares = usual if state.fractions is None else state.fractions
    for number, (name, buffer) in enumerate(mixture.members):
        own = operations.stats.core(buffer, state[name])[1]
        out |= {f"{name}/{key}": value for key, value in own.items()}
        if shares is not None:
            out[f"{name}/fraction"] = shares[number]
    return state, out


_sample = Operation(draw.sample)
_update_priority = Operation(draw.update_priority)
_update_rows = Operation(draw.update_rows)
_window_index = Operation(draw.window_index)
_can_sample = Operation(_can_sample_core)
_stats = Operation(_stats_core)
