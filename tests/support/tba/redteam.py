"""Everybody whom red-teaming needs, tiny and random: attacker, victim, classifiers and an encoder."""

from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel

from benchmarks.harness.tiny_models import CHARACTERS, PAD_ID, tiny_folder, tiny_policy, tiny_tokenizer
from tba.models.policy import Policy
from tba.tasks.redteam import Options, Victim
from tests.support.models.judges import classifier

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


def labelled_folder(folder: Path, labels: tuple[str, ...] = ("nothate", "hate")) -> Path:
    """A classifier that tells these labels."""
    from transformers import AutoConfig

    classifier(folder, "encoder", len(labels))
    config = AutoConfig.from_pretrained(folder)
    config.id2label, config.label2id = dict(enumerate(labels)), {label: i for i, label in enumerate(labels)}
    config.save_pretrained(folder)
    return folder


def chat_folder(folder: Path, *, seed: int) -> Path:
    """A language model with a chat template."""
    snapshot = tiny_policy(seed=seed).snapshot()
    snapshot.tokenizer.chat_template = CHAT
    snapshot.save(folder)
    return folder


def encoder_folder(folder: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BertConfig(vocab_size=len(CHARACTERS) + 3, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                            intermediate_size=64, max_position_embeddings=300, initializer_range=0.3,
                            pad_token_id=PAD_ID)  # fmt: skip
        model = BertModel(config)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def redteam_options(folder: Path) -> dict[str, object]:
    """Settings of the task, with models made in `folder`."""
    return {
        "victim": str(tiny_folder(folder / "victim", seed=1)),
        "victim_tokens": 8,
        "victim_samples": 3,
        "classifier": str(labelled_folder(folder / "classifier")),
        "embeddings": str(encoder_folder(folder / "encoder")),
    }


def redteam_victim(options: dict[str, Any]) -> Victim:
    """The victim of a task with these settings."""
    return Victim(Policy.load_frozen("task.options.victim", options["victim"]), Options(**options))
