"""Find the GPU of a name as people and drivers write it: "4070ti", "NVIDIA A100-SXM4-40GB". Words that say nothing of
the chip are dropped, and the rest has to be that of a chip, whole."""

from __future__ import annotations

import difflib
import re
from enum import IntEnum
from functools import cache

from vivace.errors import UsageError
from vivace.foundation.hardware.chip import Chip, Gpu
from vivace.foundation.hardware.data_sheets import DATACENTER, GEFORCE, WORKSTATION

CHIPS: tuple[Chip, ...] = (*DATACENTER, *WORKSTATION, *GEFORCE)
"""All chips that vivace knows."""

_SILENT = frozenset({
    "nvidia", "geforce", "gpu", "gpus", "graphics", "card", "tesla", "rtx", "gtx", "titan", "sxm", "sxm2",
    "sxm3", "sxm4", "sxm5", "sxm6", "hbm", "hbm2", "hbm2e", "hbm3", "hbm3e", "gddr5", "gddr6", "gddr6x",
    "gddr7", "edition", "workstation", "server", "founders", "fe", "oc", "desktop", "generation", "gen",
    "tensor", "core", "superchip", "grace", "vram", "memory", "with", "design", "dgx", "hgx", "aws", "custom",
})  # fmt: skip
"""Words that do not tell chips apart. "RTX" is among them: a 4070 is an RTX 4070."""
_OPTIONAL = (
    {"pcie", "pci", "nvl", "cnx"},
    {"blackwell", "hopper", "ampere", "turing", "volta", "lovelace", "pascal"},
    {"maxq", "sff"},
    {"quadro"},
)
"""Words that tell some chips apart; where they do not, they are dropped, in this order."""
_JOINED = (
    (re.compile(r"max[\s-]*q"), "maxq"),
    (re.compile(r"ada[\s-]*lovelace"), "ada"),
    (re.compile(r"\b(\d+(?:\.\d+)?)\s*(?:gi?b?|gigs?)\b"), r"\1gb"),
)
_SEVERAL = re.compile(
    r"(?P<before>\d{1,3})\s*[x×*]\s*(?P<name>\D.*|\d{4}.*)|(?P<name_first>.*\S)\s*[x×*]\s*(?P<after>\d{1,3})",
    re.I,
)
"""Several of one kind: "4x A100", "H100 x8"."""
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)gb")
_GLUED = re.compile(
    r"(?P<brand>nvidia|geforce|rtx|gtx|quadro|pro|titan|tesla)(?=[a-z]*\d)|(?P<model>\d{4}(?=ti|s|d|m|laptop|mobile|ada|gb|\b)"
    r"|[a-z]{1,2}\d{1,4}(?=sxm|pcie|nvl|\b))|(?P<suffix>tisuper|super|laptop|mobile|pcie|nvl|sxm\d?|ada|ti(?=$|s|\d)|[sdm]$)"
)
_SUFFIXES = {"s": "super", "m": "laptop", "mobile": "laptop", "notebook": "laptop", "pci": "pcie"}
_AMBIGUOUS = re.compile(r"2000|4000|4500|5000|6000")
_OTHERS = (
    ("Apple", re.compile(r"\b(?:apple|mps|metal|m[1-5](?: ?(?:pro|max|ultra))?)\b")),
    (
        "AMD",
        re.compile(
            r"\b(?:amd|radeon|instinct|rocm|rx ?\d{3,4}\w*|[67]\d00 ?xtx?|90[67]0 ?xtx?|mi ?\d{2,3}[ax]?|w[67]\d00"
            r"|strix ?halo)\b"
        ),
    ),
    (
        "Intel",
        re.compile(
            r"\b(?:intel|arc|[ab](?:380|570|580|750|770)|battlemage|gaudi ?\d?|xpu|max 1[15]50|iris|ponte vecchio)\b"
        ),
    ),
    ("Google", re.compile(r"\b(?:tpu|google)\b")),
)
_PROCESSOR = re.compile(r"\b(?:epyc|ryzen|xeon|threadripper|graviton\d?|core i\d|neoverse)\b")
_MOST_NEAR = 3
_LABELS = frozenset({"a2", "l2"})
"""Names of chips that in a text are more often labels of rows."""
_MARKS = ":,;|*#()[]"
_FIRST = frozenset({
    "memory", "vram", "with", "gpu", "gpus", "custom", "core", "server", "desktop", "generation", "gen", "design",
})  # fmt: skip
_LAST = frozenset({"memory", "vram", "with", "gpus"})
"""Words that no GPU's name in a text starts or ends with."""


