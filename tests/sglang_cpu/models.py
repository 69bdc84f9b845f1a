"""Random models with a byte-level tokenizer, written without any download.

python models.py KIND DIR      KIND: tiny | big | wide | mla | swa
"""

import json
import os
import sys

import torch
from safetensors.torch import save_file

VOCAB = 512
LLAMA = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "big": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "wide": {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
    },
}
"""tiny: seconds. big: its prefill takes long enough to be worth a cache. wide: the KV bytes of an 8 B model (128 KiB a
token), next to no arithmetic: what a transfer looks like beside a GPU's prefill."""
COMMON = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
}
MLA = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 32,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 4,
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 2.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 2048,
    },
}


def write_model(kind, directory, seed=0):
    """Write config, random weights and tokenizer of ``kind`` to ``directory``; returns the directory."""
    os.makedirs(directory, exist_ok=True)
    write_tokenizer(directory)
    write_weights(kind, directory, seed)
    return directory


def write_weights(kind, directory, seed=0):
    """Write config and weights only: what an update from disk replaces."""
    generator = torch.Generator().manual_seed(seed)
    config, shapes = _mla() if kind == "mla" else _llama(kind)
    with open(os.path.join(directory, "config.json"), "w") as f:
        json.dump(config, f, indent=1)
    scale = 0.04 if kind == "big" else 0.08
    weights = {
        name: torch.ones(shape).bfloat16()
        if len(shape) == 1
        else (torch.randn(*shape, generator=generator) * scale).bfloat16()
        for name, shape in shapes.items()
    }
    save_file(weights, os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})


def _llama(kind):
    shape = LLAMA["tiny" if kind == "swa" else kind]
    arch = "HicacheExtSwaForCausalLM" if kind == "swa" else "LlamaForCausalLM"
    config = {**COMMON, **shape, "architectures": [arch], "model_type": "llama"}
    if kind == "swa":
        pattern = [1 - i % 2 for i in range(shape["num_hidden_layers"])]
        config |= {"sliding_window": 64, "is_hybrid_swa": True, "hybrid_layer_pattern": pattern}
    h, q = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    kv, i = shape["num_key_value_heads"] * shape["head_dim"], shape["intermediate_size"]
    attention = {"q_proj": (q, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, q)}
    return config, _shapes(shape["num_hidden_layers"], h, i, attention)


def _mla():
    config = {**COMMON, **MLA, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
    h, n = MLA["hidden_size"], MLA["num_attention_heads"]
    rank, nope, rope, v = (MLA[k] for k in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    attention = {
        "q_proj": (n * (nope + rope), h),
        "kv_a_proj_with_mqa": (rank + rope, h),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (n * (nope + v), rank),
        "o_proj": (h, n * v),
    }
    return config, _shapes(MLA["num_hidden_layers"], h, MLA["intermediate_size"], attention)


def _shapes(layers, hidden, intermediate, attention):
    shapes = {
        "model.embed_tokens.weight": (VOCAB, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCAB, hidden),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {at + n + ".weight": (hidden,) for n in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{at}mlp.{name}.weight": (intermediate, hidden) for name in ("gate_proj", "up_proj")}
        shapes[at + "mlp.down_proj.weight"] = (hidden, intermediate)
    return shapes


def write_tokenizer(directory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(directory)


if __name__ == "__main__":
    print(write_model(sys.argv[1], sys.argv[2]))
