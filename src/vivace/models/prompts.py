"""Prompt sets for meaningful quality figures: thirteen prompts each, at three seeds."""

from __future__ import annotations

NUM_SEEDS = 3
NUM_DEFAULT = 6
"""Number of prompts of a model by default: the fewest that have an interval, and so a verdict on quality."""

PROMPT_SETS: dict[str, tuple[str, ...]] = {
    # Covers every colour, shape, relation and background of the embedded models, each attribute more than once.
    "tinyworld": (
        "a red circle above a blue square",
        "a large green triangle on a white background",
        "a small yellow star left of a purple diamond",
        "an orange cross in the top left on a black background",
        "a small pink circle below a large cyan triangle",
        "a large purple square right of a small green star",
        "a blue diamond in the center on a gray striped background",
        "a small red cross at the bottom on a white checkered background",
        "a yellow circle and a large pink square on a black background",
        "a cyan star above an orange triangle on a white gradient background",
        "a large blue cross left of a red diamond",
        "a small purple triangle in the bottom right",
        "a green circle right of a yellow square on a gray background",
    ),
    # Typical prompts that reveal broken recipes: faces, hands, text, counts, fine texture, smooth gradients, darkness,
    # glass, many small objects, a drawing, a scene with relations.
    "real": (
        "a portrait of an old fisherman, wrinkled face, soft window light, 85 mm photograph",
        "two hands kneading bread dough on a floured wooden table, close-up photograph",
        "a wooden shop sign that says OPEN, hanging in a narrow street",
        "three red apples and one green pear on a white plate",
        "a long-haired cat asleep on a knitted blanket, every hair in focus",
        "a calm lake at dawn under a clear sky that fades from orange to deep blue",
        "a city street at night in the rain, neon signs mirrored on the wet asphalt",
        "a glass of water with ice cubes and a slice of lemon on a marble counter",
        "a crowded farmers' market seen from above, dozens of colourful stalls",
        "a watercolour painting of a lighthouse on a cliff, visible brush strokes",
        "an astronaut riding a bicycle through a field of sunflowers",
        "a small blue bird on top of a tall yellow ladder leaning on a brick wall",
        "an isometric drawing of a tiny cosy living room with a fireplace and bookshelves",
    ),
    # Instructions for models that edit, which any image can follow: style, light, colours, things added and removed,
    # text.
    "edit": (
        "turn it into a watercolour painting with visible brush strokes",
        "make it a night scene lit by a single lamp",
        "replace the background with a snowy mountain landscape",
        "add a small wooden sign that says OPEN",
        "make everything in it out of red brick",
        "remove the smallest object and fill its place with the background",
        "turn it into a pencil drawing on yellowed paper",
        "put a yellow star in the top right corner",
        "make it look like an old black and white photograph with scratches",
        "change every colour to a shade of blue",
        "cover the ground with autumn leaves",
        "show it through a window with rain drops on the glass",
        "make it an isometric drawing with thin black outlines",
    ),
}
