"""Measure a trainer's step without its update: tokens per second and memory, compared with a naive step and the bare
model.

    python -m benchmarks.training [--repeats 5] [--out FOLDER] [--trl FOLDER] [--only WORKLOAD]

The workload for GPUs runs only with --only.

Tokens are random, and so are weights, except those of SmolLM2, which needs the packages of requirements-laptop.txt. The
objective is trajectory balance, and a batch is read in the micro-batches of its preset. All forms differentiate the
same batch in turn, in one process, several times. The result is the median of the ratios of CPU times, which other work
on the machine hardly affects; on a GPU, of wall-clock times. The forms:

naive          rows padded to the longest row of their micro-batch, logits and log-softmax of all positions, as in the
               code that was published with the paper
padded         a trainer's step for a model that cannot be packed
ours           a trainer's step
two passes     the same if `training.tokens_per_micro_batch` is a quarter of the tokens that it reads of the group
bare           the model's forward and backward pass on what `ours` reads and predicts, without log-probabilities and
               a loss
bare, padded   the same on padded rows
TRL            loss and backward pass of TRL's GRPO on the same rows with given advantages; needs --trl, the folder into
               which `make science` installs TRL

Memory is the peak of all tensors together. The memory of a form's loss is what the form needs beyond its bare form
without the output layer. Tokens are those of prompts and responses, without padding, and each prompt counts once per
response, so all forms have the same number.
"""

import argparse
import copy
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from torch.autograd import DeviceType
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import ProfilerActivity, profile

from benchmarks import generation
from benchmarks.generation import write_model
from benchmarks.gpu_check.stage import LARGE, random_policy
from benchmarks.harness.hardware import hardware, results_file
from benchmarks.science.lagged import start_of
from tba.batches.batching import Batch, prompt_lengths
from tba.batches.packing import Row, attending, groups_of
from tba.batches.padded_calls import tokens_per_call
from tba.fetched import Fetched, Lists
from tba.models.policy import Policy
from tba.models.pretrained import computing
from tba.objectives import TrajectoryBalance, trajectory_balance
from tba.presets import preset
from tba.train.learner import Learner
from tba.train.micro_batches import micro_batches

