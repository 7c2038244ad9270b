"""The vocabulary of tinyworld, and what its words look like.

Order matters: the label tensors in `scenes` hold indices into these tables, so new words go last.
"""

from typing import Final

SIDE: Final = 128
"""Height and width of every picture, in pixels."""

# Saturated, and clear of each other (>= 87 in RGB distance) and of every background (chroma >= 130 against 0): the
# verifier finds objects by chroma alone, and the VAE can never make one colour into another by a small error.
PALETTE: Final[dict[str, tuple[int, int, int]]] = {
    "red": (222, 38, 38),
    "green": (24, 165, 62),
    "blue": (36, 84, 222),
    "yellow": (250, 214, 30),
    "purple": (132, 48, 178),
    "orange": (244, 128, 22),
    "pink": (250, 110, 180),
    "cyan": (30, 196, 214),
}
COLOURS: Final = tuple(PALETTE)
SHAPES: Final = ("circle", "square", "triangle", "diamond", "star", "cross")
SIZES: Final = ("small", "large")
RADII: Final = (13.0, 21.0)
"""Nominal radius of each size in pixels; a scene's object has it within 4 %."""
POSITIONS: Final = (
    "top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right",
)  # fmt: skip
RELATIONS: Final = ("left of", "right of", "above", "below")
OPPOSITE: Final = (1, 0, 3, 2)
"""Index of the relation that says the same with the two objects named in the other order."""
TONES: Final = ("white", "gray", "black")
KINDS: Final = ("plain", "gradient", "striped", "checkered")

# Grey levels of each tone: first and second tone of stripes and checks, then top and bottom of the gradient.
TWO_TONES: Final = ((250, 224), (172, 148), (16, 42))
GRADIENT: Final = ((254, 200), (196, 136), (6, 66))

# The first of each is the plain word; it is written more often than the others together.
COLOUR_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "red": ("red", "crimson", "scarlet"),
    "green": ("green", "emerald"),
    "blue": ("blue", "cobalt"),
    "yellow": ("yellow", "golden"),
    "purple": ("purple", "violet"),
    "orange": ("orange", "tangerine"),
    "pink": ("pink", "rose"),
    "cyan": ("cyan", "turquoise", "aqua"),
}
SHAPE_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "circle": ("circle", "disc", "disk", "ball", "dot"),
    "square": ("square", "box", "block"),
    "triangle": ("triangle", "pyramid"),
    "diamond": ("diamond", "rhombus"),
    "star": ("star",),
    "cross": ("cross", "plus"),
}
ANY_SHAPE: Final = ("shape", "object", "thing")
SIZE_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "small": ("small", "tiny", "little"),
    "large": ("large", "big", "huge"),
}
RELATION_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "left of": ("left of", "to the left of"),
    "right of": ("right of", "to the right of"),
    "above": ("above", "over", "on top of"),
    "below": ("below", "beneath", "under", "underneath"),
}
POSITION_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "top left": ("in the top left", "in the top left corner", "in the upper left corner"),
    "top": ("at the top", "at the top center"),
    "top right": ("in the top right", "in the top right corner", "in the upper right corner"),
    "left": ("on the left", "on the left side", "at the left"),
    "center": ("in the center", "in the middle", "in the centre"),
    "right": ("on the right", "on the right side", "at the right"),
    "bottom left": ("in the bottom left", "in the bottom left corner", "in the lower left corner"),
    "bottom": ("at the bottom", "at the bottom center"),
    "bottom right": ("in the bottom right", "in the bottom right corner", "in the lower right corner"),
}
TONE_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "white": ("white",),
    "gray": ("gray", "grey"),
    "black": ("black", "dark"),
}
KIND_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "plain": ("plain", "solid"),
    "gradient": ("gradient", "shaded"),
    "striped": ("striped", "stripy"),
    "checkered": ("checkered", "checked", "chequered"),
}

PREFIXES: Final = (
    "a picture of", "an image of", "a drawing of", "a photo of", "a painting of", "please draw", "draw", "show me",
    "there is", "an illustration of", "i want", "make",
)  # fmt: skip
# Words that mean nothing here. They are in the vocabulary and in training, so that a real prompt's habits do no harm.
IDLE: Final = (
    "beautiful", "simple", "clean", "shiny", "minimal", "flat", "vector", "art", "illustration", "high", "quality",
    "detailed", "style", "modern", "cute", "nice", "geometric", "abstract", "poster", "icon", "sharp", "masterpiece",
    "best", "digital", "professional", "colorful", "lovely", "very", "pretty", "crisp", "glossy", "hd",
)  # fmt: skip


def vocabulary() -> list[str]:
    """Every word that some caption may hold, sorted: each becomes one token."""
    phrases = [*PREFIXES, *IDLE, *ANY_SHAPE, "a an the and on in at against background of picture backdrop"]
    for table in (
        COLOUR_WORDS, SHAPE_WORDS, SIZE_WORDS, RELATION_WORDS, POSITION_WORDS, TONE_WORDS, KIND_WORDS,
    ):  # fmt: skip
        phrases += [phrase for words in table.values() for phrase in words]
    return sorted({word for phrase in phrases for word in phrase.split()})
