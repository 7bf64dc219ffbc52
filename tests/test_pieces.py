"""Box arithmetic against numpy indexing."""

import itertools

import numpy as np
import pytest

from tridentrl.weights.pieces import Piece, clip, intersect, locate, shape_of, shift, slices, volume, whole


def test_intersection_holds_exactly_the_common_elements() -> None:
    ids = np.arange(20).reshape(4, 5)
    ranges = [(0, 2), (1, 4), (2, 3), (3, 4)]
    boxes = list(itertools.product(ranges, ranges))
    for a, b in itertools.product(boxes, boxes):
        expected = set(ids[slices(a)].flat) & set(ids[slices(b)].flat)
        common = intersect(a, b)
        assert (set() if common is None else set(ids[slices(common)].flat)) == expected
        assert (0 if common is None else volume(common)) == len(expected)


def test_boxes_that_only_touch_do_not_intersect() -> None:
    assert intersect(((0, 2), (0, 5)), ((2, 4), (0, 5))) is None


def test_boxes_of_different_dims_are_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"zip\(\)"):
        intersect(((0, 2),), ((0, 2), (0, 2)))


def test_shape_shift_and_whole() -> None:
    assert shape_of(((2, 5), (1, 2))) == (3, 1)
    assert shift(((2, 5), (1, 2)), (-2, 10)) == ((0, 3), (11, 12))
    assert whole((3, 7)) == ((0, 3), (0, 7))


def test_a_clipped_piece_still_says_where_its_elements_lie() -> None:
    hf = np.arange(48).reshape(6, 8)
    local = np.zeros((10, 10), dtype=int)
    piece = Piece("w", ((2, 6), (0, 8)), "l", ((5, 9), (1, 9)))
    local[slices(piece.local_box)] = hf[slices(piece.hf_box)]
    part = clip(piece, ((0, 4), (3, 5)))
    assert part is not None
    assert part.hf_box == ((2, 4), (3, 5))
    assert part.local_box == ((5, 7), (4, 6))
    assert np.array_equal(local[slices(part.local_box)], hf[slices(part.hf_box)])
    assert locate(piece, ((3, 4), (7, 8))) == ((6, 7), (8, 9))
    assert clip(piece, ((0, 2), (0, 8))) is None
