import io
import itertools
import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from geodl.app import quick
from geodl.core.errors import ConfigError, DataError
from geodl.core.keys import derive
from geodl.data import ArrayImages, Batches, FileImages, Transform, evaluation, resized, squares
from geodl.data.batches import RATIO, SCALE, random_box
from geodl.data.trivial import trivial

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.5)
PLAIN = Transform(8, (0.0, 0.0, 0.0), (1 / 255,) * 3)
"""Returns the pixels unchanged, in 0..255."""


def small(count=20, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(1, 256, (count, 3, size, size), generator=generator)
    return ArrayImages(pixels.to(torch.uint8), torch.arange(count) % 7)


def photos(count=6, seed=0):
    """Pictures of different sizes, as encoded files."""
    random = np.random.default_rng(seed)
    items = []
    for i in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        coarse.resize((30 + 7 * i, 40 + 3 * i)).save(buffer, format="JPEG" if i % 2 else "PNG")
        items.append(buffer.getvalue())
    return FileImages(tuple(items), torch.arange(count))


def plain(**options):
    return replace(PLAIN, **options)


def collect(batches, epoch=0, start=0):
    return list(batches.epoch(epoch, start))


def same(one, other):
    return len(one) == len(other) and all(
        torch.equal(a.images, b.images)
        and torch.equal(a.labels, b.labels)
        and torch.equal(a.indices, b.indices)
        for a, b in zip(one, other, strict=True)
    )


# ------------------------------------------------------------------------------------------------ content of a batch


def test_form_of_a_batch():
    images = small()
    transform = Transform(8, MEAN, STD, padding=0, flip=False)
    batch = next(Batches(images, transform, 6, seed=0).epoch(0))
    assert (batch.images.shape, batch.images.dtype) == ((6, 3, 8, 8), torch.float32)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch.labels, images.labels[batch.indices])
    assert batch.size == 6
    pixels = images.pixels[batch.indices].double().numpy()
    expected = (pixels / 255 - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))
    assert np.allclose(batch.images, expected, atol=1e-5)


def test_an_epoch_has_every_image_once_and_epochs_differ():
    batches = Batches(small(), PLAIN, 6, seed=0)
    orders = [torch.cat([batch.indices for batch in batches.epoch(e)]).tolist() for e in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20))
    assert orders[0] != orders[1]


def test_every_image_is_a_shifted_perhaps_mirrored_copy_with_black_around():
    images, transform = small(60), plain(padding=2)
    seen = set()
    for batch in Batches(images, transform, 20, seed=3).epoch(0):
        for x, i in zip(batch.images.numpy(), batch.indices.tolist(), strict=True):
            black = np.pad(images.pixels[i].numpy(), ((0, 0), (2, 2), (2, 2)))
            matches = []
            for top, left, flip in itertools.product(range(5), range(5), (1, -1)):
                crop = black[:, top : top + 8, left : left + 8][:, :, ::flip]
                if np.allclose(crop, x, atol=1e-3):
                    matches.append((top, left, flip))
            assert len(matches) == 1
            seen.add(matches[0])
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == set(range(5))
    assert {flip for _, _, flip in seen} == {1, -1}


def numbers(columns, purpose):
    """Draw the numbers of 20 images in the first step of seed 0."""
    generator = torch.Generator().manual_seed(derive(0, purpose, 0, 0))
    return torch.rand(20, columns, dtype=torch.float64, generator=generator)


def jittered(x, brightness, contrast, saturation):
    """Color jitter of one image (3, H, W) in 0..255, from the definition."""
    grey = np.array([0.299, 0.587, 0.114])
    x = np.clip(x * brightness, 0, 255)
    x = np.clip(contrast * x + (1 - contrast) * np.tensordot(grey, x, 1).mean(), 0, 255)
    return np.clip(saturation * x + (1 - saturation) * np.tensordot(grey, x, 1), 0, 255)


