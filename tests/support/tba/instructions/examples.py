"""The task of instructions, and its prompts and responses."""

from typing import Any

from benchmarks.harness.tiny_models import EOS_ID
from tba.config import TaskConfig
from tba.tasks.instructions.constraints import KINDS, Constraint
from tba.tasks.instructions.own_prompts import Mixture
from tba.tasks.instructions.task import PACKAGES, Instructions
from tba.tasks.registry import get_task
from tba.types import Prompt, Response, Version
from tests.support.laptop import needs

needs_library = needs(*PACKAGES)
MIXTURE = Mixture(seed=0, counts=(1, 2, 3), words=40, kinds=tuple(KINDS), held_out_kinds=())
SPLITS = ("train", "test")
BULLETS, COMMAS, TITLE = "detectable_format:number_bullet_lists", "punctuation:no_comma", "detectable_format:title"


def make_task(*, train: str = "", test: str = "", template: str = "", **options: Any) -> Instructions:
    task = get_task(TaskConfig(name="instructions", train=train, test=test, template=template, options=options))
    assert isinstance(task, Instructions)
    return task


def make_prompt(*constraints: Constraint, prompt_id: str = "test-0") -> Prompt:
    kinds, arguments = zip(*constraints, strict=True)
    metadata = {"instruction_id_list": list(kinds), "kwargs": [dict(given) for given in arguments]}
    return Prompt(prompt_id=prompt_id, text="Write.", tokens=(3,), metadata=metadata)


def respond(text: str, *, finished: bool = True) -> Response:
    return Response(
        tokens=(5, EOS_ID), logps=(-1.0, -1.0), text=text, finished=finished, temperature=1.0, top_p=1.0, seed=0,
        version_start=Version(0, 1), version_end=Version(0, 1), generate_seconds=0.1,
    )  # fmt: skip
