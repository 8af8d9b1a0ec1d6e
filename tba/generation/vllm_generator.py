"""Responses from vLLM, whose engine lives in processes of its own beside the role that asks it.

Each response is a request with its own seed, so that what a seed yields follows from weights, prompt, seed and
temperature alone, up to rounding. Requests for the same prompt share its keys and values, but never with those of
another version's weights.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import count
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import Any, Literal, get_args

from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from vllm import EngineArgs, SamplingParams, TokensPrompt  # pyright: ignore[reportMissingImports]
from vllm.config import WeightTransferConfig  # pyright: ignore[reportMissingImports]
from vllm.config.lora import MaxLoRARanks  # pyright: ignore[reportMissingImports]
from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]
from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore[reportMissingImports]
from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]

from tba.config import EngineConfig
from tba.errors import Busy, ConfigError, Damaged, Missing, RunFailed, TBAError
from tba.generation.requests import check_request
from tba.generation.version_folder import describe, is_gone
from tba.generation.vllm_plugin import FROM_FOLDER, OURS
from tba.models.adapters import Adapter
from tba.models.file_checks import check_files, read_object
from tba.models.pretrained import end_tokens
from tba.types import Prompt, Request, Response, Version

LogpsMode = Literal["at-one", "uncut", "any"]
ADAPTERS = 2  # that an engine holds: what responses in flight began with, and the next
CPU_CACHE = 1.0  # gigabytes of keys and values on a CPU, whose memory others use too


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
        self._adapters: dict[Version, LoRARequest] = {}  # that the engine has
        self._made_by: dict[str, Version] = {}  # what is in flight, by the adapter that it began with
        self.on_cpu, self.dtype, self.trust_remote_code = on_cpu, dtype, trust_remote_code
        self.batch_responses, self.max_response_tokens = batch_responses, max_response_tokens
        self.max_tokens = max_prompt_tokens + max_response_tokens
        self.logps: LogpsMode = logps
        self.config, self.starting = engine or EngineConfig(), starting
        self.version: Version | None = None
        self._engine: LLMEngine | None = None
        self._description, self._shapes = b"", {}
        self._tokenizer: Any = None
        self._ends: frozenset[int] = frozenset()
        self._names, self._numbers = count(), count(1)
        self._share = 0.0  # seconds that a response has had which was in flight all along: each has an equal part
        self._counted = 0.0  # until when that is told
        self._in_flight: dict[str, tuple[Request, float]] = {}  # with the share when it was asked

    def adopt(self, folder: Path, version: Version) -> None:
        """Load the weights of a version from a Hugging Face folder; where nothing else differs from the version before,
        into the engine that runs; else Busy if anything is in flight. Missing if the folder is removed meanwhile,
        Damaged if it cannot be read; the weights before it then stay, unless an engine had to be started. RunFailed
        where an engine may have got a part of them, or has died. Adapters are added to an engine that has their base;
        each response is made by one of them from its beginning to its end."""
        if self.adapter:
            self._adopt_adapter(self.adapter, folder, version)
            return
        try:
            description, shapes = describe(folder), _shapes(folder)
            runs_on = self._engine is not None and (description, shapes) == (self._description, self._shapes)
            if runs_on:
                self._open(folder)
            elif self._in_flight:
                raise Busy(f"version {version} is another model than that of the responses in flight")
            else:
                self._start(folder)
        except EngineDeadError as error:
            raise RunFailed(f"the engine of vLLM died while it took version {version}") from error
        except Exception as error:  # what a worker raises reaches us as no more than that
            if is_gone(folder):
                raise Missing(f"version {version} was removed from {folder} while it was read") from error
            if isinstance(error, TBAError):
                raise
            raise Damaged(f"version {version} in {folder} cannot be read: {error}") from error
        try:
            if runs_on:
                self._load_opened(version)
            else:
                self._running().set_weight_version(str(version))
            self._description, self._shapes, self.version = description, shapes, version
            self._ask_anew()
        except Exception as error:  # its weights may be of two versions
            raise RunFailed(f"the engine of vLLM failed while it took version {version}: {error}") from error

    def _adopt_adapter(self, adapter: Adapter, folder: Path, version: Version) -> None:
        try:
            adapter.read(folder)
            if self._engine is None:
                self._start(adapter.base)
            used = set(self._made_by.values())
            for old in [it for it in self._adapters if it not in used and it != version]:
                self._running().remove_lora(self._adapters.pop(old).lora_int_id)
            if version not in self._adapters:
                if len(self._adapters) == ADAPTERS:
                    raise Busy(f"version {version} waits for responses by the {ADAPTERS} adapters before it")
                request = LoRARequest(str(version), next(self._numbers), str(folder))
                self._running().add_lora(request)
                self._adapters[version] = request
        except EngineDeadError as error:
            raise RunFailed(f"the engine of vLLM died while it took version {version}") from error
        except Exception as error:  # what a worker raises reaches us as no more than that
            if is_gone(folder):
                raise Missing(f"version {version} was removed from {folder} while it was read") from error
            if isinstance(error, TBAError):
                raise
            raise Damaged(f"version {version} in {folder} cannot be read: {error}") from error
        self.version = version

    def _start(self, folder: Path) -> None:
        _check_served(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=self.trust_remote_code)
        ends = end_tokens(_generation_config(folder, self.trust_remote_code), tokenizer)
        self.close()
        with self.starting() as roles:
            self._engine = start_engine(self._arguments(folder, roles), on_cpu=self.on_cpu)
        self._tokenizer, self._ends = tokenizer, ends

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
            **(_for_adapters(self.adapter) if self.adapter else {}),
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
        self._running()
        return self._tokenizer

    def submit(self, requests: Sequence[Request]) -> None:
        self._running()
        for request in requests:
            check_request(request)
            _check_logps(request.temperature, request.top_p, self.logps)
        self._count_time()
        for request in requests:
            self._ask(request, self._share)

    def step(self) -> list[tuple[Request, Response]]:
        """What has ended since, once the engine has anything to tell. `logps` are those of the model at the
        temperature, before `top_p` cuts it; of greedy responses the model's own, at temperature 1."""
        if not self._in_flight:
            return []
        try:
            outputs = [output for output in self._running().step() if output.finished]
        except EngineDeadError as error:
            raise RunFailed("the engine of vLLM died while it generated") from error
        self._count_time()
        return [self._answer(output.request_id, output.outputs[0]) for output in outputs]

    def _ask(self, request: Request, began: float) -> None:
        name = str(next(self._names))
        asked, sampling = self._asked(request.prompt), self._sampling(request)
        version = self.version
        lora = self._adapters.get(version) if version else None
        self._running().add_request(name, asked, sampling, lora_request=lora)
        self._in_flight[name] = request, began
        if version and lora:
            self._made_by[name] = version

    def _ask_anew(self) -> None:
        """What has no token yet, in its order: under the name of the weights before it would share the keys and values
        that those computed of its prompt, and pass for the new ones' alone."""
        states = self._running().output_processor.request_states.values()
        begun = {state.external_req_id for state in states if not state.is_prefilling}
        waiting = [name for name in self._in_flight if name not in begun]
        self._running().abort_request(waiting)
        for name in waiting:
            self._ask(*self._in_flight.pop(name))

    def _count_time(self) -> None:
        """The engine goes on also while nobody asks what has ended."""
        before, self._counted = self._counted, time.monotonic()
        if self._in_flight:
            self._share += (self._counted - before) / len(self._in_flight)

    def _asked(self, prompt: Prompt) -> Any:
        return TokensPrompt(prompt_token_ids=list(prompt.tokens), cache_salt=str(self.version))

    def _sampling(self, request: Request) -> SamplingParams:
        return SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p if request.temperature else 1.0,
            seed=request.seed,
            max_tokens=min(request.limit, self.max_response_tokens),
            logprobs=0,  # of the sampled token alone
            ignore_eos=True,  # all that end a response are these
            stop_token_ids=sorted(self._ends),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _answer(self, name: str, output: Any) -> tuple[Request, Response]:
        request, began = self._in_flight.pop(name)
        if output.finish_reason not in ("stop", "length"):
            raise RunFailed(f"the engine of vLLM broke a response off: {output.finish_reason}")
        tokens, by = tuple(output.token_ids), self._made_by.pop(name, None)
        first, last = (by, by) if by else _versions(output.weight_versions)
        response = Response(
            tokens=tokens,
            logps=tuple(known[token].logprob for token, known in zip(tokens, output.logprobs, strict=True)),
            text=self._tokenizer.decode(tokens, skip_special_tokens=True),
            finished=tokens[-1] in self._ends,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            version_start=first,
            version_end=last,
            generate_seconds=self._share - began,
        )
        return request, response

    def _running(self) -> LLMEngine:
        if self._engine is None:
            raise ConfigError("a generator has no weights before it has adopted a version")
        return self._engine

    def close(self) -> None:
        """End the engine at once; it has nothing to lose."""
        if self._engine is not None:
            self._engine, self.version, core = None, None, self._engine.engine_core
            for held in (self._in_flight, self._adapters, self._made_by):
                held.clear()
            for process in core.resources.engine_manager.processes:
                process.kill()
                process.join(10)  # vLLM's own shutdown trips over one that ends while it looks
            with suppress(EngineDeadError):
                core.shutdown(timeout=0)


