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
        wanted = parse(prompt)
        chosen = next(k for k, found in enumerate(descriptions) if fits(found, wanted))
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


def fits(found: Description, wanted: Description) -> bool:
    """Whether a scene is the wanted one, except for the colour and the shape of its first object."""
    if len(found.things) != len(wanted.things):
        return False
    first, asked = found.things[0], wanted.things[0]
    if first.colour in {thing.colour for thing in wanted.things} or first.shape == asked.shape:
        return False
    if any(first.shape == other.shape for other in wanted.things[1:]):
        return False
    pairs = [(found.position, wanted.position), (found.relation, wanted.relation)]
    pairs += [(found.tone, wanted.tone or "gray"), (found.kind, wanted.kind or "plain")]
    pairs += [(first.size, asked.size or "large")]
    for other, said in zip(found.things[1:], wanted.things[1:], strict=True):
        pairs += [(other.colour, said.colour), (other.shape, said.shape), (other.size, said.size)]
    return all(asked is None or given == asked for given, asked in pairs)


if __name__ == "__main__":
    main()
