import os
import pickle
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from sigma_nens_hf.prefix_cache import PART_SIZE, PrefixCache, size_in_bytes

NUM_EXAMPLES = 2 * PART_SIZE + 7


def rows_of(index):
    return torch.full((1 + index % 5, 3), float(index)) + torch.arange(3)


def write(cache, parts=None):
    for part in cache.missing_parts() if parts is None else parts:
        cache.write_part(part, [rows_of(i) for i in part], {"labels": [torch.tensor(i) for i in part]})


@pytest.fixture
def cache(tmp_path):
    cache = PrefixCache(tmp_path, "key", NUM_EXAMPLES)
    write(cache)
    return cache


def test_every_example_comes_back_with_what_is_kept_beside_it(cache):
    assert cache.missing_parts() == []
    assert len(list(cache.folder.iterdir())) == 3
    for index in (*range(8), PART_SIZE - 1, PART_SIZE, 2 * PART_SIZE, NUM_EXAMPLES - 1):
        rows, extras = cache[index]
        assert torch.equal(rows, rows_of(index))
        assert extras.keys() == {"labels"}
        assert torch.equal(extras["labels"], torch.tensor(index))


def test_every_precision_is_kept(tmp_path):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        cache = PrefixCache(tmp_path, str(dtype), 2)
        cache.write_part(range(2), [torch.ones(1, 4, 2, dtype=dtype) / 3] * 2, {})
        assert torch.equal(cache[1][0], torch.ones(1, 4, 2, dtype=dtype) / 3)
        assert cache[1][0].dtype == dtype


def test_new_cache_misses_everything_and_makes_no_folder(tmp_path):
    cache = PrefixCache(tmp_path / "nowhere", "key", NUM_EXAMPLES)
    assert [len(part) for part in cache.missing_parts()] == [PART_SIZE, PART_SIZE, 7]
    cache.remove_unfinished()
    assert not (tmp_path / "nowhere").exists()


def damage_empty(path):
    path.write_bytes(b"")


def damage_truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def damage_zeros(path):
    path.write_bytes(bytes(len(path.read_bytes())))


def damage_text(path):
    path.write_text("not a part")


def damage_foreign(path):
    save_file({"weight": torch.zeros(3)}, path)


def damage_foreign_with_the_same_names(path):
    save_file(load_file(path), path)


def damage_remove(path):
    path.unlink()


def damage_other_part(path):
    shutil.copy(path.with_name("part-000000.safetensors"), path)


@pytest.mark.parametrize(
    "damage",
    [
        damage_empty, damage_truncate, damage_zeros, damage_text, damage_foreign, damage_foreign_with_the_same_names,
        damage_remove, damage_other_part,
    ],
)  # fmt: skip
def test_part_that_is_not_whole_is_missing_and_written_again(damage, cache):
    path = cache.folder / "part-000001.safetensors"
    whole = path.read_bytes()
    damage(path)
    again = PrefixCache(cache.folder.parent, "key", NUM_EXAMPLES)
    assert again.missing_parts() == [range(PART_SIZE, 2 * PART_SIZE)]
    write(again)
    assert again.missing_parts() == []
    assert path.read_bytes() == whole


def test_parts_of_another_cache_or_of_fewer_examples_are_not_taken(cache):
    shutil.copytree(cache.folder, cache.folder.with_name("other"))
    assert len(PrefixCache(cache.folder.parent, "other", NUM_EXAMPLES).missing_parts()) == 3
    fewer = PrefixCache(cache.folder.parent, "key", NUM_EXAMPLES - 1)
    assert fewer.missing_parts() == [range(2 * PART_SIZE, NUM_EXAMPLES - 1)]


def test_killed_while_a_part_is_written(tmp_path, monkeypatch):
    cache = PrefixCache(tmp_path, "key", NUM_EXAMPLES)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write(cache)
    assert list(cache.folder.iterdir()) == []
    assert len(cache.missing_parts()) == 3


def test_leftovers_are_removed_but_not_what_another_build_is_writing(cache):
    old, new = cache.folder / "old.unfinished", cache.folder / "new.unfinished"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    cache.remove_unfinished()
    assert not old.exists()
    assert new.exists()
    assert cache.missing_parts() == []


def test_copy_for_a_worker_opens_files_of_its_own(cache):
    assert torch.equal(cache[3][0], rows_of(3))
    copy = pickle.loads(pickle.dumps(cache))
    assert copy._files == {}
    assert torch.equal(copy[3][0], rows_of(3))


def test_open_parts_hold_no_file_descriptors(tmp_path):
    cache = PrefixCache(tmp_path, "key", 20 * PART_SIZE)
    for part in cache.missing_parts():
        cache.write_part(part, [torch.zeros(1, 1)] * len(part), {})
    before = len(os.listdir("/proc/self/fd"))
    for start in range(0, 20 * PART_SIZE, PART_SIZE):
        cache[start]
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_size_is_that_of_all_rows():
    row = torch.zeros(4, 8, dtype=torch.bfloat16)
    assert size_in_bytes(iter([3, 5]), row) == 8 * 4 * 8 * 2
