"""What both generators share: requests that are in flight together, and many of them answered at once."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from tba.types import Prompt, Request, Response


class InFlight(Protocol):
    max_response_tokens: int

    def submit(self, requests: Sequence[Request]) -> None: ...
    def step(self) -> Collection[tuple[Request, Response]]: ...


class Generates:
    """Gives `generate` to a generator that takes requests and answers them as they end."""

    def generate(
        self: InFlight,
        prompts: Sequence[Prompt],
        seeds: Sequence[Sequence[int]],
        *,
        temperature: float,
        top_p: float = 1.0,
        limits: Sequence[int] | None = None,
        between: Callable[[], object] = lambda: None,
    ) -> list[list[Response]]:
        """One response per seed. `between` is called after every step."""
        if len(prompts) != len(seeds):
            raise ValueError(
                f"needs the seeds of each prompt, got {len(prompts)} prompts and {len(seeds)} lists of seeds"
            )
        limits = [self.max_response_tokens] * len(prompts) if limits is None else limits
        asked = [
            [Request(prompt=prompt, seed=seed, limit=limit, temperature=temperature, top_p=top_p) for seed in row]
            for prompt, row, limit in zip(prompts, seeds, limits, strict=True)
        ]
        waited_for = {request for row in asked for request in row}
        self.submit([request for row in asked for request in row])
        answered: dict[Request, Response] = {}
        while waited_for:
            answered |= self.step()
            waited_for -= answered.keys()
            between()
        return [[answered[request] for request in row] for row in asked]


def check_request(request: Request) -> None:
    if not request.temperature >= 0:
        raise ValueError(f"temperature must be >= 0, got {request.temperature}")
    if not 0 < request.top_p <= 1:
        raise ValueError(f"top_p must be > 0 and <= 1, got {request.top_p}")
    if request.limit < 1:
        raise ValueError(f"limits must be >= 1, got {request.limit}")
    if not request.prompt.tokens:
        raise ValueError(f"prompt {request.prompt.prompt_id!r} has no tokens: there is nothing to continue")
