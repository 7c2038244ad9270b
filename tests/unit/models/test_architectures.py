"""The published architectures: complete, accepted by their classes, and of the published size."""

import diffusers
import pytest

from tests.narrow import network
from vivace.architectures import ARCHITECTURES
from vivace.architectures.components import Architecture, ComponentConfig
from vivace.models.synthetic import num_parameters, on_meta


@pytest.mark.parametrize(
    ("component", "millions"),
    [
        (network("sd15", "unet"), 859.5),
        (network("sdxl", "unet"), 2567.5),
        (network("lcm-sdxl", "unet"), 2567.5),
        (network("flux-dev"), 11901.4),
        (network("flux-schnell"), 11891.2),
        (network("sdxl", "text_encoder"), 123.1),
        (network("sdxl", "text_encoder_2"), 694.7),
        (network("flux-dev", "text_encoder_2"), 4762.3),
        # As their publishers count them: 8.1 B, 2.2 B, 1.6 B, 6 B, 20 B, 4 B, 9 B and 32 B; the language models to the
        # last digit.
        (network("sd35-large"), 8056.6),
        (network("sd35-medium"), 2243.2),
        (network("sana-1600m"), 1604.5),
        (network("z-image-turbo"), 6154.9),
        (network("qwen-image"), 20430.4),
        (network("qwen-image-2.1"), 7115.124736),  # to the last digit, as its quantised copies count them
        (network("qwen-image-2.1", "text_encoder"), 8767.1),  # 8.77 B
        (network("qwen-image-2.1", "vae"), 337.7),  # the class's default
        (network("krea-2-raw"), 12820.1),  # 12.9 B with two layers that diffusers leaves out
        (network("krea-2-raw", "text_encoder"), 4437.8),  # 4.44 B
        (network("flux2-klein-4b"), 3875.5),
        (network("flux2-klein-9b"), 9078.6),
        (network("flux2-dev"), 32223.3),
        (network("flux2-dev", "vae"), 84.046115),
        (network("flux2-klein-9b", "text_encoder"), 8190.73536),
        (network("qwen-image", "text_encoder"), 8292.166656),
        (network("flux2-dev", "text_encoder"), 24011.36128),
        (network("sana-1600m", "text_encoder"), 2614.341888),
        (network("longcat-image"), 6270.7),  # 6 B
        (network("chroma1-hd"), 8900.0),  # 8.9 B
        (network("ernie-image"), 8033.5),  # 8 B
        (network("ideogram-4"), 9279.3),  # 9.28 B
        (network("ovis-image-7b"), 7370.4),  # 7 B
        (network("cogview4-6b"), 6369.1),  # 6 B
        (network("cogview4-6b", "text_encoder"), 9399.951360 - 151552 * 4096 / 1e6),  # published with a head
    ],
    ids=lambda value: value.class_name if isinstance(value, ComponentConfig) else None,
)
def test_parameters_are_as_many_as_published(component: ComponentConfig, millions: float) -> None:
    assert num_parameters(component) / 1e6 == pytest.approx(millions, rel=0.001)


@pytest.mark.parametrize(
    ("vae", "millions"),
    [
        (network("sd15", "vae"), 49.5),
        (network("sdxl", "vae"), 49.5),
        (network("flux-dev", "vae"), 49.5),
        (ARCHITECTURES["sd15"].tiny_vae, 1.22),
        (ARCHITECTURES["flux-dev"].tiny_vae, 1.23),
    ],
)
def test_decoders_are_as_large_as_published(vae: ComponentConfig, millions: float) -> None:
    decoder = on_meta(vae).decoder
    assert sum(p.numel() for p in decoder.parameters()) / 1e6 == pytest.approx(millions, rel=0.005)


def test_the_guidance_embeddings_are_where_they_were_published() -> None:
    # FLUX.1-dev's is a two-layer MLP from 256 to 3072, LCM-SDXL's one layer from 256 to 320 without a bias.
    assert (
        num_parameters(network("flux-dev")) - num_parameters(network("flux-schnell"))
        == 256 * 3072 + 3072 * 3072 + 2 * 3072
    )
    assert num_parameters(network("lcm-sdxl", "unet")) - num_parameters(network("sdxl", "unet")) == 256 * 320


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda a: a.name)
def test_configs_name_only_what_their_classes_know(architecture: Architecture) -> None:
    for component in [architecture.scheduler, architecture.tiny_vae, *architecture.components.values()]:
        if component is not None and component.library == "diffusers":
            # Unknown arguments would be swallowed by the config and change nothing.
            keys = getattr(diffusers, component.class_name)._get_init_keys(
                getattr(diffusers, component.class_name)
            )
            assert set(component.config) <= set(keys)
    assert hasattr(diffusers, architecture.pipeline)
    assert architecture.denoiser in architecture.components


@pytest.mark.parametrize(
    ("name", "steps", "timesteps"),
    [
        ("sdxl", 4, [751.0, 501.0, 251.0, 1.0]),
        ("sdxl-turbo", 1, [999.0]),
        ("sdxl-turbo", 4, [999.0, 749.0, 499.0, 249.0]),
        ("sdxl-lightning-2step", 2, [999.0, 499.0]),
        ("sdxl-lightning-4step", 4, [999.0, 749.0, 499.0, 249.0]),
        ("hyper-sdxl-4step", 4, [999, 749, 499, 249]),
        ("lcm-sdxl", 4, [999, 759, 499, 259]),
    ],
)
def test_few_step_models_start_where_they_were_trained_to(
    name: str, steps: int, timesteps: list[float]
) -> None:
    expected = ARCHITECTURES[name].scheduler
    scheduler = getattr(diffusers, expected.class_name)(**expected.config)
    scheduler.set_timesteps(steps)
    assert scheduler.timesteps.tolist() == timesteps


def test_a_changed_architecture_leaves_the_published_one_alone() -> None:
    before = ARCHITECTURES["sdxl"].digest()
    changed = ARCHITECTURES["sdxl"].changed(unet={"layers_per_block": 1})
    assert changed.components["unet"].config["layers_per_block"] == 1
    assert changed.components["unet"].config["cross_attention_dim"] == 2048
    assert ARCHITECTURES["sdxl"].digest() == before
    with pytest.raises(ValueError, match="has no transformer; it has unet, vae"):
        changed.changed(transformer={})
