"""A tiny model for llama.cpp."""

from pathlib import Path

import numpy as np

PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def to_gguf(folder: Path, path: Path, *templates: dict[str, str]) -> Path:
    """The checkpoint as a file for llama.cpp, in float32, with a vocabulary of the same size. Needs gguf."""
    import gguf
    from safetensors.numpy import load_file

    weights = load_file(folder / "model.safetensors")
    vocab_size = len(weights["model.embed_tokens.weight"])
    writer = gguf.GGUFWriter(path, "qwen2")
    for add, value in (
        ("context_length", 1024), ("embedding_length", 32), ("block_count", 2), ("feed_forward_length", 64),
        ("head_count", 4), ("head_count_kv", 2), ("layer_norm_rms_eps", 1e-6), ("rope_freq_base", 10000.0),
    ):  # fmt: skip
        getattr(writer, f"add_{add}")(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{number}" for number in range(vocab_size)])
    writer.add_token_types([1] * vocab_size)
    writer.add_token_merges(["t 1"])
    writer.add_chat_template(templates)
    names = {f"model.layers.{n}.{long}": f"blk.{n}.{short}" for n in range(2) for long, short in PARTS.items()}
    names |= {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for key, value in weights.items():
        name, _, end = key.rpartition(".")
        writer.add_tensor(f"{names[name]}.{end}", np.ascontiguousarray(value, np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path
