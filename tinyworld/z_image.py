"""tiny-z-image: a model of one stream, as Z-Image's: shapes, calls of the transformer as in ZImagePipeline, its folder.

The transformer takes lists of images and captions of any length, which is slow to train. Here every caption has 32
tokens and every image 64, so `velocity` calls the same layers on batches; a test compares both. Latents are those of
tiny-flux's VAE.
"""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from torch import Tensor, nn
from transformers import CLIPTokenizer, Qwen3Config, Qwen3Model

from tinyworld import networks, tokenizer
from tinyworld.flux import CHANNELS, PATCHES, TOKENS, build_scheduler
from tinyworld.networks import LATENT_SIDE, TEXT_WIDTH

FOLDER = "tiny-z-image"
STEPS, GUIDANCE = 28, 3.0
"""ZImagePipeline's scale counts from 0: 3 here is 4 of `StableDiffusionPipeline`."""
CALL = {"height": networks.SIDE, "width": networks.SIDE}
PATCH = "2-1"
HEADS, LAYERS = 6, 5
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_transformer() -> ZImageTransformer2DModel:
    """Build the transformer of 4.6 M parameters."""
    return ZImageTransformer2DModel(
        in_channels=CHANNELS,
        dim=32 * HEADS,  # the feed-forward's width, 8/3 of it, is a multiple of 32
        n_layers=LAYERS,
        n_refiner_layers=1,
        n_heads=HEADS,
        n_kv_heads=HEADS,
        cap_feat_dim=TEXT_WIDTH,
        axes_dims=[8, 12, 12],
        axes_lens=[
            tokenizer.MAX_LENGTH * 17,
            64,
            64,
        ],  # captions of up to 512 tokens, images of up to 1024 px
    )


def build_text_encoder() -> Qwen3Model:
    """Build the text encoder. Pipelines read the last layer but one, so the third layer is never used."""
    words = tokenizer.build()
    return Qwen3Model(
        Qwen3Config(
            vocab_size=len(words),
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=words.bos_token_id,
            eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id,
        )
    )


@torch.no_grad()
def init_adaln_zero(transformer: ZImageTransformer2DModel) -> None:
    """Begin as the identity: gates and the predicted velocity are 0."""
    blocks = [*transformer.noise_refiner, *transformer.layers]
    final = transformer.all_final_layer[PATCH]
    for layer in (*(block.adaLN_modulation[0] for block in blocks), final.adaLN_modulation[1], final.linear):
        layer.weight.zero_()
        layer.bias.zero_()


def is_word(ids: Tensor, end: int) -> Tensor:
    """(N, 32) whether a token is part of the caption, its end included: captions are padded with their end."""
    is_end = (ids == end).long()
    return is_end.cumsum(1) - is_end == 0


def pack(latents: Tensor) -> Tensor:
    """(N, 16, 16, 16) channels, rows, columns -> (N, 64 tokens, 64): each 2x2 patch is one token, channels last."""
    n = len(latents)
    cells = latents.reshape(n, CHANNELS, PATCHES, 2, PATCHES, 2)
    return cells.permute(0, 2, 4, 3, 5, 1).reshape(n, TOKENS, 4 * CHANNELS)


def unpack(tokens: Tensor) -> Tensor:
    """The inverse of `pack`."""
    cells = tokens.reshape(len(tokens), PATCHES, PATCHES, 2, 2, CHANNELS)
    return cells.permute(0, 5, 1, 3, 2, 4).reshape(len(tokens), CHANNELS, LATENT_SIDE, LATENT_SIDE)


def attend_in_real_numbers(transformer: ZImageTransformer2DModel, device: str) -> tuple[Tensor, Tensor]:
    """Give every block `RealAttention`; return the rotary embedding that it takes."""
    for block in (*transformer.noise_refiner, *transformer.context_refiner, *transformer.layers):
        block.attention.set_processor(RealAttention())
    return tuple(torch.view_as_real(rotation) for rotation in rotations(transformer, device))


