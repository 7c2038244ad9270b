"""Tasks, and forms of prompts: names that the command line needs without pydantic."""

from __future__ import annotations

from typing import Literal, get_args

TextMode = Literal["prompts", "repeated", "embeddings"]
Task = Literal["text", "image", "inpaint", "control", "edit"]
TASKS: tuple[Task, ...] = get_args(Task)
