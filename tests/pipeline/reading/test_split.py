"""Which samples of a split can be used, against plain loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_store import make_store

from xret.pipeline.reading.split import Ascending, Split
from xret.pipeline.store import OK, FeatureCache


@given(st.lists(st.booleans(), min_size=1, max_size=12).filter(any), st.integers(0, 9), st.data())
def test_ascending_numbers_are_a_list(there, first, data):
    numbers = [first + at for at, here in enumerate(there) if here]
    kept = Ascending(first, np.array(there))
    assert [*kept] == numbers == kept[np.arange(len(kept))].tolist()
    assert kept.places(np.arange(25)).tolist() == [sum(one < number for one in numbers) for number in range(25)]
    assert kept.key == Ascending(first, np.array(there)).key
    some = data.draw(st.lists(st.booleans(), min_size=len(numbers), max_size=len(numbers)))
    assert [*kept.only(np.array(some))] == [number for number, wanted in zip(numbers, some, strict=True) if wanted]


@pytest.mark.parametrize("broken", [(), (0, 7, 11, 30)])
@pytest.mark.parametrize("names", [("train",), ("train", "test"), ("test", "val")])
@pytest.mark.parametrize("share", [1, 0.4])
def test_the_usable_samples_are_those_of_a_loop(tmp_path, broken, names, share):
    cache = FeatureCache.open(make_store(tmp_path / "s.zarr", train=12, val=9, test=10, broken=broken))
    images, captions = cache.image_set(), cache.caption_set()
    split = Split.of(images, captions, *names).drawn(share)
    usable = [row for name in sorted(names, key=lambda name: cache.splits[name]) for row in range(*cache.splits[name])]
    usable = [row for row in usable if images.status[row] == OK]
    if share == 1:
        assert split.skipped == sum(
            cache.splits[name][0] <= row < cache.splits[name][1] for name in names for row in broken
        )
    else:
        assert {*split.images} < {*usable} and len(split.images) == round(share * len(usable))
        usable = [*split.images]
    assert split.image_rows.tolist() == usable
    spoken = [row for image in usable for row in range(*cache.captions_of(image, image + 1))]
    assert split.caption_rows.tolist() == spoken
    assert [usable[at] for at in split.caption_image] == cache.caption_image[spoken].tolist()
