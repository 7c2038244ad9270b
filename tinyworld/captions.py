"""Write captions of scenes, and parse captions back exactly.

A caption may leave out size, position, relation or background (rarely colour or shape), so a parsed description is
partial: None for what the caption does not say. The verifier judges an image against the caption, not the scene.
"""

import random
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

from tinyworld.scenes import Labels
from tinyworld.words import (
    ANY_SHAPE,
    COLOUR_WORDS,
    COLOURS,
    IDLE,
    KIND_WORDS,
    KINDS,
    POSITION_WORDS,
    POSITIONS,
    PREFIXES,
    RELATION_WORDS,
    RELATIONS,
    SHAPE_WORDS,
    SHAPES,
    SIZE_WORDS,
    SIZES,
    TONE_WORDS,
    TONES,
    vocabulary,
)  # fmt: skip


@dataclass(frozen=True)
class Thing:
    """One object as described."""

    colour: str | None = None
    shape: str | None = None
    size: str | None = None


@dataclass(frozen=True)
class Description:
    """The content of a caption. `position` is set only for a single thing; `relation` is of things[0] to things[1]."""

    things: tuple[Thing, ...] = ()
    position: str | None = None
    relation: str | None = None
    tone: str | None = None
    kind: str | None = None


def describe(labels: Labels) -> list[Description]:
    """Return the complete description of each scene."""
    rows = zip(
        *(
            getattr(labels, name).tolist()
            for name in ("count", "colour", "shape", "size", "layout", "tone", "kind")
        ),
        strict=True,
    )
    out = []
    for count, colour, shape, size, layout, tone, kind in rows:
        things = tuple(Thing(COLOURS[colour[k]], SHAPES[shape[k]], SIZES[size[k]]) for k in range(count))
        out.append(
            Description(
                things,
                position=POSITIONS[layout] if count == 1 else None,
                relation=RELATIONS[layout] if count == 2 else None,
                tone=TONES[tone],
                kind=KINDS[kind],
            )
        )
    return out


def _pick(words: Sequence[str], rng: random.Random) -> str:
    return words[0] if rng.random() < 0.6 else rng.choice(words)


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _write_thing(thing: Thing, rng: random.Random) -> str:
    words = []
    if thing.size:
        words.append(_pick(SIZE_WORDS[thing.size], rng))
    if thing.colour:
        words.append(_pick(COLOUR_WORDS[thing.colour], rng))
    words.append(_pick(SHAPE_WORDS[thing.shape], rng) if thing.shape else rng.choice(ANY_SHAPE))
    article = "the" if rng.random() < 0.03 else _article(words[0])
    return " ".join([article, *words])


def _write_background(tone: str | None, kind: str | None, rng: random.Random) -> str:
    words = []
    # A tone with no kind means a plain one, so "plain" itself is written only now and then.
    if kind and (kind != "plain" or tone is None or rng.random() < 0.15):
        words.append(_pick(KIND_WORDS[kind], rng))
    if tone:
        # "a striped gray background" and "a gray striped background" are both English.
        words.insert(rng.choice((0, len(words))), _pick(TONE_WORDS[tone], rng))
    lead = "against" if rng.random() < 0.1 else "on"
    noun = "backdrop" if rng.random() < 0.05 else "background"
    return " ".join([lead, _article(words[0]), *words, noun])


def write(full: Description, rng: random.Random, *, terse: float = 0.35, noise: float = 0.25) -> str:
    """Write a caption of a scene.

    Args:
        terse: probability of leaving out size, position or background.
        noise: probability of meaningless words. 0 also keeps colour and shape in every caption (for evaluation).
    """

    def unless_omitted(value: str | None, chance: float) -> str | None:
        return None if rng.random() < chance else value

    vague = 0.03 if noise else 0.0
    things = [
        Thing(
            unless_omitted(thing.colour, vague),
            unless_omitted(thing.shape, vague),
            unless_omitted(thing.size, terse),
        )
        for thing in full.things
    ]
    words = [_write_thing(thing, rng) for thing in things]
    if len(things) == 2:
        relation = unless_omitted(full.relation, 0.08)
        link = _pick(RELATION_WORDS[relation], rng) if relation else "and"
        body = f"{words[0]} {link} {words[1]}"
    else:
        body = words[0]
        if position := unless_omitted(full.position, terse):
            where = _pick(POSITION_WORDS[position], rng)
            body = f"{where} {body}" if rng.random() < 0.08 else f"{body} {where}"
    if rng.random() >= terse:
        shortest = rng.random()  # "on a striped background" now and then, tone unsaid
        tone, kind = (None if shortest < 0.06 else full.tone), full.kind
        body = f"{body} {_write_background(tone, kind, rng)}"
    if rng.random() < noise:
        body = _disturb(body, rng)
    return body


