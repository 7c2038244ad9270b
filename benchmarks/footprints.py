"""Write what the catalogue's models need and compute into the package, for `vivace recommend`.

    python -m benchmarks.footprints               predict each model as it is published, at its own size (minutes)
    python -m benchmarks.footprints NAME ...      these again, and keep the others'

The predictions are those of `vivace plan`. Nothing is downloaded, and no GPU is needed. A test predicts some anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from vivace.architectures import CATALOGUE
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.machinery.technique import DENOISERS
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.fit import largest_encoder
from vivace.runtime.memory.predict import Prediction, predict
from vivace.runtime.memory.remembered import FOOTPRINTS, Footprints, Quantised, Scheme, network, shipped
from vivace.runtime.memory.weightless import find_weightless

SCHEMES: tuple[Scheme, ...] = ("int8", "nf4")


def main(names: list[str]) -> None:
    """Predict and write, after each model."""
    footprints = shipped() if FOOTPRINTS.exists() and names else Footprints()
    models, quantised = dict(footprints.models), dict(footprints.quantised)
    for name in names or list(CATALOGUE):
        models[name] = predict(find_weightless(name), resolve(BASELINE))
        for key, by_scheme in _quantised(name, models[name], set() if names else set(quantised)):
            quantised[key] = by_scheme
        print(f"{name}: {models[name].peak_bytes / 1e9:.2f} GB", flush=True)
        ordered = {model: models[model] for model in CATALOGUE if model in models}
        content = Footprints(models=ordered, quantised=dict(sorted(quantised.items())))
        FOOTPRINTS.write_text(content.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _quantised(
    name: str, published: Prediction, without: set[str]
) -> Iterator[tuple[str, dict[Scheme, Quantised]]]:
    """Yield the denoiser and the largest text encoder of a model, quantised in each scheme."""
    encoder = largest_encoder(published)
    parts = {
        "denoiser": next(part for part in published.components if part.name in DENOISERS),
        **({} if encoder is None else {encoder: next(p for p in published.components if p.name == encoder)}),
    }
    if all(network(part) in without for part in parts.values()):
        return
    model = find_weightless(name)
    quantised: dict[str, dict[Scheme, Quantised]] = {network(part): {} for part in parts.values()}
    for scheme in SCHEMES:
        after = predict(model, resolve(f"quantize({scheme})@{','.join(parts)}"))
        for target, part in parts.items():
            stage = "denoiser" if target == "denoiser" else "text encoders"
            now = next(component for component in after.components if component.name == part.name)
            more = (after.stages[stage] - after.model_bytes) - (
                published.stages[stage] - published.model_bytes
            )
            quantised[network(part)][scheme] = Quantised(
                share=round(now.num_bytes / part.num_bytes, 4),
                beside_bytes=max(0, more),
                loading_bytes=max(0, after.loading_bytes - after.model_bytes),
            )
    yield from quantised.items()


if __name__ == "__main__":
    main(sys.argv[1:])
