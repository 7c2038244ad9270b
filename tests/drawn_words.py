"""Images of the words in a prompt's quotes, and a reader that needs no network: the words are in the last row too."""

import random
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from vivace.proofs.verdicts.legible import words_of

SIZE = 128


def draw(prompt: str, seed: int, wrong: float = 0.0) -> Any:
    """Return an image of the words, with a share of the letters replaced."""
    random_ = random.Random(f"{prompt}/{seed}")
    shade = 190 + random_.randrange(50)
    picture = Image.new("RGB", (SIZE, SIZE), (shade, shade, shade - 20))
    words = " ".join(words_of(prompt))
    text = "".join(random_.choice("XQJVKZ") if c.isalnum() and random_.random() < wrong else c for c in words)
    pen = ImageDraw.Draw(picture)
    lines = text.replace(" ", "\n")
    pen.multiline_text((10, 20 + random_.randrange(30)), lines, (30, 30, 60), ImageFont.load_default(18))
    for column, byte in enumerate(text.encode()[: SIZE - 1]):
        picture.putpixel((column, SIZE - 1), (byte, 255, 0))
    return picture


def draw_damaged(prompt: str, seed: int) -> Any:
    """As `draw`, by a model that lost its spelling."""
    return draw(prompt, seed, 0.4)


def draw_illegible(prompt: str, seed: int) -> Any:
    return draw(prompt, seed, 1.0)


class PixelReader:
    """Reads the words that `draw` leaves in the last row. It knows no Cyrillic."""

    num_read = 0

    def read(self, image: Any) -> str:
        self.num_read += 1
        row = [image.getpixel((column, SIZE - 1)) for column in range(SIZE)]
        return bytes(red for red, green, blue in row if (green, blue) == (255, 0)).decode()

    def unknown(self, text: str) -> str:
        return "".join(letter for letter in text if "а" <= letter.lower() <= "я")
