"""Responses from vLLM, whose engine lives in processes of its own beside the role that asks it.

Each response is a request with its own seed, so that what a seed yields follows from weights, prompt, seed and
temperature alone, up to rounding. Requests for the same prompt share its keys and values, but never with those of
another version's weights.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from transformers import AutoTokenizer
from vllm import EngineArgs  # pyright: ignore[reportMissingImports]
from vllm.config import WeightTransferConfig  # pyright: ignore[reportMissingImports]
from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore[reportMissingImports]
from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]

from tba.config import EngineConfig
from tba.errors import Busy, ConfigError, Damaged, Missing, RunFailed, TBAError
from tba.generation.requests import check_request
from tba.generation.version_folder import describe, is_gone, shapes_of
from tba.generation.vllm_adapters import EngineAdapters, adapter_arguments
from tba.generation.vllm_engine import CPU_CACHE, check_served, end_engine, generation_config, start_engine
from tba.generation.vllm_plugin import FROM_FOLDER
from tba.generation.vllm_requests import EngineRequests
from tba.models.adapters import Adapter
from tba.models.pretrained import end_tokens
from tba.types import Request, Response, Version

LogpsMode = Literal["at-one", "uncut", "any"]


class VLLMGenerator:
    """Generates at most `batch_responses` responses side by side, each of at most `max_response_tokens` tokens after at
    most `max_prompt_tokens`.

    An engine's log-probabilities are either those at temperature 1, or those of what was sampled from: at its
    temperature, and after `top_p` has cut it. `logps` says which of them serve: "at-one" where all is sampled at
    temperature 1, "uncut" where nothing is cut, "any" where nobody reads them but of greedy responses.

    `starting` is the context in which an engine starts; it tells how many roles share a GPU with it.
    """

    def __init__(
        self,
        *,
        on_cpu: bool,
        dtype: str = "float32",
        batch_responses: int = 512,
        max_prompt_tokens: int = 512,
        max_response_tokens: int = 512,
        logps: LogpsMode = "uncut",
        engine: EngineConfig | None = None,
        trust_remote_code: bool = False,
        starting: Callable[[], AbstractContextManager[int]] = lambda: nullcontext(1),
        adapter: Adapter | None = None,
    ):
        self.adapter = adapter  # where versions are adapters
        self.on_cpu, self.dtype, self.trust_remote_code = on_cpu, dtype, trust_remote_code
        self.batch_responses, self.max_response_tokens = batch_responses, max_response_tokens
        self.max_tokens = max_prompt_tokens + max_response_tokens
        self.logps: LogpsMode = logps
        self.config, self.starting = engine or EngineConfig(), starting
        self.version: Version | None = None
        self._requests: EngineRequests | None = None  # to the engine, once it runs
        self._adapters: EngineAdapters | None = None  # that it holds, where versions are adapters
        self._description, self._shapes = b"", {}

    def adopt(self, folder: Path, version: Version) -> None:
        """Load the weights of a version from a Hugging Face folder; where nothing else differs from the version before,
        into the engine that runs; else Busy if anything is in flight. Missing if the folder is removed meanwhile,
        Damaged if it cannot be read; the weights before it then stay, unless an engine had to be started. RunFailed
        where an engine may have got a part of them, or has died. Adapters are added to an engine that has their base;
        each response is made by one of them from its beginning to its end."""
        if self.adapter:
            self._adopt_adapter(self.adapter, folder, version)
            return
        with _naming_faults(folder, version):
            description, shapes = describe(folder), shapes_of(folder)
            runs_on = self._requests is not None and (description, shapes) == (self._description, self._shapes)
            if runs_on:
                self._open(folder)
            elif self._requests:  # some are in flight
                raise Busy(f"version {version} is another model than that of the responses in flight")
            else:
                self._start(folder)
        try:
            if runs_on:
                self._load_opened(version)
            else:
                self._running().set_weight_version(str(version))
            self._description, self._shapes, self.version = description, shapes, version
            self._started().ask_anew(version)
        except Exception as error:  # its weights may be of two versions
            raise RunFailed(f"the engine of vLLM failed while it took version {version}: {error}") from error

    def _adopt_adapter(self, adapter: Adapter, folder: Path, version: Version) -> None:
        with _naming_faults(folder, version):
            adapter.read(folder)
            if self._requests is None:
                self._start(adapter.base)
                self._adapters = EngineAdapters(self._running())
            assert self._adapters is not None, "an engine of adapters runs"
            self._adapters.add(version, folder, used=self._started().adapters)
        self.version = version

    def _start(self, folder: Path) -> None:
        check_served(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=self.trust_remote_code)
        ends = end_tokens(generation_config(folder, self.trust_remote_code), tokenizer)
        self.close()
        with self.starting() as roles:
            engine = start_engine(self._arguments(folder, roles), on_cpu=self.on_cpu)
        self._requests = EngineRequests(
            engine, tokenizer=tokenizer, ends=ends, max_response_tokens=self.max_response_tokens
        )

    def _arguments(self, folder: Path, roles: int = 1) -> EngineArgs:
        on_cpu, cache = self.on_cpu, self.config.cache_gigabytes or (CPU_CACHE if self.on_cpu else None)
        return EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=self.dtype,  # pyright: ignore[reportArgumentType]
            trust_remote_code=self.trust_remote_code,
            max_model_len=self.max_tokens,
            max_num_seqs=self.batch_responses,
            max_num_batched_tokens=max(8192, self.batch_responses, self.max_tokens if on_cpu else 0),
            enable_chunked_prefill=not on_cpu,  # on a CPU vLLM cannot take back a seeded draw, as that has to
            enable_prefix_caching=True,
            enforce_eager=on_cpu or not self.config.compile,
            gpu_memory_utilization=self.config.fraction(roles),
            kv_cache_memory_bytes=int(cache * 2**30) if cache else None,
            tensor_parallel_size=self.config.tensor_parallel,
            logprobs_mode="raw_logprobs" if self.logps == "at-one" else "processed_logprobs",
            weight_transfer_config=None if self.adapter else WeightTransferConfig(backend=FROM_FOLDER),
            generation_config="vllm",  # every setting of sampling is given with each request
            disable_log_stats=True,
            **(adapter_arguments(self.adapter) if self.adapter else {}),
        )

    def _open(self, folder: Path) -> None:
        """In every worker, none of which changes its weights."""
        self._running().collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"path": str(folder)}})

    def _load_opened(self, version: Version) -> None:
        """Whatever is being generated waits, and goes on with the new weights and under their name."""
        engine = self._running()
        engine.sleep(level=0, mode="keep")
        engine.collective_rpc("start_weight_update")
        engine.collective_rpc("update_weights", kwargs={"update_info": {}})
        engine.collective_rpc("finish_weight_update")
        engine.set_weight_version(str(version))
        engine.wake_up(tags=["scheduling"])

    @property
    def tokenizer(self) -> Any:
        return self._started().tokenizer

    def submit(self, requests: Sequence[Request]) -> None:
        started = self._started()
        for request in requests:
            check_request(request)
            _check_logps(request.temperature, request.top_p, self.logps)
        lora = self._adapters.held.get(self.version) if self._adapters and self.version else None
        started.submit(requests, self.version, lora)

    def step(self) -> list[tuple[Request, Response]]:
        """Return what has ended since, once the engine has anything to tell. `logps` are those of the model at the
        temperature, before `top_p` cuts it; of greedy responses the model's own, at temperature 1."""
        return self._requests.step() if self._requests is not None else []

    def _started(self) -> EngineRequests:
        if self._requests is None:
            raise ConfigError("a generator has no weights before it has adopted a version")
        return self._requests

    def _running(self) -> LLMEngine:
        return self._started().engine

    def close(self) -> None:
        """End the engine at once; it has nothing to lose."""
        if self._requests is not None:
            engine = self._requests.engine
            self._requests, self._adapters, self.version = None, None, None
            end_engine(engine)


@contextmanager
def _naming_faults(folder: Path, version: Version) -> Iterator[None]:
    """Say what became of a version that an engine does not take: Missing, Damaged or RunFailed."""
    try:
        yield
    except EngineDeadError as error:
        raise RunFailed(f"the engine of vLLM died while it took version {version}") from error
    except Exception as error:  # what a worker raises reaches us as no more than that
        if is_gone(folder):
            raise Missing(f"version {version} was removed from {folder} while it was read") from error
        if isinstance(error, TBAError):
            raise
        raise Damaged(f"version {version} in {folder} cannot be read: {error}") from error


def _check_logps(temperature: float, top_p: float, mode: LogpsMode) -> None:
    """Refuse to tell other log-probabilities than those at this temperature before `top_p` cuts, where they count."""
    tells = {"at-one": temperature in (0, 1), "uncut": temperature == 0 or top_p == 1, "any": True}
    if not tells[mode]:
        raise ValueError(f"this engine tells log-probabilities {mode}, got temperature {temperature}, top_p {top_p}")
