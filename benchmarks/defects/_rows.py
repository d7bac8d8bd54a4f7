"""List the rows of the table, and the defects that it omits."""

from __future__ import annotations

from benchmarks.defects import (
    Defect,
    _brax,
    _flashbax,
    _flashbax_vault,
    _ours,
    _ours_files,
    _ours_rows,
    _ours_states,
    _torchrl,
    _torchrl_files,
    _torchrl_rows,
)

FLASHBAX = (
    ("priority of a new row", "the largest seen, not rounded", _flashbax.new_row_priority, _ours.new_row_priority),
    (
        "priorities of overwritten rows",
        "ignored",
        _flashbax.stale_windows,
        _ours.stale_windows,
    ),
    ("NaN priority", "rejected; the other rows are drawn as before", _flashbax.not_finite, _ours.not_finite),
    ("negative priority", "rejected, or its magnitude is used", _flashbax.negative, _ours.negative),
    ("index out of range", "rejected; the root is the sum of the leaves", _flashbax.out_of_range, _ours.out_of_range),
    (
        "priority of a slot never written",
        "rejected; only written rows are drawn",
        _flashbax.never_written,
        _ours.never_written,
    ),
    ("sum after priorities shrink from 1000 to 0.01", "the sum of the new priorities", _flashbax.drift, _ours.drift),
    ("rows of priority 0", "never drawn", _flashbax.zero_drawn, _ours.zero_drawn),
    ("sample of an empty buffer", "no NaN", _flashbax.empty_sample, _ours.empty_sample),
    (
        "half of each batch from each of two prioritized buffers",
        "every row can be drawn",
        _flashbax.mixture,
        _ours.mixture,
    ),
    (
        "writing as many new rows as the ring holds to files",
        "all rows, in order",
        _flashbax_vault.a_ring_at_once,
        _ours_files.a_ring_at_once,
    ),
    ("writing to files after opening them again", "appends", _flashbax_vault.reopened, _ours_files.reopened),
    (
        "writing to files in a running event loop (a notebook)",
        "works",
        _flashbax_vault.in_a_running_loop,
        _ours_files.in_a_running_loop,
    ),
    ("saved priorities", "restored", _flashbax_vault.priorities_saved, _ours_states.priorities_saved),
)
TORCHRL = (
    ("prioritized sampling after installation", "works", _torchrl.extension_loads, _ours.no_extension),
    ("NaN priority", "rejected; the other rows are drawn as before", _torchrl.not_finite, _ours.not_finite),
    ("negative priority", "rejected, or its magnitude is used", _torchrl.negative, _ours.negative),
    (
        "priority of a slot never written",
        "rejected; only written rows are drawn",
        _torchrl.out_of_range,
        _ours.never_written,
    ),
    ("two draws with the same seed", "the same batch", _torchrl.seeded, _ours_states.same_key),
    (
        "weights of other rows if one priority is 0",
        "not changed by it",
        _torchrl.one_tiny_priority,
        _ours.one_tiny_priority,
    ),
    ("loading priorities twice", "no error", _torchrl.loaded_twice, _ours_states.restored_twice),
    ("annealing alpha from 0", "applies to new priorities", _torchrl.alpha_zero, _ours.alpha_zero),
    ("counters beyond 32 bits", "correct", _torchrl.counters, _ours_states.counters),
    ("copying a buffer", "every row once", _torchrl.prefilled, _ours_states.copied_once),
    ("last batch without replacement", "as documented", _torchrl.epoch_sizes, _ours_states.epoch_sizes),
    ("prefetched batches of overwritten rows", "marked or counted", _torchrl.prefetched, _ours_states.prefetched),
    (
        "episodes that end only by truncation",
        "no window crosses an end",
        _torchrl_rows.truncated_only,
        _ours_rows.truncated_only,
    ),
    ("windows cut at short episodes", "never empty, one shape", _torchrl_rows.cut_windows, _ours_rows.cut_windows),
    (
        "windows without replacement, some episodes short",
        "full batches",
        _torchrl_rows.short_episodes,
        _ours_rows.short_episodes,
    ),
    ("windows of compressed rows", "can be drawn", _torchrl_rows.compressed_windows, _ours_rows.compressed_windows),
    ("compressed bfloat16 and empty leaves", "returned as stored", _torchrl_rows.odd_leaves, _ours_rows.odd_leaves),
    ("a custom codec", "called as documented", _torchrl_rows.codec, _ours_files.codec),
    (
        "hindsight, rows added after a sample",
        "goals of the same episode",
        _torchrl_rows.hindsight_ring,
        _ours_rows.hindsight,
    ),
    (
        "hindsight, ring wrapped around",
        "goals of the same episode",
        _torchrl_rows.hindsight_wrapped,
        _ours_rows.hindsight,
    ),
    ("hindsight, relabelled rows", "anywhere in the batch", _torchrl_rows.hindsight_first, _ours_rows.hindsight),
    ("n-step returns, n = 1", "only terminal rows do not bootstrap", _torchrl_rows.one_step, _ours_rows.one_step),
    ("rows of different shapes", "can be read", _torchrl_rows.ragged, _ours_rows.ragged),
    ("codec of compressed rows", "zstd, as documented", _torchrl_files.magic, _ours_files.magic),
    ("nested leaves in a compressed storage", "compressed", _torchrl_files.nested, _ours_files.nested),
    ("number of compressed rows", "constant time", _torchrl_files.size_is_a_number, _ours_files.size_is_a_number),
    ("compressed rows in files", "few files, no pickle", _torchrl_files.few_files, _ours_files.few_files),
    ("writing nested compressed rows to files", "works", _torchrl_files.nested_dump, _ours_files.magic),
    (
        "writing fewer rows to a folder that has more",
        "a readable folder",
        _torchrl_files.over_another,
        _ours_files.over_another,
    ),
    ("an interrupted write to files", "a consistent set of rows", _torchrl_files.torn, _ours_files.torn),
    ("files of a buffer that is 1% full", "no room for missing rows", _torchrl_files.sparse, _ours_files.sparse),
)
SLOW = (
    Defect(
        "16.7 million rows of equal priority",
        "flashbax",
        "every row can be drawn",
        _flashbax.reachable,
        _ours.reachable,
        slow=True,
    ),
    Defect(
        "reported size of compressed rows",
        "torchrl",
        "the growth of the process",
        _torchrl_files.truth,
        _ours_files.truth,
        slow=True,
    ),
)
ROWS = (
    *(Defect(name, "flashbax", should, theirs, ours) for name, should, theirs, ours in FLASHBAX),
    SLOW[0],
    Defect("rows of several dtypes", "brax", "returned as stored", _brax.dtypes, _ours_states.dtypes),
    *(Defect(name, "torchrl", should, theirs, ours) for name, should, theirs, ours in TORCHRL),
    SLOW[1],
)
LEFT_OUT = {
    "torchrl's Atari data set (rows in another order than their index, terminal steps in the next episode, zeroed frames at "
    "the ends of files)": "its data must be downloaded; for fbuf see tests/datasets/test_atari.py",
    "torchrl's CUDA trees (one thread writes the leaves, each update rebuilds the whole tree)": "needs a GPU",
    "torchrl's `TensorDictMaxValueWriter` (a NaN excludes better rows)": "for fbuf see tests/writers/test_topk.py",
    "torchrl's ensembles (different samplers raise; `len` counts members)": "for fbuf see tests/mixture/test_mixture.py",
    "torchrl's files of one capacity loaded into a buffer of another": "`resume` also raises an error",
}
