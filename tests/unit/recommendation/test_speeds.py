"""What records say of a technique's speed, and the order of changes that `vivace plan --card` tries."""

from vivace.evidence.recommendation.predicted import Speeds, known_speeds
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.fit import _saving_recipes


def test_speeds_are_those_of_the_records() -> None:
    speeds = known_speeds("flux-dev")
    assert speeds.gpu == "NVIDIA H200"
    int8, compiled = speeds.of("int8"), speeds.of("int8+compile")
    assert int8 is not None
    assert compiled is not None
    assert int8 < 1 < compiled
    assert speeds.of("quantize(nf4)@denoiser,text_encoder_2+compile") == speeds.of("nf4+compile")
    assert speeds.of("quantize(nf4)@vae") is None
    assert speeds.of("offload(group)+compile") is None, "there is no such recipe"
    assert known_speeds("tiny-sd") == Speeds()


def test_a_row_of_a_captured_baseline_is_what_it_adds() -> None:
    gain = known_speeds("sd15").of("int8")
    assert gain is not None
    assert 0.7 < gain < 0.9, "quantize(int8)+cuda_graph over cuda_graph"


def test_changes_that_cost_little_time_are_tried_first() -> None:
    speeds = Speeds({"quantize(int8)": 0.5, "quantize(int8)+compile": 1.2, "offload(model)": 0.95})
    order = _saving_recipes(speeds.of, "text_encoder_2")
    assert order[0] == "quantize(int8)+compile"
    assert order.index("channels_last@vae") < order.index("offload(model)") < order.index("offload(group)")
    kept = [all(technique.facts.same_picture for technique in resolve(recipe)) for recipe in order]
    assert kept == sorted(kept, reverse=True), "what keeps the image comes first"
    slow = _saving_recipes(Speeds({"quantize(int8)": 0.5, "offload(model)": 0.95}).of, "text_encoder_2")
    assert slow.index("offload(model)") < slow.index("quantize(int8)")
