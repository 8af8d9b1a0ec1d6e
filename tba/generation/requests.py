"""Check requests, and generate all responses to some prompts at once."""

from collections.abc import Sequence

from tba.interfaces import InFlight
from tba.types import Prompt, Request, Response


def generate(
    in_flight: InFlight,
    prompts: Sequence[Prompt],
    seeds: Sequence[Sequence[int]],
    *,
    temperature: float,
    top_p: float = 1.0,
    limits: Sequence[int] | None = None,
) -> list[list[Response]]:
    """Return one list per prompt with one response per seed, once all responses have finished. `limits` has, for each
    prompt, the maximum number of tokens of a response. `in_flight` must have no other requests in flight."""
    if len(prompts) != len(seeds):
        raise ValueError(
            f"each prompt needs a list of seeds, got {len(prompts)} prompts and {len(seeds)} lists of seeds"
        )
    limits = [in_flight.max_response_tokens] * len(prompts) if limits is None else limits
    asked = [
        [Request(prompt=prompt, seed=seed, limit=limit, temperature=temperature, top_p=top_p) for seed in row]
        for prompt, row, limit in zip(prompts, seeds, limits, strict=True)
    ]
    in_flight.submit([request for row in asked for request in row])
    waited_for = {request for row in asked for request in row}
    answered: dict[Request, Response] = {}
    while waited_for:
        answered |= in_flight.step()
        waited_for -= answered.keys()
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