def _disturb(body: str, rng: random.Random) -> str:
    """Add meaningless words before or after the caption, as in real prompts."""
    before, after = [], []
    if rng.random() < 0.6:
        before.append(rng.choice(PREFIXES))
    if rng.random() < 0.4:
        after += [rng.choice(IDLE) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.3:
        letters = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 7)))
        extra = letters if letters not in _VOCABULARY else str(rng.randint(0, 99))
        if rng.random() < 0.15:
            extra = rng.choice("äéßøñжλ中🙂⭐")  # outside the tokenizer's alphabet
        (before if rng.random() < 0.3 else after).append(extra)
    comma = rng.choice((" ", ", "))
    text = " ".join([*before, body]) + (comma + rng.choice((" ", ", ")).join(after) if after else "")
    return text + rng.choice(("", "", ".", "!"))


_VOCABULARY = frozenset(vocabulary())


def _meanings(table: dict[str, tuple[str, ...]]) -> dict[str, str]:
    return {word: name for name, words in table.items() for word in words}


_COLOUR, _SHAPE, _SIZE = _meanings(COLOUR_WORDS), _meanings(SHAPE_WORDS), _meanings(SIZE_WORDS)
_TONE, _KIND, _RELATION = _meanings(TONE_WORDS), _meanings(KIND_WORDS), _meanings(RELATION_WORDS)


def _any(words: Sequence[str]) -> str:
    return "|".join(sorted(words, key=len, reverse=True))


_BACKGROUND_AT = re.compile(
    rf"\b(?:on|against)\s+(?:an?|the)\s+((?:(?:{_any([*_TONE, *_KIND])})\s+){{1,2}})(?:background|backdrop)\b"
)
_POSITION_AT = re.compile(
    r"\b(?:in|at|on)\s+the\s+(?:(top|upper|bottom|lower|left|right|middle|center|centre)"
    r"(?:\s+(left|right|middle|center|centre))?)(?:\s+(?:corner|side|edge|half|part))?\b(?!\s+of)"
)
_RELATION_AT = re.compile(rf"\b(?:{_any(list(_RELATION))})\b")
_PLACE = {"top": 0, "upper": 0, "bottom": 2, "lower": 2}
_SIDEWAYS = {"left": 0, "right": 2}


def parse(caption: str) -> Description:
    """Parse a caption. Unknown words are ignored, so every text can be parsed."""
    text = " ".join(re.findall(r"[a-z0-9]+", caption.lower()))
    text = re.sub(r"\bof the (?:picture|image|canvas)\b", "", text)
    tone = kind = position = None
    if match := _BACKGROUND_AT.search(text):
        words = match[1].split()
        tone = next((_TONE[word] for word in words if word in _TONE), None)
        kind = next((_KIND[word] for word in words if word in _KIND), "plain")
        text = text[: match.start()] + text[match.end() :]
    if match := _POSITION_AT.search(text):
        row = next((_PLACE[word] for word in match.groups() if word in _PLACE), 1)
        column = next((_SIDEWAYS[word] for word in match.groups() if word in _SIDEWAYS), 1)
        position = POSITIONS[3 * row + column]
        text = text[: match.start()] + text[match.end() :]
    # The things: each ends at its noun. Colour and size before the noun belong to it.
    things, relation = [], None
    colour = size = None
    noun_ends = []
    for match in re.finditer(r"\S+", text):
        word = match[0]
        if word in _COLOUR:
            colour = _COLOUR[word]
        elif word in _SIZE:
            size = _SIZE[word]
        elif word in _SHAPE or word in ANY_SHAPE:
            if len(things) < 2:
                things.append(Thing(colour, _SHAPE.get(word), size))
                noun_ends.append((match.start(), match.end()))
            colour = size = None
    if len(things) == 2:
        between = text[noun_ends[0][1] : noun_ends[1][0]]
        if match := _RELATION_AT.search(between):
            relation = _RELATION[match[0]]
        position = None
    return Description(tuple(things), position, relation, tone, kind)


MISTAKES = ("colour", "shape", "relation", "position")
"""The kinds of mistakes that `mistaken` can make."""

_WORDS_OF = {
    "colour": COLOUR_WORDS,
    "shape": SHAPE_WORDS,
    "relation": RELATION_WORDS,
    "position": POSITION_WORDS,
}
_MENTIONS = {
    kind: re.compile(rf"\b(?:{_any([word for words in table.values() for word in words])})\b")
    for kind, table in _WORDS_OF.items()
}


def mistaken(caption: str, mistake: str, rng: random.Random) -> str | None:
    """Replace one colour, shape, relation or position of the caption with another; None if it has none.

    Everything else keeps its wording, so that the mistake is the only difference.
    """
    table = _WORDS_OF[mistake]
    background = _BACKGROUND_AT.search(caption.lower())
    places = [
        match
        for match in _MENTIONS[mistake].finditer(caption)
        if background is None or not background.start() <= match.start() < background.end()
    ]
    if not places:
        return None
    place = rng.choice(places)
    true = next(name for name, words in table.items() if place[0] in words)
    other = _pick(table[rng.choice([name for name in table if name != true])], rng)
    before = re.sub(r"\ban? $", f"{_article(other)} ", caption[: place.start()])
    wrong = before + other + caption[place.end() :]
    return wrong if parse(wrong) != parse(caption) else None