PROMPT_TOKENS = (28, 55, 61, 65, 70, 75, 81, 87, 96, 111, 248)
RESPONSE_TOKENS = (32, 68, 81, 93, 104, 117, 132, 149, 170, 205, 465)
"""Deciles of the lengths in GSM8K's training set, with a SentencePiece tokenizer of 32,000 tokens: questions in the
task's template, and answers with their calculations and an end token. Each length is drawn independently from these
deciles."""
BETA = 0.01
KINDS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("scaled_dot_product", "flash_attention", "efficient_attention"),
    "softmax": ("softmax",),
    "places": ("index", "gather", "scatter", "embedding"),
}
"""Kinds of operations, by parts of their names: matrix products, attention, softmax of logits, and indexing of rows."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    preset: str = "gsm8k"
    hidden: int = 256  # 0: the model that the preset starts from
    layers: int = 4
    vocabulary: int
    groups: int = 1
    groups_per_micro_batch: int | None = None  # None: as in the preset
    on_gpu: bool = False  # too large for a CPU
    prompt_tokens: tuple[int, ...] = PROMPT_TOKENS
    response_tokens: tuple[int, ...] = RESPONSE_TOKENS


WORKLOADS = [
    Workload(name="GSM8K, 32k tokens in the vocabulary", vocabulary=32_000),
    Workload(name="GSM8K, 2k tokens in the vocabulary", vocabulary=2_048),
    Workload(
        name="quickstart", preset="quickstart", hidden=128, layers=2, vocabulary=16, groups=32, prompt_tokens=(8, 8),
        response_tokens=(6, 6),
    ),
    Workload(
        name="SmolLM2 in reasoning-gym", preset="reasoning-gym", hidden=0, layers=30, vocabulary=49_152, groups=32,
        prompt_tokens=(27, 27), response_tokens=(9, 12),
    ),
    Workload(
        name="GSM8K, shape of Qwen2.5-1.5B", hidden=1536, layers=28, vocabulary=151_936, groups=2,
        groups_per_micro_batch=1, on_gpu=True,
    ),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--trl", type=os.path.abspath, help="folder with TRL")
    parser.add_argument("--only", choices=[it.name for it in WORKLOADS], help="one workload")
    options = parser.parse_args()
    if any(it.on_gpu and it.name == options.only for it in WORKLOADS) and not torch.cuda.is_available():
        parser.error(f"--only: the workload {options.only!r} needs a GPU")
    if options.trl and options.trl not in sys.path:  # transformers looks for packages only at its import
        paths = [*filter(None, [os.environ.get("PYTHONPATH")]), options.trl]
        again = [sys.executable, "-m", "benchmarks.training", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options.out.mkdir(parents=True, exist_ok=True)
    path, results = results_file(options.out, "training"), []
    chosen = [it for it in WORKLOADS if options.only == it.name or not (options.only or it.on_gpu)]
    for workload in chosen:  # results are written after each
        results.append(measure(workload, options.repeats, with_trl=bool(options.trl)))
        record = {"measured": f"{datetime.now(UTC):%Y-%m-%d}", **hardware(), "results": results}
        path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path}")


def measure(workload: Workload, repeats: int, *, with_trl: bool) -> dict[str, Any]:
    learner = make_learner(workload)
    batch = learner.collate(make_rows(workload, learner.config.training.responses_per_prompt))
    forms: dict[str, Callable[[], object]] = {
        "naive": lambda: naive(learner, batch),
        "padded": lambda: step(learner, batch, packs=False),
        "ours": lambda: step(learner, batch, packs=True),
        **({"two passes": two_passes_of(learner, batch)} if workload.groups == 1 else {}),
        "bare": lambda: bare(learner, batch, packs=True),
        "bare, padded": lambda: bare(learner, batch, packs=False),
    }
    if with_trl:
        forms["TRL"] = trl_step(learner, batch)
    memory = {name: peak_bytes(learner, form) for name, form in forms.items()}  # this also warms up
    body = {
        packs: peak_bytes(learner, lambda packs=packs: bare(learner, batch, packs=packs, output_layer=False))
        for packs in (True, False)
    }
    seconds, tokens = in_turn(learner, forms, repeats), sum(batch.lengths)
    result = {
        **asdict(workload),
        "parameters": sum(it.numel() for it in learner.policy.model.parameters()),
        "tokens": tokens,
        "tokens_that_count": int(batch.response_mask_BT.sum()),
        "tokens_per_second": {name: round(tokens / statistics.median(them)) for name, them in seconds.items()},
        "ours_to": {
            name: spread([other / ours for ours, other in zip(seconds["ours"], them, strict=True)])
            for name, them in seconds.items()
            if name != "ours"
        },
        "seconds_by_kind": {name: by_kind(learner, forms[name]) for name in ("naive", "ours")},
        "peak_MB": {name: round(peak / 1e6, 1) for name, peak in memory.items()},
        "loss_MB": {
            name: round((memory[name] - body[name == "ours"]) / 1e6, 1) for name in ("naive", "padded", "ours")
        },
    }
    shown = ("name", "tokens_per_second", "ours_to", "loss_MB", "peak_MB")
    print(json.dumps({name: result[name] for name in shown}), flush=True)
    return result


def naive(learner: Learner, batch: Batch) -> None:
    for part in parts_of(learner, batch):
        with computing_of(learner):
            logits_BTV = learner.policy.model(input_ids=part.tokens_BT, use_cache=False).logits[:, :-1].float()
        logps_BTV = torch.log_softmax(logits_BTV / learner.config.search.temperature, dim=-1)
        logp_BT = logps_BTV.gather(-1, part.tokens_BT[:, 1:, None]).squeeze(-1) * part.response_mask_BT[:, 1:]
        logp_PK, ref_logp_PK, reward_PK = (
            it.unflatten(0, (-1, part.responses_per_prompt))
            for it in (logp_BT.sum(dim=1), cast(torch.Tensor, part.ref_logp_B), part.reward_B)
        )
        loss = trajectory_balance(logp_PK, ref_logp_PK, reward_PK, beta=BETA).value
        (loss * part.groups / batch.groups).backward()


def step(learner: Learner, batch: Batch, *, packs: bool) -> None:
    learner.packs = packs
    learner.differentiate(batch, BETA)
    assert learner.packs == packs


def two_passes_of(learner: Learner, batch: Batch) -> Callable[[], None]:
    """Return a step on a group with four times as many tokens as a micro-batch may have."""
    most = sum(group.read for group in groups_of(batch)[0]) // 4
    changes = {"training.groups_per_micro_batch": None, "training.tokens_per_micro_batch": most}
    other = copy.copy(learner)
    other.config = learner.config.replace(changes)
    return lambda: step(other, batch, packs=True)


def bare(learner: Learner, batch: Batch, *, packs: bool, output_layer: bool = True) -> None:
    model: Any = learner.policy.model
    for part in parts_of(learner, batch, packs=packs):
        with computing_of(learner):
            if packs:
                row = Row.of(groups_of(part)[0], tokens_per_call(model.device), model.device)
                with attending(model, row):
                    read = model.base_model(input_ids=row.tokens_1N, position_ids=row.positions_1N, use_cache=False)
                out = read.last_hidden_state[0, row.predicts_M]
            else:
                read = model.base_model(input_ids=part.tokens_BT[:, :-1], use_cache=False)
                out = read.last_hidden_state[part.response_mask_BT[:, 1:]]
            if output_layer:
                out = model.get_output_embeddings()(out)
        out.backward(out.detach())


def trl_step(learner: Learner, batch: Batch) -> Callable[[], object]:
    """Return TRL's step on a copy of the model, because TRL changes it. Generation and rewards are not part of it."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    policy, k = learner.policy, batch.responses_per_prompt
    counted = batch.response_mask_BT.sum()
    parts = [trl_inputs(part, policy.pad_id, counted=counted) for part in parts_of(learner, batch)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=copy.deepcopy(policy.model),
            reward_funcs=lambda prompts, **kwargs: [0.0 for _ in prompts],
            args=GRPOConfig(
                output_dir=folder, per_device_train_batch_size=len(parts[0]["advantages"]), num_generations=k,
                gradient_accumulation_steps=len(parts), bf16=False, report_to="none",
                gradient_checkpointing=False, use_cpu=policy.device.type == "cpu",
                temperature=learner.config.search.temperature, save_strategy="no",
            ),
            train_dataset=Dataset.from_list([{"prompt": "0"}]),
            processing_class=policy.tokenizer,
        )  # fmt: skip
    trainer.current_gradient_accumulation_steps = len(parts)
    trainer.model.train()

    def step() -> None:
        trainer.model.zero_grad(set_to_none=True)
        for inputs in parts:
            with computing_of(learner):
                loss = trainer._compute_loss(trainer.model, inputs)
            loss.backward()

    return step


