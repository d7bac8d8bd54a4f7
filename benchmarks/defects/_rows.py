"""The table's rows, and what is left out of it."""

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
    ("new row's priority", "the largest seen, as it is", _flashbax.new_row_priority, _ours.new_row_priority),
    (
        "late priorities",
        "an update of rows overwritten since changes nothing",
        _flashbax.stale_windows,
        _ours.stale_windows,
    ),
    ("NaN priority", "refused; the others are drawn as before", _flashbax.not_finite, _ours.not_finite),
    ("negative priority", "refused, or its magnitude", _flashbax.negative, _ours.negative),
    ("index out of range", "refused; the sum is that of the leaves", _flashbax.out_of_range, _ours.out_of_range),
    ("slot never written", "refused; only rows are drawn", _flashbax.never_written, _ours.never_written),
    ("sum after priorities shrank from 1000 to 0.01", "that of the priorities set", _flashbax.drift, _ours.drift),
    ("rows of priority 0", "never drawn", _flashbax.zero_drawn, _ours.zero_drawn),
    ("sample of an empty buffer", "nothing that becomes NaN in a loss", _flashbax.empty_sample, _ours.empty_sample),
    ("half a batch from a prioritized buffer", "all its rows can be drawn", _flashbax.mixture, _ours.mixture),
    (
        "as many new rows as the ring holds, to disk",
        "all there, in order",
        _flashbax_vault.a_ring_at_once,
        _ours_files.a_ring_at_once,
    ),
    ("files opened again", "go on where they ended", _flashbax_vault.reopened, _ours_files.reopened),
    (
        "write within a running event loop (a notebook)",
        "works",
        _flashbax_vault.in_a_running_loop,
        _ours_files.in_a_running_loop,
    ),
    ("priorities saved", "come back", _flashbax_vault.priorities_saved, _ours_states.priorities_saved),
)
TORCHRL = (
    ("prioritized draws, as installed", "work", _torchrl.extension_loads, _ours.no_extension),
    ("NaN priority", "refused; the others are drawn as before", _torchrl.not_finite, _ours.not_finite),
    ("negative priority", "refused, or its magnitude", _torchrl.negative, _ours.negative),
    ("slot never written", "refused; only rows are drawn", _torchrl.out_of_range, _ours.never_written),
    ("a seed", "the same batch again", _torchrl.seeded, _ours_states.same_key),
    (
        "weights beside one priority of 0",
        "those of the others keep their size",
        _torchrl.one_tiny_priority,
        _ours.one_tiny_priority,
    ),
    ("priorities loaded twice", "no error", _torchrl.loaded_twice, _ours_states.restored_twice),
    ("alpha annealed from 0", "applies to new priorities", _torchrl.alpha_zero, _ours.alpha_zero),
    ("counters past 32 bits", "go on", _torchrl.counters, _ours_states.counters),
    ("a copy of a buffer", "has every row once", _torchrl.prefilled, _ours_states.copied_once),
    ("last batch without replacement", "as documented", _torchrl.epoch_sizes, _ours_states.epoch_sizes),
    ("prefetch", "stale batches can be told", _torchrl.prefetched, _ours_states.prefetched),
    (
        "episodes that end by truncation alone",
        "no window crosses one",
        _torchrl_rows.truncated_only,
        _ours_rows.truncated_only,
    ),
    ("windows cut at short episodes", "never empty, one shape", _torchrl_rows.cut_windows, _ours_rows.cut_windows),
    (
        "windows without replacement, some episodes short",
        "whole batches",
        _torchrl_rows.short_episodes,
        _ours_rows.short_episodes,
    ),
    ("windows of compressed rows", "are drawn", _torchrl_rows.compressed_windows, _ours_rows.compressed_windows),
    ("compressed bfloat16 and empty leaves", "come back", _torchrl_rows.odd_leaves, _ours_rows.odd_leaves),
    ("a codec of one's own", "is called as documented", _torchrl_rows.codec, _ours_files.codec),
    (
        "hindsight, ring written further",
        "goals of the same episode",
        _torchrl_rows.hindsight_ring,
        _ours_rows.hindsight,
    ),
    ("hindsight, ring gone round", "goals of the same episode", _torchrl_rows.hindsight_wrapped, _ours_rows.hindsight),
    ("hindsight, which rows", "any of a batch", _torchrl_rows.hindsight_first, _ours_rows.hindsight),
    ("n-step returns, n = 1", "no bootstrap after true ends only", _torchrl_rows.one_step, _ours_rows.one_step),
    ("rows of many shapes", "can be read", _torchrl_rows.ragged, _ours_rows.ragged),
    ("codec of compressed rows", "zstd, as documented", _torchrl_files.magic, _ours_files.magic),
    ("compressed rows below a key", "are compressed", _torchrl_files.nested, _ours_files.nested),
    ("size of compressed rows", "a number that is kept", _torchrl_files.size_is_a_number, _ours_files.size_is_a_number),
    ("compressed rows in files", "few files, no pickle", _torchrl_files.few_files, _ours_files.few_files),
    ("nested compressed rows in files", "are written", _torchrl_files.nested_dump, _ours_files.magic),
    (
        "fewer rows over more in one folder",
        "what is there can be read",
        _torchrl_files.over_another,
        _ours_files.over_another,
    ),
    ("a write to files cut short", "whole rows of one moment", _torchrl_files.torn, _ours_files.torn),
    ("files of a buffer one hundredth full", "take that much room", _torchrl_files.sparse, _ours_files.sparse),
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
        "what a compressed store says it takes",
        "torchrl",
        "what the process grows by",
        _torchrl_files.truth,
        _ours_files.truth,
        slow=True,
    ),
)
ROWS = (
    *(Defect(name, "flashbax", should, theirs, ours) for name, should, theirs, ours in FLASHBAX),
    SLOW[0],
    Defect("rows of several dtypes", "brax", "come back as they were", _brax.dtypes, _ours_states.dtypes),
    *(Defect(name, "torchrl", should, theirs, ours) for name, should, theirs, ours in TORCHRL),
    SLOW[1],
)
LEFT_OUT = {
    "torchrl's Atari data set (rows in another order than their index, terminal steps in the next episode, zeroed frames at "
    "the ends of files)": "its data must be downloaded; ours: tests/datasets/test_atari.py",
    "torchrl's CUDA trees (leaves written by one thread, the whole tree rebuilt an update)": "needs a GPU",
    "torchrl's `TensorDictMaxValueWriter` (a NaN keeps better rows out)": "ours: tests/writers/test_topk.py",
    "torchrl's ensembles (members of different samplers raise; `len` counts members)": "ours: tests/mixture/test_mixture.py",
    "torchrl's files of one capacity loaded into a buffer of another": "`resume` refuses that too, with an error",
}