def test_color_jitter():
    batches = Batches(small(), plain(padding=0, flip=False, jitter=0.25), 20, seed=0)
    batch = next(batches.epoch(0))
    drawn = numbers(26, "augment")
    factors = 0.75 + 0.5 * drawn[:, 3:6].numpy()
    assert 0.75 <= factors.min() < 0.8
    assert 1.2 < factors.max() <= 1.25
    for x, i, three in zip(batch.images.numpy(), batch.indices, factors, strict=True):
        assert np.allclose(x, jittered(small().pixels[i].double().numpy(), *three), atol=1e-2)


@pytest.mark.parametrize("crop", ["pad", "resized"])
def test_trivial_augment_is_that_of_pillow_after_crop_and_flip(crop):
    before = next(Batches(small(), plain(crop=crop), 20, seed=0).epoch(0))
    after = next(Batches(small(), plain(crop=crop, augment="trivial"), 20, seed=0).epoch(0))
    assert torch.equal(before.indices, after.indices)
    drawn = numbers(3, "trivial")
    for x, y, three in zip(before.images, after.images, drawn.tolist(), strict=True):
        picture = Image.fromarray(x.round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy())
        expected = np.asarray(trivial(picture, three))
        assert np.allclose(expected, y.permute(1, 2, 0).numpy(), atol=1e-2)


# --------------------------------------------------------------------------------- independence and resuming


def test_augmentation_is_new_with_each_seed_epoch_and_step_and_the_global_state_does_not_matter():
    alone = small(1)  # one image has one order
    torch.manual_seed(0)
    one = collect(Batches(small(), PLAIN, 6, seed=0))
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert same(one, collect(Batches(small(), PLAIN, 6, seed=0)))
    assert torch.equal(state, torch.get_rng_state())

    def drawn(seed, e):
        return next(Batches(alone, PLAIN, 1, seed).epoch(e)).images.numpy().tobytes()

    assert len({drawn(seed, 0) for seed in range(8)}) > 4
    assert len({drawn(0, e) for e in range(8)}) > 4
    first, second = collect(Batches(alone.select([0] * 16), PLAIN, 8, seed=0))
    assert not torch.equal(first.images, second.images)


@pytest.mark.parametrize("crop", ["pad", "resized"])
def test_resuming_an_epoch_changes_nothing(crop):
    for images in (small(), photos()):
        batches = Batches(images, plain(crop=crop), 3, seed=0)
        for start in range(len(batches) + 1):
            assert same(collect(batches)[start:], collect(batches, start=start))


@pytest.mark.parametrize("crop", ["pad", "resized"])
def test_the_number_of_threads_changes_no_pixel(crop):
    transform = plain(crop=crop, jitter=0.2)
    alone = collect(Batches(photos(), transform, 2, seed=0))
    in_order = list(evaluation(photos(), transform, batch_size=2))
    for workers in (1, 3):
        assert same(alone, collect(Batches(photos(), transform, 2, seed=0, workers=workers)))
        assert same(in_order, list(evaluation(photos(), transform, batch_size=2, workers=workers)))


