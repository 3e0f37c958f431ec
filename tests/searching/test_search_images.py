"""The images of a search: their order and shares, and views that are seen again, kept or read again."""

import os

import torch

from diffrate.data import UnreadableImageError
from diffrate.searching.images import SearchImages


def test_processes_share_each_held_out_batch(data):
    images = SearchImages(data, data, 0.5, 0)
    one = [batch.labels.tolist() for batch in images.held_out_batches(8, 0)]
    shares = [[b.labels.tolist() for b in images.held_out_batches(8, 0, process, 2)] for process in (0, 1)]
    for whole, a, b in zip(one, *shares, strict=True):
        assert sorted(whole) == sorted(a + b)


def test_order_depends_on_the_seed_alone_and_is_shared_by_processes(data):
    images = SearchImages(data, data, 0.2, seed=5)
    assert set(images.training) | set(images.held_out) == set(range(40))
    assert len(images.held_out) == 8
    whole = images.keys(3, 8)
    assert whole == SearchImages(data, data, 0.2, seed=5).keys(3, 8)
    assert whole != SearchImages(data, data, 0.2, seed=6).keys(3, 8)
    epoch = [index for step in range(4) for index, _ in images.keys(step, 8)]
    assert sorted(epoch) == images.training
    halves = [next(images.batches(3, 4, 8, 0, process, 2)).labels.tolist() for process in (0, 1)]
    together = next(images.batches(3, 4, 8, 0)).labels.tolist()
    assert [halves[i % 2][i // 2] for i in range(8)] == together


class Counted(torch.utils.data.Dataset):
    """Noise that differs at every look, unless it is seeded; item 3 cannot be read."""

    def __init__(self):
        self.looks = 0

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.looks += 1
        if index == 3:
            raise UnreadableImageError("cannot read the image 3.png: truncated")
        return torch.rand(3, 4, 4), index


def test_views_are_seen_again_and_read_once():
    data = Counted()
    images = SearchImages(data, data, 0.2, seed=1, views=2)
    assert 3 in images.training  # 32 images, 4 steps of 8 a pass
    batches = list(images.batches(0, 20, 8, 0))
    assert data.looks == 2 * 32 + 1  # both views of each, and one to see how large an image is
    assert sum(len(batch.unreadable) for batch in batches) == 5  # once in every pass
    seen = {}
    for number, batch in enumerate(batches):
        for image, label in zip(batch.images, batch.labels.tolist(), strict=True):
            view = seen.setdefault((label, number // 4 % 2), image)
            assert torch.equal(image, view)
    assert not any(torch.equal(seen[label, 0], seen[label, 1]) for label, _ in seen)
    fresh = SearchImages(Counted(), Counted(), 0.2, seed=1, views=2)
    for ours, resumed in zip(batches[13:], fresh.batches(13, 20, 8, 0), strict=True):
        assert torch.equal(ours.images, resumed.images)


def test_views_that_do_not_come_again_are_not_kept():
    images = SearchImages(Counted(), Counted(), 0.2, seed=1, views=4)
    assert len(list(images.batches(0, 16, 8, 0))) == 16  # four passes over 32 images: each view once
    assert not images.kept
    list(images.batches(0, 18, 8, 0))
    assert len(images.kept) == 16


def test_kept_views_hold_no_files_open():
    """A worker sends shared memory, a file for each tensor; systems allow 1,024 of them, and a search keeps 4,000."""
    images = SearchImages(Counted(), Counted(), 0.2, seed=1, views=4)
    before = len(os.listdir("/proc/self/fd"))
    batches = images.batches(0, 32, 8, workers=1)  # twice four passes
    for _ in range(17):
        next(batches)
    assert len(images.kept) == 4 * 32
    assert len(os.listdir("/proc/self/fd")) < before + 40  # the worker's own


def test_what_does_not_fit_into_memory_is_read_again(monkeypatch):
    monkeypatch.setattr("diffrate.searching.images.MEMORY", 10 * 3 * 4 * 4 * 4)  # ten images
    data = Counted()
    images = SearchImages(data, data, 0.2, seed=1, views=1)
    whole = SearchImages(Counted(), Counted(), 0.2, seed=1, views=1)
    monkeypatch.setattr(whole, "room", 2**30)
    for ours, theirs in zip(images.batches(0, 8, 8, 0), whole.batches(0, 8, 8, 0), strict=True):
        assert torch.equal(ours.images, theirs.images)
        assert ours.unreadable == theirs.unreadable
    assert len(images.kept) <= 11  # one of them perhaps unreadable, which takes no room
    assert data.looks == 1 + 32 + (32 - len(images.kept))