class RealAttention:
    """Z-Image's attention with the rotation in real numbers, which a compiler can fuse. Only for training."""

    _attention_backend = _parallel_config = None

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: None = None,
        attention_mask: None = None,
        freqs_cis: Tensor | None = None,
    ) -> Tensor:
        q, k, v = (
            layer(hidden_states).unflatten(-1, (attn.heads, -1))
            for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        q, k = (_rotate(norm(x), freqs_cis).to(v.dtype) for norm, x in ((attn.norm_q, q), (attn.norm_k, k)))
        out = nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        return attn.to_out[0](out.transpose(1, 2).flatten(2))


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate pairs of channels of x (N, tokens, heads, channels) by cosines and sines (1, tokens, channels / 2, 2)."""
    cosine, sine = rotation[:, :, None, :, 0], rotation[:, :, None, :, 1]
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1).flatten(-2)


def rotations(transformer: ZImageTransformer2DModel, device: str) -> tuple[Tensor, Tensor]:
    """Return the rotary embedding of the 32 words, at 1 to 32, and of the 64 patches, at (33, row, column)."""
    at = torch.arange(PATCHES, dtype=torch.int32)
    rows, columns = torch.meshgrid(at, at, indexing="ij")
    image = torch.stack([torch.full_like(rows, tokenizer.MAX_LENGTH + 1), rows, columns], dim=-1).reshape(
        -1, 3
    )
    words = torch.zeros(tokenizer.MAX_LENGTH, 3, dtype=torch.int32)
    words[:, 0] = torch.arange(1, tokenizer.MAX_LENGTH + 1)
    return tuple(transformer.rope_embedder(ids).to(device)[None] for ids in (words, image))


def encode(text_encoder: Qwen3Model, ids: Tensor) -> Tensor:
    """Encode token ids (N, 32) to the states (N, 32, 128) that ZImagePipeline reads, as far as they are words.

    Attention is causal and padding at the end, so words are the same without a mask. The layers are called one by one,
    since what collects hidden states cannot be compiled.
    """
    states = text_encoder.embed_tokens(ids)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    rotation = text_encoder.rotary_emb(states, positions)
    for layer in text_encoder.layers[:-1]:
        states = layer(states, attention_mask=None, position_ids=positions, position_embeddings=rotation)
    return states


def velocity(
    transformer: ZImageTransformer2DModel,
    tokens: Tensor,
    sigma: Tensor,
    words: Tensor,
    is_word: Tensor,
    rotary: tuple[Tensor, Tensor],
) -> Tensor:
    """Predict image - noise, (N, 64, 64), at noise level `sigma` (N,): what the transformer gives, whose time is
    1 - sigma."""
    of_words, of_image = rotary
    time = transformer.t_embedder((1 - sigma) * transformer.t_scale)
    image = transformer.all_x_embedder[PATCH](tokens)
    time = time.type_as(image)
    for block in transformer.noise_refiner:
        image = block(image, None, of_image, time)
    caption = transformer.cap_embedder(words)
    caption = torch.where(is_word[..., None], caption, transformer.cap_pad_token.to(caption.dtype))
    for block in transformer.context_refiner:
        caption = block(caption, None, of_words)
    both, rotation = torch.cat([image, caption], 1), torch.cat([of_image, of_words], 1)
    for block in transformer.layers:
        both = block(both, None, rotation, time)
    return transformer.all_final_layer[PATCH](both, c=time)[:, :TOKENS]


def load_weights(folder: Path, transformer: ZImageTransformer2DModel, text_encoder: Qwen3Model) -> None:
    """Give both the weights of a finished folder, in fp32."""
    stored = ZImageTransformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32)
    transformer.load_state_dict(stored.state_dict())
    words = Qwen3Model.from_pretrained(folder / "text_encoder", dtype=torch.float32)
    text_encoder.load_state_dict(words.state_dict())


def build_tokenizer() -> CLIPTokenizer:
    """Build the tokenizer, with the template that ZImagePipeline applies: the prompt as it is."""
    words = tokenizer.build()
    words.chat_template = CHAT
    return words


def save(
    folder: Path, vae: AutoencoderKL, transformer: ZImageTransformer2DModel, text_encoder: Qwen3Model
) -> None:
    """Write the fp16 pipeline folder atomically."""
    scheduler: FlowMatchEulerDiscreteScheduler = build_scheduler()
    pipe = ZImagePipeline(
        scheduler=scheduler,
        vae=networks.half(vae, networks.build_vae(CHANNELS)),
        text_encoder=networks.half(text_encoder, build_text_encoder()),
        tokenizer=build_tokenizer(),
        transformer=networks.half(transformer, build_transformer()),
    )
    with networks.atomic_folder(folder) as unsaved:
        pipe.save_pretrained(unsaved, safe_serialization=True)
        networks.load_in_fp32(unsaved / "text_encoder")
        (unsaved / "tokenizer" / "chat_template.jinja").unlink()
        networks.edit(unsaved / "tokenizer" / "tokenizer_config.json", chat_template=CHAT)