@given(
    count=st.integers(8, 60),
    batch_size=st.sampled_from([16, 20, 32]),
    world=st.integers(1, 2),
    epoch=st.integers(0, 3),
)
@settings(max_examples=30)
def test_shares_make_up_the_batch_of_one_process(count, batch_size, world, epoch):
    images = small(count)
    whole = collect(Batches(images, PLAIN, batch_size, 0), epoch)
    ranks = [Batches(images, PLAIN, batch_size, 0, rank=r, world=world) for r in range(world)]
    shares = [collect(rank, epoch) for rank in ranks]
    assert {len(share) for share in shares} == {len(whole)}
    for step, batch in enumerate(whole):
        parts = [share[step] for share in shares]
        assert torch.equal(torch.cat([part.images for part in parts]), batch.images)
        assert torch.equal(torch.cat([part.indices for part in parts]), batch.indices)
        assert {part.size for part in parts} == {batch.size}
        sizes = [len(part.labels) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1


@pytest.mark.parametrize(
    ("count", "batch_size", "world", "sizes"),
    [
        (19, 6, 1, [6, 6, 7]),  # one is too few for a batch
        (20, 6, 1, [6, 6, 6, 2]),
        (21, 6, 1, [6, 6, 6, 3]),
        (21, 6, 2, [6, 6, 9]),  # 3 are too few for two processes
        (103, 32, 1, [32, 32, 39]),  # below a quarter
        (104, 32, 1, [32, 32, 32, 8]),
        (104, 32, 4, [32, 32, 32, 8]),  # the same whatever the number of processes
        (18, 6, 1, [6, 6, 6]),
        (1, 6, 1, [1]),
    ],
)
def test_remainders(count, batch_size, world, sizes):
    batches = Batches(small(count), PLAIN, batch_size, 0, world=world)
    assert [batch.size for batch in batches.epoch(0)] == sizes
    assert len(batches) == len(sizes)


def test_too_few_images_for_the_processes():
    with pytest.raises(ConfigError, match="batch_size = 2"):
        Batches(small(), PLAIN, 2, 0, world=3)
    with pytest.raises(DataError, match="2 training images"):
        Batches(small(2), PLAIN, 8, 0, world=3)


# --------------------------------------------------------------------------------------------------------- files


def test_resized_images_equal_those_of_the_transform():
    fitted = resized(photos(), 8, workers=2)
    assert fitted.pixels.shape == (6, 3, 8, 8)
    assert torch.equal(fitted.labels, photos().labels)
    assert same(collect(Batches(fitted, PLAIN, 3, 0)), collect(Batches(photos(), PLAIN, 3, 0)))
    assert same(list(evaluation(fitted, PLAIN)), list(evaluation(photos(), PLAIN)))
    assert resized(photos().select([]), 8).pixels.shape == (0, 3, 8, 8)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("size", [8, 33])
def test_one_picture_alone_is_the_same_square(tmp_path, size, whole):
    """To learn, to predict, and to predict without torch."""
    for images in (photos(), small(3), small(3, size=size)):
        wanted = resized(images, size, whole=whole).pixels
        for i, pixels in enumerate(wanted):
            assert torch.equal(squares.square(images, i, size, whole), pixels)
            file = tmp_path / f"{i}.png"
            file.write_bytes(images.encoded(i))
            alone = quick.seen(file, quick.About((), size, whole, 0.0))
            assert torch.equal(torch.tensor(alone), pixels)


def one(pixels):
    """Return an image (3, H, W) alone."""
    return ArrayImages(pixels[None].contiguous(), torch.tensor([0]))


def stripes():
    """Return an image of 24 x 8 pixels: a third red, a third green, a third blue."""
    pixels = np.zeros((8, 24, 3), dtype=np.uint8)
    for channel in range(3):
        pixels[:, 8 * channel : 8 * channel + 8, channel] = 255
    return one(torch.from_numpy(pixels).permute(2, 0, 1))


def test_test_time_resize_then_centre():
    middle = next(evaluation(stripes(), PLAIN)).images[0]  # not distorted
    assert middle[1].min() > 254
    assert middle[[0, 2]].max() < 1
    images = one(torch.arange(0, 160, 10, dtype=torch.uint8).expand(3, 16, 16))
    batch = next(evaluation(images, Transform(14, PLAIN.mean, PLAIN.std, crop="resized")))
    assert torch.allclose(batch.images[0], images.pixels[0, :, 1:15, 1:15].float(), atol=1e-3)
    assert Transform(224, MEAN, STD, crop="resized").shorter_side == 256
    assert plain().shorter_side == 8


@given(
    st.integers(1, 400),
    st.integers(1, 400),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=26, max_size=26),
)
def test_random_parts_lie_inside_and_have_allowed_shapes(width, height, numbers):
    left, top, right, bottom = random_box(width, height, numbers)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    short, long = sorted((width, height))
    if short >= 100 and long <= 4 / 3 * short:  # rounding matters little
        w, h = right - left, bottom - top
        assert SCALE[0] * 0.95 <= w * h / (width * height) <= 1
        assert RATIO[0] * 0.95 <= w / h <= RATIO[1] * 1.05


