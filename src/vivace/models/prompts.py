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


FURTHER_PROMPTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "tinyworld": (
        (
            "a purple square above a green cross",
            "a large orange triangle on a black background",
            "a small cyan circle left of a red star",
            "a pink diamond in the top right on a white background",
            "a small blue triangle below a large yellow circle",
            "a large cyan cross right of a small orange square",
            "a green star in the center on a white striped background",
            "a small yellow square at the top on a gray checkered background",
            "a red triangle and a large purple diamond on a white background",
            "a pink cross above a cyan square on a black gradient background",
            "a large orange circle left of a blue star",
            "a small green diamond in the bottom left",
            "a yellow triangle right of a pink circle on a gray background",
        ),
        (
            "a blue cross above an orange diamond",
            "a large red star on a gray background",
            "a small purple circle left of a yellow triangle",
            "a cyan diamond in the bottom left on a black background",
            "a small orange star below a large pink square",
            "a large green circle right of a small blue cross",
            "a red square in the center on a black checkered background",
            "a small pink triangle at the bottom on a white gradient background",
            "a purple star and a large cyan circle on a gray background",
            "an orange square above a green triangle on a white striped background",
            "a large yellow diamond left of a purple cross",
            "a small red circle in the top right",
            "a blue square right of a cyan star on a black background",
        ),
    ),
    "real": (
        (
            "a portrait of a young woman with freckles laughing, overcast light, 50 mm photograph",
            "an old man's hands playing a wooden flute, close-up photograph",
            "a chalkboard outside a cafe that says SOUP OF THE DAY",
            "five white eggs and two brown eggs in a wire basket",
            "a golden retriever shaking off water on a beach, droplets in the air",
            "sand dunes under a cloudless sky in the last light of the day",
            "a lighthouse beam over a stormy sea at night",
            "a crystal vase with three tulips in front of a sunlit window",
            "a library hall with thousands of books on tall shelves",
            "an ink drawing of a sailing ship in heavy waves",
            "a hot air balloon in the shape of a teapot above green hills",
            "a red bicycle in front of a blue door with a yellow letter box",
            "a cutaway drawing of a submarine with its crew at work",
        ),
        (
            "a portrait of a child with a woollen hat in falling snow, 85 mm photograph",
            "a potter's hands shaping a bowl on a spinning wheel, close-up photograph",
            "a neon sign that says HOTEL above a wet parking lot",
            "four green bottles and one clear bottle on a stone wall",
            "a peacock with its tail spread, every feather in focus",
            "fog over a pine forest at sunrise, seen from a mountain",
            "a candle on a dark table next to an open book",
            "soap bubbles floating over a lawn on a bright day",
            "a railway station at rush hour, hundreds of people under a glass roof",
            "an oil painting of a bowl of lemons with thick brush strokes",
            "a fox in a business suit reading a newspaper on a train",
            "a yellow taxi under a bridge, a man with a black umbrella to its left",
            "a low-poly rendering of a small island with palm trees and a hut",
        ),
    ),
}
"""Further prompts by prompt set; sets without an entry are drawn at further seeds."""
