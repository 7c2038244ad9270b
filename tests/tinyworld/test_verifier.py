import io

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from tinyworld import verifier


def accuracy(pictures, captions):
    return {key: value["accuracy"] for key, value in verifier.score(pictures, captions).items()}


@pytest.mark.soak
def test_true_scenes(true_scenes):
    pictures, texts, _ = true_scenes
    result = verifier.score(pictures, texts)
    assert set(result) == {*verifier.ATTRIBUTES, "where"}
    for attribute, figures in result.items():
        assert figures["accuracy"] >= 0.995, (attribute, figures)
        assert figures["asked"] > 300, (attribute, figures)


def ruined(kind, pictures):
    rng = np.random.default_rng(0)
    shape = pictures.shape
    if kind == "noise":
        return rng.integers(0, 256, shape, dtype=np.uint8)
    if kind == "black":
        return np.zeros(shape, np.uint8)
    if kind == "gray":
        return np.full(shape, 172, np.uint8)
    if kind == "red":
        return np.broadcast_to(np.array([222, 38, 38], np.uint8), shape)
    clouds = ndimage.gaussian_filter(rng.normal(size=shape), (0, 8, 8, 0)) * 800 + 128
    return np.clip(clouds, 0, 255).astype(np.uint8)


@pytest.mark.parametrize("kind", ["noise", "black", "gray", "red", "clouds"])
@pytest.mark.long
@pytest.mark.exhaustive("noise", "black", "red")
def test_ruined_pictures_score_nothing(true_scenes, kind):
    pictures, texts, _ = true_scenes
    result = accuracy(ruined(kind, pictures[:60]), texts[:60])
    allowed = 0.15 if kind == "clouds" else 0.0  # a cloud may have a colour, a size and a place
    for attribute in ("colour", "size", "where", "background"):
        assert result[attribute] <= allowed, result
    for attribute in ("shape", "binding", "everything"):
        assert result[attribute] == 0, result


@pytest.mark.long
def test_pictures_of_other_captions_score_as_chance(true_scenes):
    pictures, texts, _ = true_scenes
    result = accuracy(pictures[:200], texts[200:400])
    assert result["colour"] < 0.3
    assert result["shape"] < 0.35
    assert result["binding"] < 0.08
    assert result["everything"] < 0.05


@pytest.mark.long
def test_a_blurred_picture_loses_its_shapes_first(true_scenes):
    pictures, texts, _ = true_scenes
    result = accuracy(ndimage.gaussian_filter(pictures[:100], (0, 4, 4, 0)), texts[:100])
    assert result["colour"] > 0.95
    assert result["shape"] < 0.3
    assert result["everything"] < 0.1


@pytest.mark.long
@pytest.mark.parametrize("subsampled", [True, False])
def test_jpeg_loses_nothing_to_the_eye_and_to_the_verifier(true_scenes, subsampled):
    pictures, texts, _ = true_scenes
    for picture, caption in zip(pictures[:60], texts[:60], strict=True):
        file = io.BytesIO()
        Image.fromarray(picture).save(file, format="JPEG", quality=90, subsampling=2 if subsampled else 0)
        assert verifier.verify(np.asarray(Image.open(file)), caption).right, caption


@pytest.mark.long
def test_an_object_is_painted_over(true_scenes):
    pictures, texts, described = true_scenes
    for picture, caption, full in zip(pictures[:40], texts[:40], described[:40], strict=True):
        things = verifier.objects(picture)
        assert len(things) == len(full.things)
        rest = verifier.look(verifier.without(picture, things[-1][1]))
        assert len(rest[0]) == len(things) - 1
        assert rest[1:] == (full.tone, full.kind)
        assert not verifier.verify(verifier.without(picture, things[-1][1]), caption).right


@pytest.mark.long
def test_each_kind_of_mistake_is_seen(true_scenes):
    pictures, _, described = true_scenes
    num_mistakes = 0
    for picture, full in zip(pictures[:100], described[:100], strict=True):
        if len(full.things) != 2 or full.things[0].colour == full.things[1].colour:
            continue
        a, b = (f"{thing.colour} {thing.shape}" for thing in full.things)
        right = verifier.verify(picture, f"a {a} {full.relation} a {b}")
        assert right.right
        assert right.hits["binding"] == (1, 1)
        assert verifier.verify(picture, f"a {b} {full.relation} a {a}").hits["relation"] == (0, 1)
        first, second = full.things
        crossed = f"a {first.colour} {second.shape} and a {second.colour} {first.shape}"
        if first.shape != second.shape:
            assert verifier.verify(picture, crossed).hits["binding"] == (0, 1)
        only = verifier.verify(picture, f"a {a}")
        assert only.hits["colour"] == only.hits["shape"] == (1, 1)
        assert only.hits["count"] == (0, 1)
        assert not only.right
        mirrored = verifier.verify(np.ascontiguousarray(picture[:, ::-1]), f"a {a} {full.relation} a {b}")
        assert mirrored.right == (full.relation in ("above", "below"))
        num_mistakes += 1
    assert num_mistakes > 25


def test_touching_objects_come_apart():
    picture = np.full((128, 128, 3), 250, np.uint8)
    picture[40:64, 40:64] = (222, 38, 38)
    picture[40:64, 64:88] = (36, 84, 222)
    verdict = verifier.verify(picture, "a red square left of a blue square on a white background")
    assert verdict.right, verdict


def test_only_whole_byte_pictures_are_read():
    with pytest.raises(ValueError, match="uint8"):
        verifier.verify(np.zeros((128, 128, 3)), "a red circle")
    with pytest.raises(ValueError, match="128"):
        verifier.verify(np.zeros((64, 64, 3), np.uint8), "a red circle")
