"""Every bit of an npz that is not compressed."""

import pytest

from tests.more.interop.test_interop_hostile import test_every_truncation_and_flipped_bit_is_noticed  # noqa: F401


@pytest.fixture(params=[False])
def compress(request):
    return request.param
