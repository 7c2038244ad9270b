"""The grid shows the rows that matter, in a defined order, and how each image differs from the baseline's."""

import base64
import io

import pytest
from PIL import Image, PngImagePlugin

from tests.make import make_record, make_round
from vivace.foundation.spec.figures import ImageFigures, QualityPass
from vivace.foundation.spec.record import ImageRecord, Outcome, Record
from vivace.report.grid import AMPLIFIED, MAX_ROWS, THUMBNAIL_SIDE, EmbeddedImage, Grid, grid
from vivace.report.rows import Row, rows_of

PLENTY = 10**9
OWN, OTHERS = 30.0, 10.0  # CLIP scores of the baseline's images: a margin of 20


def png(colour: tuple[int, int, int] = (200, 100, 50), size: tuple[int, int] = (64, 64)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


def by_recipe(sha256: str) -> bytes:
    """Another image for each recipe."""
    return png((sum(sha256.partition(" ")[0].encode()) % 256, 0, 0))


def drawn(recipe: str, num: int, black: tuple[int, ...] = ()) -> Record:
    pictures = tuple(
        ImageRecord(
            index=i,
            prompt=f"prompt {i}",
            seed=0,
            sha256=f"{recipe} {i}",
            faults=("black",) if i in black else (),
        )
        for i in range(num)
    )
    return make_record(recipe, make_round(0).model_copy(update={"pictures": pictures}))


def figures(record: Record, *, ssim: list[float], clip: list[float] | None = None) -> list[ImageFigures]:
    """Figures of each image: its SSIM, its CLIP score."""
    rated = []
    for i, picture in enumerate(record.rounds[0].pictures):
        reference = f"baseline {i}"
        alone = {} if clip is None else {"clip_score": clip[i]}
        if picture.sha256 == reference and clip is not None:
            alone["clip_score_of_others"] = OTHERS
        against = {} if picture.sha256 == reference else {"psnr_db": 20.0, "ssim": ssim[i]}
        rated.append(
            ImageFigures(
                sha256=picture.sha256,
                reference=reference,
                prompt=picture.prompt,
                scorer="clip@1",
                alone=alone,
                against=against,
            )
        )
    return rated


def rows(records: list[Record], rated: list[ImageFigures] | None = None) -> list[Row]:
    return rows_of(records, QualityPass({f.key: f for f in rated or []}, "clip@1"))


def order(image_grid: Grid) -> list[int]:
    return [int(row.prompt.removeprefix("prompt ")) for row in image_grid.rows]


def pixels(embedded: EmbeddedImage | None) -> Image.Image:
    assert embedded is not None
    image = Image.open(io.BytesIO(base64.b64decode(embedded.uri.partition(",")[2])))
    assert image.size == (embedded.width, embedded.height)
    return image.convert("RGB")


def beside(picture: bytes, reference: bytes) -> Grid:
    """A grid of one row: the baseline's image and a recipe's."""
    read = {"baseline 0": reference, "steps(8) 0": picture}.get
    return grid(rows([drawn("baseline", 1), drawn("steps(8)", 1)]), read, PLENTY)


def test_without_figures_the_order_is_that_of_drawing() -> None:
    image_grid = grid(rows([drawn("baseline", 20), drawn("steps(8)", 20)]), lambda _: png(), PLENTY)
    assert order(image_grid) == list(range(MAX_ROWS))
    assert image_grid.order == "The first 12 of 20, in the order of generation."


def test_only_the_worst_are_shown_and_only_they_are_read() -> None:
    base, other = drawn("baseline", 39), drawn("steps(8)", 39)
    ssim = [0.9 - 0.02 * ((7 * i) % 39) for i in range(39)]
    read: set[str] = set()

    def read_image(sha256: str) -> bytes:
        read.add(sha256)
        return png()

    measured = figures(base, ssim=ssim) + figures(other, ssim=ssim)
    image_grid = grid(rows([base, other], measured), read_image, PLENTY)
    assert order(image_grid) == sorted(range(39), key=lambda i: ssim[i])[:MAX_ROWS]
    assert image_grid.order.startswith("The worst 12 of 39")
    assert read == {f"{recipe} {i}" for recipe in ("baseline", "steps(8)") for i in order(image_grid)}


def test_every_recipe_has_its_worst_picture_before_any_has_its_second_worst() -> None:
    base, hopeless, good = (drawn(r, 5) for r in ("baseline", "steps(1)", "tiny_vae"))
    measured = [
        *figures(base, ssim=[1.0] * 5),
        *figures(hopeless, ssim=[0.1, 0.2, 0.3, 0.15, 0.4]),
        *figures(good, ssim=[0.99, 0.99, 0.95, 0.999, 0.98]),
    ]
    image_grid = grid(rows([base, hopeless, good], measured), by_recipe, PLENTY)
    # 0 and 2 are worst of one recipe each, 3 and 4 second worst; the greater loss goes first
    assert order(image_grid) == [0, 2, 3, 4, 1]
    assert image_grid.order.startswith("Worst first: every recipe’s worst image")
    worst = [[cell.note for cell in row.cells] for row in image_grid.rows]
    assert worst[0] == [None, "SSIM 0.100, this recipe’s worst", "SSIM 0.990"]
    assert worst[1] == [None, "SSIM 0.300", "SSIM 0.950, this recipe’s worst"]


def test_each_recipe_is_ordered_by_the_figure_that_it_is_held_to() -> None:
    ssim, clip = [0.9, 0.5, 0.8], [20.0, 29.0, 28.0]
    base, other, same = drawn("baseline", 3), drawn("steps(8)", 3), drawn("bf16", 3)
    reference = figures(base, ssim=[1.0] * 3, clip=[OWN] * 3)
    assert order(
        grid(rows([base, other], reference + figures(other, ssim=ssim, clip=clip)), lambda _: png(), PLENTY)
    ) == [0, 2, 1], "by the CLIP score: the image may rightly be another"
    assert order(
        grid(rows([base, same], reference + figures(same, ssim=ssim, clip=clip)), lambda _: png(), PLENTY)
    ) == [1, 2, 0], "by SSIM: the image should be the same"


def test_a_scorer_that_cannot_tell_the_baseline_orders_nothing() -> None:
    base, other = drawn("baseline", 2), drawn("steps(8)", 2)
    blind = [
        f.model_copy(update={"alone": {"clip_score": OWN, "clip_score_of_others": OWN + 1}})
        for f in figures(base, ssim=[1.0] * 2, clip=[OWN] * 2)
    ]
    measured = blind + figures(other, ssim=[0.9, 0.2], clip=[10.0, 29.0])
    assert order(grid(rows([base, other], measured), lambda _: png(), PLENTY)) == [1, 0]


def test_a_loss_that_would_not_be_printed_is_none() -> None:
    base, other = drawn("baseline", 3), drawn("bf16", 3)
    measured = figures(base, ssim=[1.0] * 3) + figures(other, ssim=[0.9999, 0.9998, 0.9997])
    image_grid = grid(rows([base, other], measured), by_recipe, PLENTY)
    assert order(image_grid) == [0, 1, 2]
    assert {row.cells[1].note for row in image_grid.rows} == {"SSIM 1.000"}


def test_a_broken_picture_is_worst_unless_the_baseline_draws_it_broken_too() -> None:
    base, other = drawn("baseline", 4, black=(1,)), drawn("tiny_vae", 4, black=(1, 2))
    measured = figures(base, ssim=[1.0] * 4) + figures(other, ssim=[0.9, 0.9, 0.99, 0.3])
    image_grid = grid(rows([base, other], measured), by_recipe, PLENTY)
    # 1 is the baseline's own fault, 2 the recipe's: the first turn of each; then the recipe's by SSIM
    assert order(image_grid) == [1, 2, 3, 0]
    assert image_grid.rows[1].cells[1].note == "black, SSIM 0.990, this recipe’s worst"
    alone = grid(rows([drawn("baseline", 4), drawn("steps(8)", 4, black=(3,))]), lambda _: png(), PLENTY)
    assert order(alone)[0] == 3, "a fault needs no figures"


@pytest.mark.parametrize(("num_rows", "expected"), [(0, 1), (1, 1), (3, 3), (50, MAX_ROWS)])
def test_embedded_pictures_keep_to_their_bytes(num_rows: int, expected: int) -> None:
    records = rows([drawn("baseline", 39), drawn("steps(8)", 39)])
    smallest = grid(records, lambda _: png(), 0)
    assert len(smallest.rows) == 1
    row_bytes = sum(len(c.picture.uri) for c in smallest.rows[0].cells if c.picture)
    image_grid = grid(records, lambda _: png(), num_rows * row_bytes)
    assert len(image_grid.rows) == expected
    assert f"The first {expected} of 39" in image_grid.order


def test_the_difference_is_amplified_and_as_large_as_the_picture() -> None:
    image_grid = beside(png((200, 100, 50)), png((190, 100, 80)))
    reference, cell = image_grid.rows[0].cells
    assert reference.difference is None
    assert reference.difference_note is None
    assert cell.difference_note == "at most 30 of 255"
    red, green, blue = pixels(cell.difference).getpixel((32, 32))
    assert red == pytest.approx(10 * AMPLIFIED, abs=6)  # lossy
    assert green == pytest.approx(0, abs=6)
    assert blue == pytest.approx(30 * AMPLIFIED, abs=6)
    assert cell.difference is not None
    assert cell.difference.uri.startswith("data:image/webp;base64,")
    assert image_grid.has_differences


def test_a_difference_too_bright_is_white_not_wrapped_around() -> None:
    _, cell = beside(png((255, 255, 255)), png((0, 0, 0))).rows[0].cells
    assert min(pixels(cell.difference).getpixel((32, 32))) > 245


def test_differences_of_large_pictures_are_taken_before_they_are_made_small() -> None:
    even, odd = Image.new("L", (1024, 512)), Image.new("L", (1024, 512))
    even.putdata([40 * (x % 2) for _ in range(512) for x in range(1024)])
    odd.putdata([40 * (1 - x % 2) for _ in range(512) for x in range(1024)])

    def saved(image: Image.Image) -> bytes:
        out = io.BytesIO()
        image.convert("RGB").save(out, "PNG")
        return out.getvalue()

    _, cell = beside(saved(even), saved(odd)).rows[0].cells
    difference = pixels(cell.difference)
    assert difference.size == (THUMBNAIL_SIDE, THUMBNAIL_SIDE // 2)
    assert cell.picture is not None
    assert (cell.picture.width, cell.picture.height) == difference.size
    # As thumbnails both are the same grey.
    assert min(difference.getpixel((100, 100))) == pytest.approx(40 * AMPLIFIED, abs=8)


def test_pictures_of_the_same_pixels_have_no_difference_whatever_their_bytes() -> None:
    remark = PngImagePlugin.PngInfo()
    remark.add_text("remark", "the same pixels")
    out = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 100, 50)).save(out, "PNG", pnginfo=remark)
    assert out.getvalue() != png()
    image_grid = beside(out.getvalue(), png())
    _, cell = image_grid.rows[0].cells
    assert cell.difference is None
    assert (cell.difference_note, cell.note) == ("identical", "identical to the baseline’s")
    assert not image_grid.has_differences


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (png(size=(32, 48)), "64 × 64 px, the baseline’s 32 × 48"),
        (b"damaged", "no image of the baseline"),
    ],
)
def test_why_there_is_no_difference_is_said(reference: bytes, message: str) -> None:
    _, cell = beside(png(), reference).rows[0].cells
    assert cell.picture is not None
    assert cell.difference is None
    assert cell.difference_note == message


def test_without_the_baselines_pictures_nothing_is_compared() -> None:
    crashed = make_record("baseline", make_round(0, outcome=Outcome.CRASHED, reason="signal 11"))
    image_grid = grid(rows([crashed, drawn("steps(8)", 2), drawn("tiny_vae", 2)]), by_recipe, PLENTY)
    assert [c.number for c in image_grid.columns] == [2, 3]
    assert [c.number for c in image_grid.without_images] == [1]
    assert not image_grid.has_reference
    assert not image_grid.has_differences
    assert order(image_grid) == [0, 1]
