"""Name faults and check requests of B's images, compared with A's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from vivace.proofs.drawing import DrawingFailed, DrawJob, DrawnImage
from vivace.proofs.drift import drifting
from vivace.proofs.endpoint import Endpoint
from vivace.proofs.image_findings import (
    ImageFinding,
    RequestOf,
    broken,
    duplicates,
    mixed,
    of_other_sizes,
    switched,
)
from vivace.proofs.pair_figures import (
    ROUNDING_DB,
    PairFigures,
    ReadImage,
    are_equal,
    is_near,
    psnr_of,
    read_image,
)
from vivace.proofs.prepare_sides import ImageSource, Prepared
from vivace.proofs.probes import hypotheses, main_jobs, probes, repeat_jobs
from vivace.proofs.proof_store import Letter, ProofStore
from vivace.proofs.server_checks import (
    ServerCheck,
    Status,
    answers_check,
    field_checks,
    probe_check,
    repeat_check,
)
from vivace.proofs.several_checks import several_checks
from vivace.proofs.sides import EndpointSide
from vivace.proofs.state_checks import (
    cancelled_check,
    lora_checks,
    negative_prompt_check,
    together_check,
)

_NEARER_DB = 20.0
"""By how much B's image is nearer to what A draws with other values, if that is what B drew."""


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


def request_for(endpoint: Endpoint | None) -> RequestOf:
    """Return what returns the request for B's image of a pair."""

    def request_of(pair: PairFigures) -> str:
        if endpoint is None:
            return ""
        return endpoint.curl(endpoint.body(pair.prompt, pair.seed, pair.settings))

    return request_of


def findings_of(
    prepared: Prepared, pairs: Sequence[PairFigures], images: StoredImages, request_of: RequestOf
) -> list[ImageFinding]:
    listed = [*broken(pairs, request_of), *of_other_sizes(pairs, request_of), *duplicates(pairs, request_of)]
    listed += switched(pairs, request_of) or _instead(prepared, images, request_of, pairs[0])
    if not listed:
        listed += mixed(pairs, request_of)
    return [*listed, *drifting(pairs, request_of)]


def _instead(
    prepared: Prepared, images: StoredImages, request_of: RequestOf, pair: PairFigures
) -> list[ImageFinding]:
    """Return what B drew instead of the first image, if A draws the same with other values, up to rounding."""
    if not (pair.a.is_there and pair.b.is_there) or are_equal(pair.a, pair.b):
        return []
    least_db = max(ROUNDING_DB, psnr_of(pair.a, pair.b) + _NEARER_DB)
    words = [
        hypothesis.words
        for hypothesis in hypotheses(prepared)
        if (image := images.image("a", hypothesis.job)).is_there and psnr_of(image, pair.b) >= least_db
    ]
    if not words:
        return []
    summary = f"instead: B draws A's image of {' or of '.join(words)}"
    return [ImageFinding(summary, pair.label, request_of(pair), is_cause=True)]


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
                draw_again=partial(_drawn_again, prepared, probe.job, images),
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


def _drawn_again(prepared: Prepared, job: DrawJob, images: StoredImages) -> ReadImage | None:
    try:
        with prepared.open(prepared.b) as drawer:
            return images.read(drawer.draw(job.prompt, job.seed, job.settings))
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