def known_gpu(name: str) -> Gpu | None:
    """Return the GPU of a name; None if vivace does not know it. The memory is that of the name, where it has one that
    the chip can have: "A100-SXM4-40GB", "RTX 4060 Ti 16GB"."""
    words, sizes = _words(name)
    chip = _chip(words)
    if chip is None:
        return None
    own = {size for size in sizes if size not in chip.other_gb}
    if len(own) > 1 or not all(_is_possible(size, chip) for size in own):
        return None
    return Gpu(chip, own.pop() if own else None)


def named_gpu(name: str, option: str = "--gpu") -> Gpu:
    """Return the GPU of a name that a user gave."""
    gpu = known_gpu(name)
    if gpu is not None:
        return gpu
    raise UsageError(f"{option} {_printable(name)}: {_why_unknown(name)}")


def counted(name: str) -> tuple[int, str]:
    """Return how many GPUs a name means, and that of one: 4 and "A100" for "4x A100" or "A100 x4"."""
    several = _SEVERAL.fullmatch(name.strip())
    if several is None:
        return 1, name
    return max(1, int(several["before"] or several["after"])), several["name"] or several["name_first"]


def gpu_in(text: str) -> tuple[str, str]:
    """Return the name of the chip that a text names, and the text without it; two empty and unchanged if it names none.
    A number alone is taken for a GPU only from 3050 on: others are sizes of images more often."""
    words = text.split()
    for length in range(min(len(words), 6), 0, -1):
        for start in range(len(words) - length + 1):
            part = words[start : start + length]
            gpu = None if _is_plain(part) else known_gpu(" ".join(part).strip(_MARKS))
            if gpu is not None:
                return gpu.chip.name, " ".join([*words[:start], *words[start + length :]])
    return "", text


def _is_plain(words: list[str]) -> bool:
    """Whether words are hardly a GPU's name, though they could be."""
    plain = [word.strip(_MARKS).lower() for word in words]
    if plain[0] in _FIRST or plain[-1] in _LAST:
        return True
    return len(plain) == 1 and (plain[0] in _LABELS or bool(re.fullmatch(r"(?:1\d|20)\d\d", plain[0])))


def nearest_gpus(name: str) -> tuple[str, ...]:
    """Return the names of the chips whose spelling is nearest, the nearest first; empty if none is near."""
    words, _ = _words(name)
    if len(words) == 1 and _AMBIGUOUS.fullmatch(words[0]):
        return tuple(chip.name for chip in WORKSTATION if words[0] in _words(chip.name)[0])
    joined = "".join(words)
    number = re.search(r"\d{2,4}", joined)
    by_key = {"".join(key): chip for key, chip in _by_words().items()}
    close = difflib.get_close_matches(joined, list(by_key), n=3 * _MOST_NEAR, cutoff=0.7)
    if number is not None:  # a "4090 Ti" is rather a 4090 than a 4070 Ti
        close.sort(key=lambda key: number.group() not in key)
    return tuple(dict.fromkeys(by_key[key].name for key in close))[:_MOST_NEAR]


@cache
def _by_words() -> dict[tuple[str, ...], Chip]:
    chips: dict[tuple[str, ...], Chip] = {}
    for chip in CHIPS:
        for name in (chip.name, *chip.aliases):
            key = _words(name)[0]
            assert chips.setdefault(key, chip) is chip, f"{name} is {chips[key].name} and {chip.name}"
    return chips


def _words(name: str) -> tuple[tuple[str, ...], list[float]]:
    """Return the words of a name that tell chips apart, sorted, and the sizes of memory in it, in GB."""
    text = re.sub(r"\((?:tm|r)\)|[™®]", " ", name.lower())
    for pattern, instead in _JOINED:
        text = pattern.sub(instead, text)
    words, sizes = [], []
    for word in re.split(r"[\s_/,:()+-]+", text):
        if size := _MEMORY.fullmatch(word):
            sizes.append(float(size[1]))
            continue
        for part in _parts(word):
            if (size := _MEMORY.fullmatch(part)) is not None:
                sizes.append(float(size[1]))
            elif part and part not in _SILENT:
                words.append(_SUFFIXES.get(part, part))
    # "TITAN" tells nothing beside RTX and V alone, which are no names of their own.
    if re.search(r"\btitan\b", text):
        words = ["titan", *(["rtx"] if "rtx" in text else []), *words]
    return tuple(sorted(set(words))), sizes


