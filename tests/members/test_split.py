"""The buffer of one of several members, and buffers that several members cannot share."""

import re

import pytest

import fbuf
from fbuf import samplers, storages, transforms, writers
from fbuf._members import split
from tests.support.refusals import raises


def table(blocks):
    return storages.Deduplicated(("obs",), blocks=blocks)


def test_the_sizes_of_the_members_add_up_to_those_of_the_whole():
    one = split.member_of(fbuf.Buffer(96, lanes=6, batch_size=12, storage=table(None)), 3)
    assert one == fbuf.Buffer(32, lanes=2, storage=table(None))
    assert split.member_of(fbuf.Buffer(96), 3) == fbuf.Buffer(32)


def test_members_have_places_for_all_blocks_of_a_table():
    assert split.member_of(fbuf.Buffer(96, storage=table(160)), 2).storage.blocks == 96
    blocks = split.member_of(fbuf.Buffer(96, storage=table({"a": 64, "b": 512})), 4).storage.blocks
    assert dict(blocks) == {"a": 64, "b": 128}


REFUSED = [
    (fbuf.Buffer(24, writer=writers.TopK("priority")), "needs all rows in one place; expected writers.Ring()."),
    (fbuf.Buffer(24, sampler=samplers.Ranked()), "such as a sampler that ranks the rows of the whole."),
    (fbuf.Buffer(24, sampler=samplers.Prioritized(uniform=0.1)), "mixes two draws; expected uniform=None."),
    (fbuf.Buffer(24, on_read=transforms.Normalize("obs")), "would keep statistics of one shard."),
]


@pytest.mark.parametrize("alone", ["", "shards=1"])
@pytest.mark.parametrize(("buffer", "message"), REFUSED, ids=["writer", "sampler", "uniform", "transform"])
def test_parts_that_need_all_rows_are_refused(buffer, message, alone):
    ending = "Use .*shards=1" if alone else "Leave it out|Use samplers.Prioritized"
    match = f"^Whole: .*{re.escape(message)}.*({ending})"
    raises((TypeError, ValueError), match, split.check_split, "Whole", buffer, 3, alone)


def test_a_size_that_cannot_be_divided_is_refused_with_the_nearest_sizes():
    split.check_multiple("Whole", "capacity", 9, 3)
    message = "^Whole: capacity is 8, not a multiple of the 3 shards of axis 'data'. Use 6 or 9.$"
    raises(ValueError, message, split.check_multiple, "Whole", "capacity", 8, 3, " of axis 'data'")
    raises(ValueError, "Use 3.$", split.check_multiple, "Whole", "lanes", 2, 3)
