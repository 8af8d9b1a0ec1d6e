"""The requests in flight of a vLLM engine: submit them, and make responses of the engine's outputs."""

import time
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

from vllm import SamplingParams, TokensPrompt  # pyright: ignore[reportMissingImports]
from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]
from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore[reportMissingImports]
from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]

from tba.errors import RunFailed
from tba.types import Prompt, Request, Response, Version


class _Asked(NamedTuple):
    request: Request
    began: float  # value of EngineRequests._share when the request was submitted
    adapter: Version | None  # the adapter that generates the whole response


class EngineRequests:
    """Submits requests to one engine and makes responses of its outputs. Any token in `ends` ends a response. The
    engine's time is divided equally among the responses in flight."""

    def __init__(self, engine: LLMEngine, *, tokenizer: Any, ends: frozenset[int], max_response_tokens: int):
        self.engine, self.tokenizer, self.ends = engine, tokenizer, ends
        self.max_response_tokens = max_response_tokens
        self._names = count()
        self._in_flight: dict[str, _Asked] = {}
        self._share = 0.0  # seconds: sum of the equal shares of the engine's time that each response in flight gets
        self._counted = 0.0  # monotonic time up to which `_share` has been added up

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def adapters(self) -> set[Version]:
        """The versions whose adapters generate the responses in flight."""
        return {asked.adapter for asked in self._in_flight.values() if asked.adapter}

    def submit(self, requests: Sequence[Request], version: Version | None, lora: LoRARequest | None) -> None:
        """Submit requests, which the engine answers with a version of the weights. `lora` is the adapter to use if the
        version is stored as an adapter."""
        self._count_time()
        for request in requests:
            self._ask(request, self._share, version, lora)

    def step(self) -> list[tuple[Request, Response]]:
        """Wait for the engine's next step, and return the responses that have ended since the last call."""
        if not self._in_flight:
            return []
        try:
            outputs = [output for output in self.engine.step() if output.finished]
        except EngineDeadError as error:
            raise RunFailed("the vLLM engine died while it generated") from error
        self._count_time()
        return [self._answer(output.request_id, output.outputs[0]) for output in outputs]

    def ask_anew(self, version: Version) -> None:
        """Abort the requests that have no token yet, and submit them again under this version, in the same order.
        Otherwise they would reuse keys and values of the prompt that the old weights computed, yet be recorded as
        responses of the new weights alone."""
        states = self.engine.output_processor.request_states.values()
        begun = {state.external_req_id for state in states if not state.is_prefilling}
        waiting = [name for name in self._in_flight if name not in begun]
        self.engine.abort_request(waiting)
        for name in waiting:
            asked = self._in_flight.pop(name)
            self._ask(asked.request, asked.began, version, None)

    def prompt(self, prompt: Prompt, version: Version | None) -> TokensPrompt:
        """Return a prompt for vLLM that shares its keys and values only with the same prompt of the same version."""
        return TokensPrompt(prompt_token_ids=list(prompt.tokens), cache_salt=str(version))

    def sampling(self, request: Request) -> SamplingParams:
        return SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p if request.temperature else 1.0,
            seed=request.seed,
            max_tokens=min(request.limit, self.max_response_tokens),
            logprobs=0,  # return only the log-probability of the sampled token
            ignore_eos=True,  # only `stop_token_ids` end a response
            stop_token_ids=sorted(self.ends),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _ask(self, request: Request, began: float, version: Version | None, lora: LoRARequest | None) -> None:
        name = str(next(self._names))
        prompt, sampling = self.prompt(request.prompt, version), self.sampling(request)
        self.engine.add_request(name, prompt, sampling, lora_request=lora)
        self._in_flight[name] = _Asked(request, began, version if lora else None)

    def _count_time(self) -> None:
        """Add the time since the last call, divided by the number of responses in flight, to `_share`. Time between
        calls of `step` counts too, as the engine keeps generating then."""
        before, self._counted = self._counted, time.monotonic()
        if self._in_flight:
            self._share += (self._counted - before) / len(self._in_flight)

    def _answer(self, name: str, output: Any) -> tuple[Request, Response]:
        request, began, adapter = self._in_flight.pop(name)
        if output.finish_reason not in ("stop", "length"):
            raise RunFailed(f"the vLLM engine broke off a response: {output.finish_reason}")
        tokens = tuple(output.token_ids)
        first, last = (adapter, adapter) if adapter else _versions(output.weight_versions)
        response = Response(
            tokens=tokens,
            logps=tuple(known[token].logprob for token, known in zip(tokens, output.logprobs, strict=True)),
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            finished=tokens[-1] in self.ends,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            version_start=first,
            version_end=last,
            generate_seconds=self._share - began,
        )
        return request, response


def _versions(spans: Any) -> tuple[Version, Version]:
    """Return the versions that generated the first token and the last token."""
    return Version.parse(spans[0].version), Version.parse(spans[-1].version)
