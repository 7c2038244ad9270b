"""tiny-clip, the scorer: its network and folder. No generator uses its weights, or scores would be circular."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

from tinyworld import networks, tokenizer
from tinyworld.words import SIDE

FOLDER = "tiny-clip"
PATCH = 8
WIDTH, LAYERS, HEADS = 128, 3, 4
ZOOMS = (0.96, 0.98, 1.0, 1.02, 1.04)
"""Views of an image whose embeddings are averaged. Where the edges of the patches cut an object matters to so small a
network: enlarged 1.02 times, images lost 1.5 % of their margin by one view, and 0.1 % by the mean of these (tiny-sd;
docs/quality.md)."""


def build() -> CLIPModel:
    """Build the network of 1.35 M parameters: text of 32 tokens, images of 16x16 patches.

    With patches of 16 pixels, which hold a third of an object, shapes were distinguished in 64 % of cases after 3,900
    steps.
    """
    words = tokenizer.build()
    tower = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "projection_dim": WIDTH,
    }
    ends = {
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
    }
    return CLIPModel(
        CLIPConfig(
            text_config={
                **tower,
                **ends,
                "vocab_size": len(words),
                "max_position_embeddings": tokenizer.MAX_LENGTH,
            },
            vision_config={**tower, "image_size": SIDE, "patch_size": PATCH},
            projection_dim=WIDTH,
            zooms=list(ZOOMS),
        )
    )


def build_processor() -> CLIPProcessor:
    """Build the processor: images of 128 px in -1..1, prompts of 32 tokens."""
    half = [0.5, 0.5, 0.5]
    pictures = CLIPImageProcessor(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_mean=half,
        image_std=half,
    )
    return CLIPProcessor(image_processor=pictures, tokenizer=tokenizer.build())


def embed_images(model: CLIPModel, pictures: Tensor) -> Tensor:
    """(N, 128) unit vectors of pictures (N, 3, 128, 128) in -1..1."""
    features = model.vision_model(pixel_values=pictures).pooler_output
    return nn.functional.normalize(model.visual_projection(features).float(), dim=-1)


def embed_captions(model: CLIPModel, ids: Tensor) -> Tensor:
    """(N, 128) unit vectors of token ids (N, 32)."""
    read = model.text_model(input_ids=ids).pooler_output
    return nn.functional.normalize(model.text_projection(read).float(), dim=-1)


def save(folder: Path, model: CLIPModel) -> None:
    """Write the fp16 folder with its processor atomically."""
    with networks.atomic_folder(folder) as unsaved:
        networks.half(model, build()).save_pretrained(unsaved, safe_serialization=True)
        build_processor().save_pretrained(unsaved)
        networks.load_in_fp32(unsaved)


def load(folder: Path, device: str = "cpu") -> CLIPModel:
    return CLIPModel.from_pretrained(folder, dtype=torch.float32).to(device).eval()