def start_engine(arguments: EngineArgs, *, on_cpu: bool) -> LLMEngine:
    """In a process of its own, which leaves signals to stop to the role that may still need it. ConfigError if vLLM
    cannot serve this model so, RunFailed if it does not start."""
    resource_tracker.ensure_running()  # which unblocks signals as it starts, with the first process otherwise
    os.environ |= {OURS: "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    os.environ |= {"VLLM_NO_USAGE_STATS": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if on_cpu:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else every engine binds itself to the same cores
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        engine = LLMEngine.from_vllm_config(arguments.create_engine_config(), disable_log_stats=True)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"engine.name: vLLM cannot serve this model so: {error}; transformers may") from error
    except (RuntimeError, TimeoutError) as error:
        raise RunFailed(f"vLLM did not start: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    Thread(target=_tell_of_death, args=(engine.engine_core,), name="engine-death", daemon=True).start()
    return engine


def _tell_of_death(core: Any) -> None:
    """Whoever waits for an engine that has died hears of it: vLLM's own client waits on."""
    wait([process.sentinel for process in core.resources.engine_manager.processes])
    core.resources.engine_dead = True  # whoever asks from now on
    core.outputs_queue.put(EngineDeadError())
    for answer in list(core.utility_results.values()):
        with suppress(InvalidStateError):  # it came just before
            answer.set_exception(EngineDeadError())


def _versions(spans: Any) -> tuple[Version, Version]:
    """Of the weights that made the first token, and the last."""
    return Version.parse(spans[0].version), Version.parse(spans[-1].version)


def _for_adapters(adapter: Adapter) -> dict[str, Any]:
    most = next(rank for rank in get_args(MaxLoRARanks) if rank >= adapter.rank)
    return {"enable_lora": True, "max_lora_rank": most, "max_loras": ADAPTERS, "max_cpu_loras": ADAPTERS}


def _check_logps(temperature: float, top_p: float, mode: LogpsMode) -> None:
    """Refuse to tell other log-probabilities than those at this temperature before `top_p` cuts, where they count."""
    tells = {"at-one": temperature in (0, 1), "uncut": temperature == 0 or top_p == 1, "any": True}
    if not tells[mode]:
        raise ValueError(f"this engine tells log-probabilities {mode}, got temperature {temperature}, top_p {top_p}")


def _check_served(folder: Path) -> None:
    """Refuse what vLLM would serve as another model, without a word."""
    check_files(folder)
    config, fault = read_object(folder / "config.json"), ""
    if str(config.get("model_type")).startswith("qwen3") and config.get("attention_bias"):
        fault = "it leaves out a bias of Qwen3's attention (attention_bias)"
    if config.get("model_type") == "gpt_oss":
        fault = "new weights do not get into the experts of gpt-oss once an engine runs"
    if fault:
        raise ConfigError(f"engine.name: vLLM cannot serve this model so: {fault}; transformers may")


def _generation_config(folder: Path, trust_remote_code: bool) -> GenerationConfig:
    if (folder / "generation_config.json").exists():
        return GenerationConfig.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return GenerationConfig.from_model_config(config)


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of the weights, by name."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.offset_keys()}
    if not found:
        raise FileNotFoundError(f"no weights in {folder}")
    return found