def test_random_parts_are_spread_over_the_picture():
    numbers = torch.rand((2000, 26), generator=torch.Generator().manual_seed(0)).tolist()
    boxes = np.array([random_box(200, 100, row) for row in numbers])
    centre = (boxes[:, :2] + boxes[:, 2:]).mean(axis=0) / 2
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / 20000
    assert np.allclose(centre, [100, 50], atol=4)
    assert areas.min() < 0.1
    assert areas.max() > 0.6


def test_a_resized_part_comes_from_the_picture():
    batch = next(Batches(stripes(), plain(crop="resized", flip=False), 1, 0).epoch(0))
    total = batch.images[0].sum(dim=0)  # any mixture of the stripes sums to 255
    assert torch.allclose(total, torch.full((8, 8), 255.0), atol=2)


def test_extreme_shapes():
    for width, height in ((1, 1), (1, 3000), (3000, 1)):
        images = one(torch.full((3, height, width), 9, dtype=torch.uint8))
        for crop in ("pad", "resized"):
            transform = plain(crop=crop, padding=0)
            found = next(evaluation(images, transform)).images
            assert torch.allclose(found, torch.full((1, 3, 8, 8), 9.0), atol=1e-3)
            assert next(Batches(images, transform, 1, 0).epoch(0)).images.shape == (1, 3, 8, 8)


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_files_are_named(tmp_path, workers):
    path = tmp_path / "broken.jpg"
    path.write_bytes(b"nothing")
    images = FileImages((*photos().items, path), torch.arange(7))
    with pytest.raises(DataError, match=r"broken\.jpg: not an image"):
        collect(Batches(images, PLAIN, 2, 0, workers=workers))


def test_stopping_early_ends_the_threads():
    before = threading.active_count()
    iterator = Batches(photos(), PLAIN, 2, 0, workers=3).epoch(0)
    next(iterator)
    assert threading.active_count() > before
    iterator.close()
    assert threading.active_count() == before


# ------------------------------------------------------------------------------------------------------ evaluation


@pytest.mark.parametrize("world", [1, 2, 3, 30])
def test_evaluation_shares_in_the_order_of_ranks_are_the_unchanged_images(world):
    batches = []
    for rank in range(world):
        batches += evaluation(small(), PLAIN, batch_size=6, rank=rank, world=world)
    assert torch.cat([batch.indices for batch in batches]).tolist() == list(range(20))
    images = torch.cat([batch.images for batch in batches])
    assert torch.allclose(images, small().pixels.float(), atol=1e-3)
    assert all(batch.images.is_contiguous(memory_format=torch.channels_last) for batch in batches)


def test_mirror_images_truly_mirror():
    """A public implementation reversed the channels instead."""
    pixels = torch.tensor([[[1, 2]], [[3, 4]], [[5, 6]]], dtype=torch.uint8).expand(3, 2, 2)
    transform = Transform(2, PLAIN.mean, PLAIN.std)
    batch = next(evaluation(one(pixels), transform, mirror=True))
    expected = torch.tensor([[2.0, 1.0], [4.0, 3.0], [6.0, 5.0]])
    assert torch.allclose(batch.images[0, :, 0], expected, atol=1e-4)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)


# -------------------------------------------------------------------------------------------------------- transform


def test_transforms_survive_json():
    more = {"padding": 2, "flip": False, "jitter": 0.25, "crop": "resized"}
    transform = Transform(32, MEAN, STD, **more)
    stored = json.loads(json.dumps(transform.to_dict()))
    assert Transform.from_dict(stored) == transform
    assert Transform.from_dict(stored | {"resize": None}) == transform  # of an earlier version
