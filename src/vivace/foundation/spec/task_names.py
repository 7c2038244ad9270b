"""Tasks, and forms of prompts: names that the command line needs without pydantic."""

from __future__ import annotations

from typing import Literal, get_args

TextMode = Literal["prompts", "repeated", "embeddings"]
Task = Literal["text", "image", "inpaint", "control", "edit"]
Device = Literal["auto", "cpu", "cuda", "xpu", "mps"]
DEVICES: tuple[Device, ...] = get_args(Device)
TASKS: tuple[Task, ...] = get_args(Task)