def _parts(word: str) -> list[str]:
    """Return the parts of a word without spaces: "rtx4070tisuper" is "rtx", "4070", "ti", "super"."""
    if word in _SILENT or word in _SUFFIXES or any(word in group for group in _OPTIONAL):
        return [word]
    parts, rest = [], word
    if size := re.search(r"(?<=[a-z])(\d+gb)$|(?<=\d{4})-?(\d{1,2}gb)$", rest):
        parts.append(size.group())
        rest = rest[: size.start()]
    while rest:
        match = _GLUED.match(rest)
        if match is None:
            return [word] if rest == word else [*parts, rest]
        parts += ["ti", "super"] if match.group() == "tisuper" else [match.group()]
        rest = rest[match.end() :]
    return parts


def _chip(words: tuple[str, ...]) -> Chip | None:
    chips = _by_words()
    if words in chips:
        return chips[words]
    left = set(words)
    if "maxq" in left and "pro" not in left:
        left = left - {"maxq"} | {"laptop"}
    for optional in ({"none"}, *_OPTIONAL):
        left -= optional
        if (key := tuple(sorted(left))) in chips:
            return chips[key]
    return None


def _is_possible(size: float, chip: Chip) -> bool:
    return 0.5 * min(chip.memory_gb) <= size <= 2 * max(chip.memory_gb)


def _why_unknown(name: str) -> str:
    text = re.sub(r"[\s_-]+", " ", name.lower())
    words, sizes = _words(name)
    chip = _chip(words)
    if chip is not None:
        return f"{chip.name} has {chip.sizes} GB of memory, not {' and '.join(f'{size:g}' for size in sizes)}"
    if re.search(r"\bmig\b", text):
        return (
            "a part of a GPU (MIG) has other times than the whole, and none is known; give its memory with "
            "--max-memory or --card, and no --gpu"
        )
    for maker, pattern in _OTHERS:
        if pattern.search(text):
            return (
                f"that is {maker}'s, and vivace has records and data sheets of NVIDIA's GPUs alone; on that machine, "
                "vivace tune measures what is fastest"
            )
    if _PROCESSOR.search(text):
        return "that is a CPU, not a GPU; give cpu"
    near = nearest_gpus(name)
    if near:
        return f"no such GPU is known; did you mean {' or '.join(repr(name) for name in near)}?"
    return (
        f"no such GPU is known; give a name such as H100, A100 80GB, RTX 4070 Ti or RTX 6000 Ada ({len(CHIPS)} of "
        "NVIDIA's are known, from Pascal to Blackwell: docs/hardware.md)"
    )


def _printable(text: str) -> str:
    printable = "".join(character if character.isprintable() else "�" for character in text[:60])
    return repr(printable)


class Near(IntEnum):
    """How near a device is to the requested one; lower is nearer."""

    SAME = 0
    GENERATION = 1
    OTHER = 2


def near(name: str, other: str) -> Near:
    """Return how near two GPUs are. Sizes of memory make no difference: times hardly depend on them."""
    here, there = known_gpu(name), known_gpu(other)
    if here is None or there is None:
        return Near.SAME if _plain(name) == _plain(other) else Near.OTHER
    if here.chip is there.chip:
        return Near.SAME
    return Near.GENERATION if here.chip.architecture == there.chip.architecture else Near.OTHER


def architecture_of(name: str) -> str | None:
    """Return the architecture of a GPU by its name, such as "Hopper"; None if it is not known."""
    gpu = known_gpu(name)
    return None if gpu is None else gpu.chip.architecture


def capability_of(name: str) -> tuple[int, int] | None:
    """Return the compute capability of a GPU by its name; None if it is not known."""
    gpu = known_gpu(name)
    return None if gpu is None else gpu.chip.capability


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", " ", name.removeprefix("NVIDIA ")).strip().lower()
