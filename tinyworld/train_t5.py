"""Pretrain tiny-flux's T5 on captions, before any images.

    python -m tinyworld.train_t5 --out build/flux --minutes 0.7

FLUX's T5 is a pretrained language model; this one is not. From images alone it did not learn which object is the left
one: after 29,000 steps of flow matching relations were at chance level, since the transformer gives words no positions
and only T5's relative bias encodes their order. So it is first trained to answer questions: colour, shape and size of
the left or upper object and of the other one, the position, the background. Each answer is read from the word vectors
by one attention and one linear layer, so the word vectors themselves must contain it.
"""

import argparse
import random
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import T5EncoderModel

from tinyworld import captions, flux, loop, networks, scenes, tokenizer
from tinyworld.words import COLOURS, KINDS, POSITIONS, SHAPES, SIZES, TONES

POOL_SEED = 19
NAME = "t5"
FOLDER = "t5"
UNSTATED = -100
AXES = ("beside", "upon")
THING = (COLOURS, SHAPES, SIZES)
QUESTIONS = (*THING, *THING, POSITIONS, AXES, TONES, KINDS)
"""What is asked of a caption: three of the first object (the left or upper one), three of the other, four of all."""


def answers(description: captions.Description) -> list[int]:
    """One index a question; UNSTATED where the caption is silent, or does not say which object is where."""

    def index_of(table: tuple[str, ...], word: str | None) -> int:
        return UNSTATED if word is None else table.index(word)

    things = list(description.things)
    if description.relation in ("right of", "below"):
        things.reverse()
    if len(things) != 1 and description.relation is None:
        things = []
    row = []
    for k in range(2):
        thing = things[k] if k < len(things) else captions.Thing()
        row += [index_of(COLOURS, thing.colour), index_of(SHAPES, thing.shape), index_of(SIZES, thing.size)]
    axis = None if description.relation is None else AXES[description.relation in ("above", "below")]
    return [
        *row,
        index_of(POSITIONS, description.position),
        index_of(AXES, axis),
        index_of(TONES, description.tone),
        index_of(KINDS, description.kind),
    ]


def questions(labels: scenes.Labels, seed: int) -> tuple[Tensor, Tensor]:
    """(N, 32) int16 token ids of one caption of each scene and (N, 10) int8 answers."""
    rng = random.Random(seed)
    rows = [captions.write(full, rng) for full in captions.describe(labels)]
    ids = torch.tensor(tokenizer.encode(tokenizer.build(), rows), dtype=torch.int16)
    return ids, torch.tensor([answers(captions.parse(row)) for row in rows], dtype=torch.int8)


class Reader(nn.Module):
    """Answers each question by one query over the words and one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(len(QUESTIONS), networks.TEXT_WIDTH) * 0.05)
        self.heads = nn.ModuleList([nn.Linear(networks.TEXT_WIDTH, len(table)) for table in QUESTIONS])

    def forward(self, words: Tensor) -> list[Tensor]:
        """Logits of every question, each (N, number of answers), from words (N, 32, 128)."""
        weights = (words @ self.queries.T).softmax(dim=1)
        pooled = weights.transpose(1, 2) @ words
        return [head(pooled[:, k]) for k, head in enumerate(self.heads)]


class ReadingLoss:
    """One step's loss on a random batch of captions; the figure is the share of right answers about two objects."""

    def __init__(self, t5: T5EncoderModel, reader: Reader, args: argparse.Namespace, batch: int) -> None:
        self.t5, self.reader, self.batch, self.device = t5, reader, batch, args.device
        ids, right = questions(scenes.sample(args.scenes, POOL_SEED), POOL_SEED + 1)
        self.ids, self.right = ids.to(args.device), right.to(args.device)
        self.compute = loop.compiled(self._compute, args)

    def __call__(self) -> tuple[Tensor, Tensor]:
        index = torch.randint(len(self.ids), (self.batch,), device=self.device)
        return self.compute(self.ids[index].long(), self.right[index].long())

    def _compute(self, ids: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        with loop.mixed_precision(self.device):
            words = self.t5(ids).last_hidden_state
        logits = self.reader(words.float())
        losses = [
            nn.functional.cross_entropy(rows, right[:, k], ignore_index=UNSTATED, reduction="sum")
            for k, rows in enumerate(logits)
        ]
        two = (right[:, 3] != UNSTATED) & (right[:, 0] != UNSTATED)
        hits = [(logits[k].argmax(1) == right[:, k]) & two for k in (0, 3)]
        share = (hits[0] & hits[1]).sum() / two.sum().clamp(min=1)
        return sum(losses) / (right != UNSTATED).sum(), share[None].detach()


def load(folder: Path) -> T5EncoderModel:
    """The finished encoder, fp32, on the CPU."""
    return T5EncoderModel.from_pretrained(folder, dtype=torch.float32)


def main() -> None:
    parser = loop.arguments(__doc__)
    parser.add_argument("--start-from", type=Path, help="a pipeline folder whose T5 to train on from")
    args = parser.parse_args()
    torch.manual_seed(0)
    loop.avoid_broken_attention()
    t5 = flux.build_t5().to(args.device).train()
    if args.start_from:
        t5.load_state_dict(flux.load_text(args.start_from, args.device)[1].state_dict())
    t5.set_attn_implementation("eager")
    reader = Reader().to(args.device)
    training = loop.Loop(
        NAME,
        {"t5": t5, "reader": reader},
        ReadingLoss(t5, reader, args, args.batch or 512),
        figures=("both_colours",),
        rate=1e-3,
        budget=loop.budget_from(args),
        checkpoint=args.out / f"{NAME}.pt",
        seed=20,
    )
    training.run()
    finished = training.finished
    training.use_ema()
    with networks.atomic_folder(loop.destination(args.out, FOLDER, finished)) as unsaved:
        t5.save_pretrained(unsaved, safe_serialization=True)


if __name__ == "__main__":
    main()