def trl_inputs(part: Batch, pad_id: int, *, counted: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a micro-batch padded as by TRL: prompts on the left, responses on the right."""
    lengths_B = prompt_lengths(part).repeat_interleave(part.responses_per_prompt).tolist()
    rows = list(zip(part.tokens_BT, lengths_B, part.lengths, strict=True))
    prompts = [tokens[:begins] for tokens, begins, _ in rows]
    responses = [tokens[begins:ends] for tokens, begins, ends in rows]
    reward_PK = part.reward_B.unflatten(0, (-1, part.responses_per_prompt))
    advantage_PK = (reward_PK - reward_PK.mean(dim=1, keepdim=True)) / (reward_PK.std(dim=1, keepdim=True) + 1e-4)
    padded = {"batch_first": True, "padding_value": pad_id}
    return {
        "prompt_ids": pad_sequence(prompts, **padded, padding_side="left"),
        "prompt_mask": pad_sequence([torch.ones_like(it) for it in prompts], batch_first=True, padding_side="left"),
        "completion_ids": pad_sequence(responses, **padded),
        "completion_mask": pad_sequence([torch.ones_like(it) for it in responses], batch_first=True),
        "advantages": advantage_PK.flatten(),
        "num_items_in_batch": counted,
    }


def parts_of(learner: Learner, batch: Batch, *, packs: bool = False) -> Iterator[Batch]:
    groups, tokens = learner.config.training.most_groups, learner.config.training.tokens_per_micro_batch
    return (part.batch for part in micro_batches(batch, most_groups=groups, most_tokens=tokens, packs=packs))


def computing_of(learner: Learner) -> torch.autocast:
    return computing(learner.policy.model, learner.config.training.compute_dtype)


def in_turn(learner: Learner, forms: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Run all forms in turn, and return the seconds of each form."""
    clock = time.process_time if learner.policy.device.type == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(repeats):
        for name, form in forms.items():
            learner.policy.model.zero_grad(set_to_none=True)
            finish(learner)
            began = clock()
            form()
            finish(learner)
            seconds[name].append(clock() - began)
    return seconds


def finish(learner: Learner) -> None:
    if learner.policy.device.type == "cuda":
        torch.cuda.synchronize()


def peak_bytes(learner: Learner, form: Callable[[], object]) -> int:
    """Return the peak memory of all tensors together while a form runs, minus their memory before."""
    learner.policy.model.zero_grad(set_to_none=True)
    if learner.policy.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        form()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        form()
    assert profiled.profiler and profiled.profiler.kineto_results
    events: list[Any] = [it for it in profiled.profiler.kineto_results.events() if it.name() == "[memory]"]
    held = np.cumsum([it.nbytes() for it in sorted(events, key=lambda it: it.start_ns())])
    return int(held.max())


def by_kind(learner: Learner, form: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of each kind of operation, of a CPU or of the GPU. The rest is copies, norms, activations and,
    on a CPU, Python."""
    on_gpu = learner.policy.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiled:
        form()
        finish(learner)
    found = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for event in profiled.key_averages():
        if event.device_type == DeviceType.CPU:  # the time of a kernel also counts as that of its operation
            kind = next((kind for kind, names in KINDS.items() if any(it in event.key for it in names)), "the rest")
            found[kind] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
    return {kind: round(seconds, 3) for kind, seconds in found.items()}


def spread(ratios: list[float]) -> dict[str, float]:
    return {name: round(of(ratios), 2) for name, of in {"median": statistics.median, "least": min, "most": max}.items()}


def make_learner(workload: Workload) -> Learner:
    changes = {"training.prompts_per_step": workload.groups}
    if workload.groups_per_micro_batch:
        changes["training.groups_per_micro_batch"] = workload.groups_per_micro_batch
    config = replace(preset(workload.preset).replace(changes), objective=TrajectoryBalance())
    if workload.on_gpu:
        return Learner(config, random_policy(LARGE))
    if not workload.hidden:
        return Learner(config, Policy.load(start_of(config)))
    with tempfile.TemporaryDirectory() as folder:
        write_model(
            generation.Workload(
                name="", hidden=workload.hidden, layers=workload.layers, vocabulary=workload.vocabulary, prompts=0,
                prompt_tokens=(0, 0), samples=0, response_tokens=0, ends=0, batch=0,
            ),
            Path(folder),
        )  # fmt: skip
        return Learner(config, Policy.load(folder))


def make_rows(workload: Workload, k: int) -> Fetched:
    """Return groups of K responses with random tokens, and random rewards of 0 or 1."""
    lengths, chosen, count = random.Random(0), random.Random(1), workload.groups * k

    def tokens(deciles: tuple[int, ...]) -> list[int]:
        length = round(np.interp(lengths.random() * (len(deciles) - 1), range(len(deciles)), deciles))
        return [chosen.randrange(2, workload.vocabulary) for _ in range(length)]

    prompts = [tokens(workload.prompt_tokens) for _ in range(workload.groups)]
    responses = [tokens(workload.response_tokens) for _ in range(count)]
    return Fetched(
        trajectory_ids=[str(i) for i in range(count)],
        prompt_ids=[str(i // k) for i in range(count)],
        prompt_tokens=Lists.of([prompts[i // k] for i in range(count)], np.int64),
        response_tokens=Lists.of(responses, np.int64),
        ref_logps=Lists.of([[-np.log(workload.vocabulary)] * len(response) for response in responses], np.float64),
        reward_B=np.array([float(chosen.random() < 0.5) for _ in range(count)]),
        finished_B=np.zeros(count, bool),
    )


if __name__ == "__main__":
    main()
