"""Make the base policy of quickstart: a tiny Llama that learns to add from demonstrations, many of them wrong."""

from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tba.errors import RunFailed
from tba.models.supervised import Demonstration, fine_tune, probabilities
from tba.tasks.quickstart_problems import demonstrations, problems

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *"0123456789+="])}

STEPS, BATCH, LEARNING_RATE, WARMUP_STEPS = 1200, 128, 3e-3, 50
ENOUGH, TOO_MUCH = 0.39, 0.44  # teaching ends when the share of right answers, which fluctuates, is between these
EXAMINED, EXAMINE_EVERY = 512, 10  # number of training problems in an examination; steps between examinations


def make_policy(folder: Path, *, seed: int, report: Callable[[str, float], None]) -> None:
    """Write the base policy of a seed."""
    examination = [encode(problem.prompt, problem.answer) for problem in problems("train")[:EXAMINED]]
    teach(
        folder,
        (encode(prompt, response) for prompt, response in demonstrations(seed)),
        lambda model: probabilities(model, examination).mean().item(),
        seed=seed,
        report=report,
    )


def teach(
    folder: Path,
    demonstrated: Iterator[Demonstration],
    examine: Callable[[LlamaForCausalLM], float],
    *,
    seed: int,
    report: Callable[[str, float], None],
) -> None:
    """Teach a model until its share of right answers, which `examine` returns, is in the wanted range, then write the
    model and tokenizer."""
    model = make_model(seed)
    batches = (list(islice(demonstrated, BATCH)) for _ in count())
    training = fine_tune(model, batches, steps=STEPS, learning_rate=LEARNING_RATE, warmup_steps=WARMUP_STEPS)
    right = 0.0
    for step, _ in enumerate(training, start=1):
        if step % EXAMINE_EVERY:
            continue
        right = examine(model)
        report(f"making the base policy: {right:.0%} right after {step} steps", max(step / STEPS, right / ENOUGH))
        if ENOUGH <= right <= TOO_MUCH:
            break
    else:
        raise RunFailed(f"the base policy is right {right:.0%} of the time after {STEPS} steps: try another seed")
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def make_model(seed: int) -> LlamaForCausalLM:
    """Return a model with 0.4 million random weights."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # texts are short
        initializer_range=0.08,  # about 1 / sqrt(hidden size); the usual 0.02 learns several times slower
        tie_word_embeddings=False,
        pad_token_id=VOCABULARY[PAD],
        bos_token_id=None,
        eos_token_id=VOCABULARY[EOS],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=64,
        clean_up_tokenization_spaces=False,
    )


def encode(prompt: str, response: str) -> Demonstration:
    return Demonstration(
        tuple(VOCABULARY[character] for character in prompt),
        (*(VOCABULARY[character] for character in response), VOCABULARY[EOS]),
    )
