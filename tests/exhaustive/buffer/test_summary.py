"""`Buffer.summary` of every storage with every sampler, view and writer."""

import itertools

import pytest

from tests.support import combinations as parts
from tests.support.summary import check_all, check_unordered

COMBINATIONS = [
    case for case in itertools.product(parts.STORAGES, parts.SAMPLERS, parts.VIEWS) if case[1:] not in parts.REFUSED
]


@pytest.mark.parametrize(("storage", "sampler", "view"), COMBINATIONS)
def test_every_number_is_that_of_plain_python(storage, sampler, view):
    check_all(storage, sampler, view)


@pytest.mark.parametrize("writer", parts.UNORDERED_WRITERS)
@pytest.mark.parametrize("storage", parts.UNORDERED_STORAGES)
def test_rows_of_scattering_writers(storage, writer):
    check_unordered(storage, writer)
