"""Batches of logged groups: never parted, every row once an epoch, resumable. Not covered: a trainer that reads them."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import datasets
import pyarrow as pa
import pytest

from tridentrl.data.sampler import GroupedBatchSampler

GROUPS = {"a": 3, "b": 1, "c": 4, "d": 2, "e": 2, "f": 4}


def scattered() -> list[dict[str, Any]]:
    rows = [{"group_id": name, "text": f"{name}{number}"} for name, count in GROUPS.items() for number in range(count)]
    random.Random(0).shuffle(rows)
    return rows


def epoch(sampler: GroupedBatchSampler) -> list[list[int]]:
    """The batches up to the end of the epoch."""
    batches = [next(sampler)]
    while sampler.groups_taken < sampler.num_groups:
        batches.append(next(sampler))
    return batches


def test_groups_in_the_order_of_the_data_fill_batches_by_hand() -> None:
    rows = [{"prompt": prompt} for prompt in (7, 8, 7, 9, 8, 9, 9, 5)]
    sampler = GroupedBatchSampler(rows, 4, "prompt", shuffle=False)
    # 7 and 8 fill four rows, 9 and 5 the next four; with five rows 9 still does not fit beside 7 and 8.
    assert list(itertools.islice(sampler, 3)) == [[0, 2, 1, 4], [3, 5, 6, 7], [0, 2, 1, 4]]
    assert epoch(GroupedBatchSampler(rows, 5, "prompt", shuffle=False)) == [[0, 2, 1, 4], [3, 5, 6, 7]]
    assert epoch(GroupedBatchSampler(rows, 3, "prompt", shuffle=False)) == [[0, 2], [1, 4], [3, 5, 6], [7]]


@pytest.mark.parametrize("batch_size", [4, 5, 7, 100])
def test_scattered_groups_stay_whole_and_every_row_comes_once_an_epoch(batch_size: int) -> None:
    rows = scattered()
    sampler = GroupedBatchSampler(rows, batch_size, seed=3)
    orders = []
    for _ in range(5):
        batches = epoch(sampler)
        assert sorted(itertools.chain.from_iterable(batches)) == list(range(16))
        for batch, following in itertools.zip_longest(batches, batches[1:]):
            names = [rows[row]["group_id"] for row in batch]
            assert len(batch) <= batch_size and {name: names.count(name) for name in names}.items() <= GROUPS.items()
            if following:  # greedy: the next group would not have fitted
                assert len(batch) + GROUPS[rows[following[0]]["group_id"]] > batch_size
        orders.append([name for name, _ in itertools.groupby(rows[row]["group_id"] for batch in batches for row in batch)])
    assert len({tuple(order) for order in orders}) == 5
    again = GroupedBatchSampler(rows, batch_size, seed=3)
    assert [epoch(again) for _ in range(5)][-1] == batches
    assert GroupedBatchSampler(rows, batch_size, seed=4).order(0) != again.order(0)


def test_a_resumed_sampler_goes_on_in_the_middle_of_an_epoch_with_any_batch_size() -> None:
    rows = scattered()
    for stop in range(12):
        whole, resumed, wider = (GroupedBatchSampler(rows, size, seed=5) for size in (5, 5, 9))
        list(itertools.islice(whole, stop))
        state = json.loads(json.dumps(whole.state_dict()))
        resumed.load_state_dict(state)
        wider.load_state_dict(state)
        rest = epoch(whole) if 0 < whole.groups_taken < len(GROUPS) else []
        assert [next(resumed) for _ in rest] == rest
        # A larger batch size packs the same groups otherwise, in the same order.
        left = epoch(wider) if rest else []
        assert list(itertools.chain.from_iterable(left)) == list(itertools.chain.from_iterable(rest)) and len(left) <= len(rest)
        assert list(itertools.islice(resumed, 9)) == list(itertools.islice(whole, 9))


def test_a_state_of_other_data_is_refused() -> None:
    state = GroupedBatchSampler(scattered(), 5, seed=5).state_dict()
    with pytest.raises(ValueError, match="rows was 16 when it was saved and is 15"):
        GroupedBatchSampler(scattered()[1:], 5, seed=5).load_state_dict(state)
    regrouped = [{"group_id": number // 2} for number in range(16)]
    with pytest.raises(ValueError, match="groups was 6 when it was saved and is 8"):
        GroupedBatchSampler(regrouped, 5, seed=5).load_state_dict(state)
    with pytest.raises(ValueError, match="seed was 5"):
        GroupedBatchSampler(scattered(), 5, seed=6).load_state_dict(state)


def test_columns_and_rows_are_read_alike() -> None:
    rows = scattered()
    expected = epoch(GroupedBatchSampler(rows, 5))
    assert epoch(GroupedBatchSampler(pa.Table.from_pylist(rows), 5)) == expected
    assert epoch(GroupedBatchSampler(datasets.Dataset.from_list(rows), 5)) == expected


@pytest.mark.parametrize("make", [list, pa.Table.from_pylist])
def test_data_that_cannot_be_grouped_is_refused(make: Any) -> None:
    with pytest.raises(
        ValueError, match=r"the group group_id='f' has 4 rows, which do not fit into a batch of 3; set batch_size=4 or more"
    ):
        GroupedBatchSampler(make(scattered()), 3)
    with pytest.raises(ValueError, match="row 0 of the dataset has no prompt; set group_key"):
        GroupedBatchSampler(make(scattered()), 8, "prompt")
    with pytest.raises(ValueError, match="row 1 of the dataset has no group_id"):
        GroupedBatchSampler(make([{"group_id": 1}, {"group_id": None}]), 8)
    with pytest.raises(ValueError, match="no rows"):
        GroupedBatchSampler(make([]), 8)
