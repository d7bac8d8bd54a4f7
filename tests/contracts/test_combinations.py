"""Every storage with every sampler, view and writer: the same batches, or an error that says why it makes no sense."""

import dataclasses
import itertools

import jax
import pytest

import fbuf
from fbuf.storages import Deduplicated, Device
from tests.support import combinations
from tests.support.combinations import EXAMPLE
from tests.support.refusals import raises
from tests.support.tables import checks, pairwise


@pytest.mark.parametrize("writer", combinations.UNORDERED_WRITERS)
def test_ordered_parts_refuse_unordered_writers(writer):
    for view in combinations.VIEWS:
        for sampler in combinations.SAMPLERS:
            episodes = "draws episodes" if "episodes" in sampler else "needs rows to be replaced oldest first"
            said = "reads neighbouring rows" if view != "Row" else episodes
            if view != "Row" or sampler not in combinations.UNORDERED:
                raises(ValueError, rf"{said}.* may replace any", combinations.make, "Device", sampler, view, writer)
            else:
                assert combinations.make("Device", sampler, view, writer).dense
    for storage in combinations.STORAGES:
        if storage not in combinations.UNORDERED_STORAGES:
            with pytest.raises(ValueError, match="the writer replaces any row"):
                combinations.make(storage, "Uniform", "Row", writer).init(EXAMPLE)


@pytest.mark.parametrize("pair", combinations.REFUSED)
@pytest.mark.parametrize("storage", combinations.STORAGES)
def test_combinations_without_meaning_are_refused(storage, pair):
    raises(ValueError, combinations.REFUSED[pair], combinations.make, storage, *pair)


def test_no_state_holds_an_array_of_size_zero():
    """Every array of a state costs time in every call, and XLA replicates arrays without elements."""
    views = [("Device", "Row"), ("Device", "Transition"), ("Device", "Hindsight"), ("Deduplicated", "Episode")]
    cases = [(storage, sampler, view) for sampler in combinations.SAMPLERS for storage, view in views]
    cases += [(storage, "Uniform", "Row") for storage in combinations.STORAGES]
    cases += [("Device", "Uniform", "Row", writer) for writer in combinations.UNORDERED_WRITERS]
    buffers = [combinations.make(*case) for case in cases]
    others = (fbuf.samplers.Epoch(shuffle=False), fbuf.samplers.Consume())
    for buffer in buffers + [dataclasses.replace(buffers[0], sampler=sampler) for sampler in others]:
        on_device = isinstance(buffer.storage, Device | Deduplicated) and not getattr(buffer.sampler, "on_host", False)
        state = jax.eval_shape(buffer.init, EXAMPLE) if on_device else buffer.init(EXAMPLE)
        leaves = jax.tree_util.tree_leaves_with_path(state)
        assert [jax.tree_util.keystr(path) for path, leaf in leaves if not leaf.size] == [], buffer


NO_PARTS = ("BitPack", "Codec", "Raw", "Zstd", "DataSet", "Frozen")  # the last two: tests/writers/test_frozen.py


def test_every_public_part_is_in_the_tables():
    for package, known in (
        (fbuf.storages, combinations.STORAGES),
        (fbuf.samplers, combinations.SAMPLERS),
        (fbuf.views, combinations.VIEWS),
        (fbuf.writers, combinations.WRITERS),
    ):
        parts = {n for n in package.__all__ if not n.endswith("State") and n not in NO_PARTS}
        assert parts == {name.split("(")[0] for name in known}, package.__name__


@pytest.mark.more
@pytest.mark.optimized
@pytest.mark.parametrize(("sampler", "view"), combinations.SOME)
def test_storages_give_the_same_batches(sampler, view):
    combinations.check_storages_agree(["Deduplicated", "Compressed", "Host", "Ragged"], sampler, view)


def refused(storage, sampler, view):
    return (sampler, view) in combinations.REFUSED


EVERY = pairwise(list(combinations.STORAGES)[1:], combinations.SAMPLERS, combinations.VIEWS, refused=refused)
WRITTEN = itertools.product(combinations.UNORDERED, ["Row"], combinations.UNORDERED_WRITERS)
test_storages_give_the_same_batches_in_every_combination = checks(
    exhaustive=[
        (combinations.check_storages_agree, [([storage], *parts) for storage, *parts in EVERY]),
        (combinations.check_storages_agree, [(combinations.UNORDERED_STORAGES, *parts) for parts in WRITTEN]),
    ]
)
