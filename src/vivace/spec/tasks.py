"""What images are generated from, and how prompts are given: names that the command line knows without pydantic."""

from __future__ import annotations

from typing import Literal, get_args

TextMode = Literal["prompts", "repeated", "embeddings"]
Task = Literal["text", "image", "inpaint", "control", "edit"]
TASKS: tuple[Task, ...] = get_args(Task)
