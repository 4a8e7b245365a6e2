"""The batch cache: rows of different lengths join, leave and are copied with the values they had."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlmrl.engine.hf.kv_cache import BatchCache, GrowingLayer, nbytes

CPU = torch.device("cpu")


def row(*values: float) -> BatchCache:
    """Two layers of one head and one dimension: keys as given, values negative, the second layer ten times as large."""
    keys = torch.tensor(values)[None, None, :, None]
    layers = [GrowingLayer(keys, -keys), GrowingLayer(keys * 10, keys * -10)]
    return BatchCache(layers, torch.ones(1, len(values), dtype=torch.bool))


def rows(*parts: BatchCache) -> BatchCache:
    """The parts' rows joined; the parts stay as they are."""
    return BatchCache.join([part.select(range(len(part.valid))) for part in parts])


def rows_of(cache: BatchCache) -> list[list[float]]:
    """The keys that each row holds, after checking that values and second layer have moved along."""
    found = []
    for index in range(len(cache.valid)):
        columns = cache.valid[index].nonzero().flatten()
        (keys, values), (more_keys, more_values) = (
            (layer.keys[index][:, columns], layer.values[index][:, columns]) for layer in cache.layers
        )
        assert torch.equal(values, -keys)
        assert torch.equal(more_keys, keys * 10)
        assert torch.equal(more_values, keys * -10)
        found.append(keys[0, :, 0].tolist())
    return found


def grow(cache: BatchCache, new: Sequence[Sequence[float]], valid: Sequence[Sequence[int]]) -> None:
    """One forward's worth of new columns."""
    keys = torch.tensor(new, dtype=torch.float32)[:, None, :, None]
    cache.extend(torch.tensor(valid, dtype=torch.bool))
    for layer, factor in enumerate((1, 10)):
        cache.hf.update(keys * factor, -keys * factor, layer)


def test_rows_of_different_lengths_stand_right_aligned():
    cache = rows(row(1, 2, 3), row(7))
    assert cache.valid.tolist() == [[True, True, True], [False, False, True]]
    assert cache.hf.layers[0].keys[:, 0, :, 0].tolist() == [[1, 2, 3], [0, 0, 7]]
    assert rows_of(cache) == [[1, 2, 3], [7]]
    assert cache.columns == cache.hf.get_seq_length() == 3


def test_a_cache_grows_from_nothing_and_padding_is_no_token():
    cache = BatchCache.empty(["full_attention"] * 2, 2, CPU)
    assert cache.columns == 0
    grow(cache, [[0, 5], [6, 7]], [[0, 1], [1, 1]])
    grow(cache, [[8], [9]], [[1], [1]])
    assert rows_of(cache) == [[5, 8], [6, 7, 9]]
    assert cache.hf.get_seq_length() == 3


def test_joined_rows_follow_with_their_own_values():
    long, short = rows(row(1, 2, 3, 4), row(5)), rows(row(6, 7))
    assert rows_of(rows(long, short)) == [[1, 2, 3, 4], [5], [6, 7]]
    joined = rows(short, long)
    assert joined.valid.tolist() == [[False, False, True, True], [True] * 4, [False, False, False, True]]
    grow(joined, [[8], [9], [10]], [[1], [1], [1]])
    assert rows_of(joined) == [[6, 7, 8], [1, 2, 3, 4, 9], [5, 10]]


def test_selected_rows_are_copies_packed_tight():
    cache = rows(row(1, 2, 3), row(4), row(5, 6))
    grow(cache, [[0, 7], [0, 8], [9, 10]], [[0, 1], [0, 1], [1, 1]])  # holes in the first two rows
    chosen = cache.select([1, 1, 2])
    assert rows_of(chosen) == [[4, 8], [4, 8], [5, 6, 9, 10]]
    assert chosen.columns == 4
    assert chosen.hf.layers[0].keys[0, 0, :, 0].tolist()[2:] == [4, 8]  # no hole is left between them
    assert cache.select([1]).columns == 2
    grow(chosen, [[11], [12], [13]], [[1], [1], [1]])
    assert rows_of(chosen) == [[4, 8, 11], [4, 8, 12], [5, 6, 9, 10, 13]]
    assert rows_of(cache) == [[1, 2, 3, 7], [4, 8], [5, 6, 9, 10]]


def test_a_kept_row_is_not_changed_by_what_the_batch_does_next():
    cache = rows(row(1, 2), row(3))
    grow(cache, [[4], [5]], [[1], [1]])
    kept = cache.taken([0])
    grow(cache, [[6], [7]], [[1], [1]])
    assert rows_of(kept) == [[1, 2, 4]]
    assert rows_of(rows(kept, row(9))) == [[1, 2, 4], [9]]


def test_all_rows_of_a_well_packed_cache_are_taken_without_a_copy():
    cache = rows(row(1, 2, 3, 4), row(5, 6, 7, 8))
    assert cache.taken([0, 1]) is cache
    assert rows_of(cache.taken([1, 0])) == [[5, 6, 7, 8], [1, 2, 3, 4]]
    grow(cache, [[0, 0], [0, 9]], [[0, 0], [0, 1]])  # six columns for five tokens at most
    assert cache.taken([0, 1]) is cache
    grow(cache, [[0], [0]], [[0], [0]])
    packed = cache.taken([0, 1])
    assert packed is not cache
    assert (packed.columns, rows_of(packed)) == (5, [[1, 2, 3, 4], [5, 6, 7, 8, 9]])


