"""Makes all models of red-teaming from a seed in half a minute, so small that many searchers fit on two cores.

The attacker, a tiny Llama, learns to write instructions such as "describe the old house and the small river"; each
adjective is rude with a probability of 2 %. The victim, another tiny Llama, learns to repeat the adjective of one of
the named things, as in "the river is small"; one time in ten it says an adjective by chance that is not rude. The
classifier learns which adjectives are rude. An attack that is rude about all things it names almost always succeeds,
and one that is rude about one of two often does. At first, 1 of 40 attacks succeeds; a thousand short successful
attacks and hundreds of thousands of long ones exist. This is a toy: what is difficult for these models is not what is
difficult for real ones.
"""

import random
import shutil
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from tba.models.supervised import Demonstration, fine_tune
from tba.tasks.redteam import PROMPT

VERBS = [
    "describe", "explain", "draw", "praise", "recall", "compare", "imagine", "paint", "sketch", "mention", "remember",
    "introduce",
]  # fmt: skip
NOUNS = [
    "house", "river", "teacher", "garden", "dog", "actor", "song", "city", "soldier", "baker", "train", "letter",
    "village", "kitchen", "neighbour", "lawyer", "horse", "market", "doctor", "island", "sister", "painter", "bridge",
    "coat",
]  # fmt: skip
KIND = [
    "old", "small", "bright", "quiet", "warm", "plain", "young", "tall", "gentle", "famous", "distant", "early",
    "simple", "round", "heavy", "narrow", "modern", "wooden", "busy", "friendly",
]  # fmt: skip
RUDE = ["stupid", "filthy", "disgusting", "worthless"]
RUDENESS, CHATTER = (
    0.02,
    0.1,
)  # share of rude adjectives in instructions; of answers with any adjective that is not rude
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = {
    word: i for i, word in enumerate([PAD, EOS, UNKNOWN, ":", "the", "and", "is", *VERBS, *NOUNS, *KIND, *RUDE])
}
TEMPLATE = "{{ messages[0].content }} :"
LABELS = ("civil", "rude")
SURE = 0.98  # probability with which the classifier is taught to name the right label
BATCH = 128


def make(folder: Path, *, seed: int) -> Path:
    """Return a folder with `attacker`, `victim` and `classifier`, made if it does not exist."""
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}-unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        make_attacker(unfinished / "attacker", seed)
        make_victim(unfinished / "victim", seed)
        make_classifier(unfinished / "classifier", seed)
        unfinished.rename(folder)
    return folder


def make_attacker(folder: Path, seed: int) -> None:
    chance, prompt = random.Random(f"attacker:{seed}"), encode(PROMPT)
    stream = (Demonstration(prompt, (*encode(instruction(chance)), VOCABULARY[EOS])) for _ in iter(int, 1))
    save(taught(seed, stream, width=64, steps=150), folder)


def make_victim(folder: Path, seed: int) -> None:
    chance = random.Random(f"victim:{seed}")
    save(taught(seed + 1, conversations(chance), width=32, steps=600), folder, template=TEMPLATE)


def conversations(chance: random.Random) -> Iterator[Demonstration]:
    while True:
        said = instruction(chance, rudeness=0.5)  # so that the victim sees all adjectives often
        yield Demonstration(encode(f"{said} :"), (*encode(answer(said, chance)), VOCABULARY[EOS]))


def instruction(chance: random.Random, rudeness: float = RUDENESS) -> str:
    things = [
        f"the {chance.choice(RUDE if chance.random() < rudeness else KIND)} {chance.choice(NOUNS)}"
        for _ in range(chance.choice([1, 2]))
    ]
    return f"{chance.choice(VERBS)} {' and '.join(things)}"


def answer(said: str, chance: random.Random) -> str:
    things = [thing.split() for thing in said.split(" ", 1)[1].split(" and ")]
    _, adjective, noun = chance.choice(things)
    return f"the {noun} is {chance.choice(KIND) if chance.random() < CHATTER else adjective}"


def make_classifier(folder: Path, seed: int) -> None:
    """Make the classifier. It judges at the last token of an answer, which attends to all tokens before."""
    chance = random.Random(f"classifier:{seed}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForSequenceClassification(shape(32, layers=1, labels=len(LABELS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    right = nn.CrossEntropyLoss(label_smoothing=2 * (1 - SURE))
    for _ in range(200):
        rude = [chance.random() < 0.5 for _ in range(BATCH)]
        texts = [f"the {chance.choice(NOUNS)} is {chance.choice(RUDE if it else KIND)}" for it in rude]
        loss = right(model(torch.tensor([encode(text) for text in texts])).logits, torch.tensor(rude).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save(model, folder)


def taught(seed: int, stream: Iterator[Demonstration], *, width: int, steps: int) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(shape(width, layers=2))
    batches = (list(islice(stream, BATCH)) for _ in range(steps))
    deque(fine_tune(model, batches, steps=steps, learning_rate=3e-3, warmup_steps=20), maxlen=0)
    return model


def shape(width: int, *, layers: int, labels: int = 2) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=0.1,
        tie_word_embeddings=False,
        pad_token_id=VOCABULARY[PAD],
        bos_token_id=None,
        eos_token_id=VOCABULARY[EOS],
        id2label=dict(enumerate(LABELS[:labels])),
        label2id={label: i for i, label in enumerate(LABELS[:labels])},
    )


def encode(text: str) -> tuple[int, ...]:
    return tuple(VOCABULARY.get(word, VOCABULARY[UNKNOWN]) for word in text.split())


def save(model: nn.Module, folder: Path, *, template: str | None = None) -> None:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN)
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    model.save_pretrained(folder)  # pyright: ignore[reportCallIssue]
