"""What a technique is: its stage, knobs, targets, effect, and the traits by which techniques meet."""

from vivace.machinery.technique.anatomy import (
    COMPONENTS,
    DENOISERS,
    TEXT_ENCODERS,
    Component,
    attribute_of,
    call_of,
    call_parameters,
    component_of,
    ignores_guidance_scale,
    is_cast_in_call,
    weights_dtype,
    without_clashes,
    working_part,
)
from vivace.machinery.technique.script import Script
from vivace.machinery.technique.target import (
    Backend,
    CallContext,
    Effect,
    Facts,
    Machine,
    ModelFacts,
    Placement,
    Request,
    Target,
)
from vivace.machinery.technique.technique import Arithmetic, Technique, TechniqueFacts, knob
from vivace.machinery.technique.traits import Rule, Stage, Trait

__all__ = [
    "COMPONENTS",
    "DENOISERS",
    "TEXT_ENCODERS",
    "Arithmetic",
    "Backend",
    "CallContext",
    "Component",
    "Effect",
    "Facts",
    "Machine",
    "ModelFacts",
    "Placement",
    "Request",
    "Rule",
    "Script",
    "Stage",
    "Target",
    "Technique",
    "TechniqueFacts",
    "Trait",
    "attribute_of",
    "call_of",
    "call_parameters",
    "component_of",
    "ignores_guidance_scale",
    "is_cast_in_call",
    "knob",
    "weights_dtype",
    "without_clashes",
    "working_part",
]
