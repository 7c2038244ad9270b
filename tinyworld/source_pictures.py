"""Render the pictures that image-to-image and inpainting start from where no file is given.

    python -m tinyworld.source_pictures          writes src/vivace/models/source_images

One for each prompt of the set "tinyworld": the scene that the prompt describes, but its first object has another colour
and shape. The mask is the box around that object, so that after inpainting the prompt describes the whole picture.
"""

from pathlib import Path

import torch
from PIL import Image

from tinyworld.captions import Description, describe, parse
from tinyworld.scenes import EXTENTS, draw, sample, to_uint8
from tinyworld.words import SIDE
from vivace.models.prompts import PROMPT_SETS

FOLDER = Path(__file__).parent.parent / "src" / "vivace" / "models" / "source_images"
AROUND = 10
"""Pixels of the mask around the object, so that the new one may be a little larger or elsewhere."""
_SCENES = 150_000


def main() -> None:
    labels = sample(_SCENES, seed=20)
    descriptions = describe(labels)
    for index, prompt in enumerate(PROMPT_SETS["tinyworld"]):
        target = parse(prompt)
        chosen = next(k for k, description in enumerate(descriptions) if fits(description, target))
        scene = labels[torch.tensor([chosen])]
        picture = to_uint8(draw(scene)[0])[0].numpy()
        Image.fromarray(picture).save(FOLDER / f"{index:02}.png", optimize=True)
        x, y = scene.centre[0, 0].tolist()
        half = EXTENTS[int(scene.shape[0, 0])] * float(scene.radius[0, 0]) + AROUND
        box = [max(0, round(v - half)) for v in (x, y)] + [min(SIDE, round(v + half)) for v in (x, y)]
        mask = Image.new("L", (SIDE, SIDE), 0)
        mask.paste(255, tuple(box))
        mask.save(FOLDER / f"{index:02}-mask.png", optimize=True)
        print(f"{index:02}  {prompt}: from {descriptions[chosen]}")


def fits(scene: Description, target: Description) -> bool:
    """Whether a scene is the wanted one, except for the colour and the shape of its first object."""
    if len(scene.things) != len(target.things):
        return False
    first, subject = scene.things[0], target.things[0]
    if first.colour in {thing.colour for thing in target.things} or first.shape == subject.shape:
        return False
    if any(first.shape == other.shape for other in target.things[1:]):
        return False
    pairs = [(scene.position, target.position), (scene.relation, target.relation)]
    pairs += [(scene.tone, target.tone or "gray"), (scene.kind, target.kind or "plain")]
    pairs += [(first.size, subject.size or "large")]
    for other, expected in zip(scene.things[1:], target.things[1:], strict=True):
        pairs += [(other.colour, expected.colour), (other.shape, expected.shape), (other.size, expected.size)]
    return all(expected is None or actual == expected for actual, expected in pairs)


if __name__ == "__main__":
    main()