def test_a_layer_keeps_its_values_over_many_tokens_and_copies_them_seldom():
    layer = GrowingLayer()
    places = set()
    for token in range(300):
        keys, values = layer.update(torch.full((2, 1, 1, 1), float(token)), torch.full((2, 1, 1, 1), -float(token)))
        places.add(keys.data_ptr())
        assert keys.shape == (2, 1, token + 1, 1)
    assert keys[1, 0, :, 0].tolist() == [float(token) for token in range(300)]
    assert values[0, 0, :, 0].tolist() == [-float(token) for token in range(300)]
    assert len(places) < 8


def test_a_layer_takes_more_at_once_than_it_has_room_for():
    layer = GrowingLayer(torch.ones(1, 1, 2, 1), -torch.ones(1, 1, 2, 1))
    keys, _ = layer.update(torch.arange(500.0)[None, None, :, None], torch.arange(500.0)[None, None, :, None])
    assert keys[0, 0, :, 0].tolist() == [1.0, 1.0, *map(float, range(500))]


def prompts(*parts: BatchCache, owners: Sequence[int]) -> BatchCache:
    """Rows that begin with these prompts, without a token of their own."""
    return rows(*parts).share(owners)


def whole_rows_of(cache: BatchCache) -> list[list[float]]:
    """The keys of each row's prefix, then its own."""
    prefixes = cache.prefixes
    assert prefixes is not None
    found = []
    for owner, own in zip(cache.owners, rows_of(cache), strict=True):
        shown = prefixes.valid[owner]
        (keys, values), (more_keys, _) = (layer for layer in prefixes.layers if layer is not None)
        assert torch.equal(values[owner][:, shown], -keys[owner][:, shown])
        assert torch.equal(more_keys[owner][:, shown], keys[owner][:, shown] * 10)
        found.append(keys[owner, 0, shown, 0].tolist() + own)
    return found


def test_a_prompt_is_held_once_for_the_rows_that_begin_with_it():
    cache = prompts(row(1, 2, 3), row(4), owners=[0, 0, 1, 0])
    assert whole_rows_of(cache) == [[1, 2, 3], [1, 2, 3], [4], [1, 2, 3]]
    assert (cache.columns, cache.prefix_columns) == (0, 3)
    assert cache.nbytes == 2 * 3 * 2 * 2 * 8  # prompts, columns, keys and values, layers, bytes: no row has its own
    grow(cache, [[5], [6], [7], [8]], [[1], [1], [1], [1]])
    assert whole_rows_of(cache) == [[1, 2, 3, 5], [1, 2, 3, 6], [4, 7], [1, 2, 3, 8]]


def test_rows_that_stay_hold_no_prompt_of_those_that_left():
    cache = prompts(row(1, 2, 3), row(4), owners=[0, 0, 1, 0])
    kept = cache.taken([0, 2])
    assert kept.prefixes is not None and cache.prefixes is not None
    assert nbytes([cache, kept]) == cache.nbytes  # a kept row copies no prompt
    left = cache.taken([3, 1], consume=True)
    assert left.prefixes is not None and len(left.prefixes.names) == 1
    assert whole_rows_of(left) == [[1, 2, 3], [1, 2, 3]]
    assert whole_rows_of(kept) == [[1, 2, 3], [4]]


def test_copied_rows_hold_no_more_than_their_own_prompts_however_many_rows_leave_one_by_one():
    running = prompts(*(row(*range(1, 3 + count % 3)) for count in range(8)), owners=list(range(8)))
    expected, left = whole_rows_of(running), []
    while len(running.owners) > 1:
        left.append(running.copied([0], [each.prefixes for each in left if each.prefixes is not None]))
        running = running.taken(range(1, len(running.owners)), consume=True)
    assert [whole_rows_of(each) for each in left] == [[one] for one in expected[:-1]]
    assert nbytes(left) == sum(map(len, expected[:-1])) * 2 * 2 * 8  # keys and values, layers, bytes


def test_members_that_are_copied_one_by_one_share_their_prompt():
    running = prompts(row(1, 2, 3), row(4), owners=[0, 0, 1, 0])
    grow(running, [[5], [6], [7], [8]], [[1], [1], [1], [1]])
    first = running.copied([0], [])
    second = running.copied([3], [first.prefixes] if first.prefixes is not None else [])
    # The prompt is of 8-byte numbers here, the rest of 4-byte ones.
    assert nbytes([first, second]) == (3 * 8 + 2 * 4) * 2 * 2
    joined = BatchCache.join([first.taken([0]), second.taken([0])])
    assert whole_rows_of(joined) == [[1, 2, 3, 5], [1, 2, 3, 8]]
    assert whole_rows_of(running) == [[1, 2, 3, 5], [1, 2, 3, 6], [4, 7], [1, 2, 3, 8]]


def test_joined_rows_find_their_prompts_without_a_copy_if_they_had_the_same():
    cache = prompts(row(1, 2, 3), row(4), owners=[0, 0, 1])
    grow(cache, [[5], [6], [7]], [[1], [1], [1]])
    places = [layer[0].data_ptr() for layer in cache.prefixes.layers]
    joined = BatchCache.join([cache.select([2, 0]), cache.select([1])])
    assert whole_rows_of(joined) == [[4, 7], [1, 2, 3, 5], [1, 2, 3, 6]]
    assert [layer[0].data_ptr() for layer in joined.prefixes.layers] == places


def test_joined_rows_of_different_prompts_have_all_of_them_and_no_other():
    one, other = prompts(row(1, 2), row(3), owners=[0, 1]), prompts(row(4, 5, 6), row(7), owners=[1, 0])
    joined = BatchCache.join([one.select([1]), other])
    assert whole_rows_of(joined) == [[3], [7], [4, 5, 6]]
    assert len(joined.prefixes.names) == 3
    grow(joined, [[8], [9], [10]], [[1], [1], [1]])
    assert whole_rows_of(joined) == [[3, 8], [7, 9], [4, 5, 6, 10]]
