"""Write a small random Llama as a GGUF file, as llama.cpp's converter does."""

from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.harness.tiny_models import tiny_llama

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
_MERGED = "12"  # a token of two digits, which SmolLM2's rule for splitting texts never lets a text have
_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_llama() -> LlamaForCausalLM:
    return tiny_llama(characters="x" * (len(SPECIAL) + 256 + len([_MERGED]) - 3))


def write_gguf(file: Path, model: LlamaForCausalLM, *, splitting: str = "smollm", architecture: str = "llama") -> Path:
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), _MERGED])
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges([" ".join(_MERGED)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":  # tied to the embeddings
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            writer.add_tensor(_name(name), _rotated(weight, heads.get(name.split(".")[-2], 0)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _name(name: str) -> str:
    """Return the name that GGUF gives to a weight."""
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def _rotated(weight: Tensor, heads: int) -> np.ndarray:
    """Return a weight with the rows of each head in the order in which llama.cpp rotates positions."""
    if heads:
        rows, columns = weight.shape
        weight = weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return weight.float().contiguous().numpy()
