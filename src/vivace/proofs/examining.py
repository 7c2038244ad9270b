"""Name faults and check requests of B's images, compared with A's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from vivace.proofs.alterations import altered
from vivace.proofs.drawing import DrawingFailed, DrawJob, DrawnImage
from vivace.proofs.drift import drifting
from vivace.proofs.endpoint import Endpoint
from vivace.proofs.holes import holes
from vivace.proofs.image_findings import (
    ImageFinding,
    RequestOf,
    broken,
    duplicates,
    mixed,
    of_other_sizes,
    switched,
)
from vivace.proofs.pair_figures import PairFigures, ReadImage, read_image
from vivace.proofs.patterns import fixed, patterns, seams
from vivace.proofs.prepare_sides import ImageSource, Prepared
from vivace.proofs.probes import main_jobs, probes, repeat_jobs, suppositions
from vivace.proofs.proof_store import Letter, ProofStore
from vivace.proofs.same import OwnDistances
from vivace.proofs.server_checks import (
    ServerCheck,
    Status,
    answers_check,
    are_equal,
    field_checks,
    is_near,
    probe_check,
    psnr_of,
    repeat_check,
)
from vivace.proofs.several_checks import several_checks
from vivace.proofs.sides import EndpointSide
from vivace.proofs.state_checks import (
    cancelled_check,
    is_nearer,
    lora_checks,
    negative_prompt_check,
    together_check,
)


class StoredImages:
    """The images of a store, each read once."""

    def __init__(self, store: ProofStore) -> None:
        self._store = store
        self._read: dict[tuple[Letter, DrawJob], ReadImage] = {}

    def image(self, letter: Letter, job: DrawJob) -> ReadImage:
        key = (letter, job)
        if key not in self._read:
            self._read[key] = read_image(self._store.image(letter, job))
        return self._read[key]

    def read(self, image: DrawnImage) -> ReadImage:
        """Return an image that belongs to no job."""
        return read_image(self._store.keep_file(image))


def endpoint_of(prepared: Prepared, source: ImageSource) -> Endpoint | None:
    return prepared.endpoint(source) if isinstance(source.side, EndpointSide) else None


def findings_of(
    prepared: Prepared,
    pairs: Sequence[PairFigures],
    own: OwnDistances,
    images: StoredImages,
    endpoint: Endpoint | None,
) -> list[ImageFinding]:
    def request_of(pair: PairFigures) -> str:
        if endpoint is None:
            return ""
        return endpoint.curl(endpoint.body(pair.prompt, pair.seed, pair.settings))

    listed = [*broken(pairs, request_of), *of_other_sizes(pairs, request_of), *duplicates(pairs, request_of)]
    listed += switched(pairs, own, request_of) or _supposed(prepared, images, request_of, pairs[0])
    listed += holes(pairs, own, request_of)
    if not listed:
        listed += mixed(pairs, own, request_of)
    listed += drifting(pairs, request_of)
    regular = (
        patterns(pairs, request_of)
        or altered(pairs, own, request_of)
        or fixed(pairs, request_of)
        or seams(pairs, own, request_of)
    )
    return [*listed, *regular]


def _supposed(
    prepared: Prepared, images: StoredImages, request_of: RequestOf, pair: PairFigures
) -> list[ImageFinding]:
    """Return what B did instead of following a request, if its first image is A's of other values."""
    if not pair.against:
        return []
    fitting = []
    for supposed in suppositions(prepared):
        image = images.image("a", supposed.job)
        if image.is_there and not are_equal(pair.a, image) and is_nearer(image, pair.b, pair.a):
            fitting.append((psnr_of(image, pair.b), supposed.words))
    if not fitting:
        return []
    _, words = max(fitting, key=lambda each: each[0])
    return [ImageFinding(f"instead: B draws A's image of {words}", pair.label, request_of(pair))]


def checks_of(prepared: Prepared, images: StoredImages, endpoint: Endpoint | None) -> list[ServerCheck]:
    if not prepared.b.draws:
        return []
    job = main_jobs(prepared)[0]
    first = images.image("b", job)
    checks = (
        [] if endpoint is None else answers_check([images.image("b", each) for each in main_jobs(prepared)])
    )
    if not first.is_there:
        name = "the first image is drawn"
        return [*checks, ServerCheck(name, Status.UNCLEAR, first.reason, first.kept.request)]

    def request_of(drawn: DrawJob) -> str:
        if endpoint is None:
            return ""
        return endpoint.curl(endpoint.body(drawn.prompt, drawn.seed, drawn.settings))

    repeated = repeat_check(_repeats(prepared, images, request_of))
    checks.append(repeated)
    is_same_model = is_near(images.image("a", job), first)
    for probe in probes(prepared):
        both = images.image("a", probe.base), images.image("a", probe.job)
        checks.append(
            probe_check(
                probe,
                images.image("b", probe.base),
                images.image("b", probe.job),
                both if probe.is_of_reference and prepared.a.draws else None,
                request_of(probe.job),
                is_same_model=is_same_model,
                repeats=repeated.status is not Status.FAILED,
                draw_again=None if endpoint is None else partial(_drawn_again, endpoint, probe.job, images),
            )
        )
    if endpoint is not None:
        drawn = [(each, images.image("b", each)) for each in main_jobs(prepared)]
        checks += [*several_checks(endpoint, job, first, images.read), *field_checks(endpoint, job)]
        checks += lora_checks(endpoint, job, first, images.image("a", job), images.read)
        negative = negative_prompt_check(endpoint, job, first, images.read)
        checks += [negative] if negative is not None else []
        checks += [
            together_check(endpoint, drawn, images.read),
            cancelled_check(endpoint, drawn, images.read),
        ]
    return checks


def _drawn_again(endpoint: Endpoint, job: DrawJob, images: StoredImages) -> ReadImage | None:
    try:
        return images.read(endpoint.draw(job.prompt, job.seed, job.settings))
    except DrawingFailed:
        return None


def _repeats(
    prepared: Prepared, images: StoredImages, request_of: Callable[[DrawJob], str]
) -> list[tuple[str, ReadImage, ReadImage, str]]:
    repeats = []
    for again in repeat_jobs(prepared):
        first, second = images.image("b", replace(again, repeat=0)), images.image("b", again)
        repeats.append((f"“{again.prompt[:60]}” seed {again.seed}", first, second, request_of(again)))
    return repeats
