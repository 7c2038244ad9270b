"""Further prompts for verdicts that a prompt set leaves unclear: images of new prompts decide more than new seeds.

Images of one prompt are correlated, so the gate's interval counts prompts. Each set has two batches of thirteen; a
batch is drawn at one seed when the thirteen prompts of the set (see `prompts`) have not decided.
"""

from __future__ import annotations

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
