"""Architectures of transformers, a few kB each, and a batch for each of them."""

import torch
import torch.distributed as dist

_WIDE = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_BERT = {**_WIDE, "intermediate_size": 24, "max_position_embeddings": 32}
LLAMA = {**_BERT, "num_key_value_heads": 1, "pad_token_id": 0}
_GEMMA = {**LLAMA, "head_dim": 8, "sliding_window": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1,
}  # fmt: skip
_GPT2 = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
_T5 = {
    "vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0
}  # fmt: skip
_SPARSE = {"num_experts": 4, "expert_capacity": 8, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
_BART = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
_SIGHT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
_HEARING = {
    **_WIDE, "intermediate_size": 24, "conv_dim": [8, 8], "conv_stride": [4, 2], "conv_kernel": [8, 2], "layerdrop": 0.0,
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
}  # fmt: skip
_PROJECTED = {"projection_dim": 8, "text_config": _BERT, "vision_config": _SIGHT}

CAUSAL = {
    **dict.fromkeys(["llama", "qwen2", "olmo2", "cohere", "granite", "smollm3", "starcoder2", "phi", "phi3"], LLAMA),
    "stablelm": LLAMA,
    "llama4_text": {**LLAMA, "head_dim": 8, "intermediate_size_mlp": 24, "num_local_experts": 4},
    "mistral": {**LLAMA, "sliding_window": 4},
    "qwen2_moe": {**LLAMA, **_EXPERTS, "shared_expert_intermediate_size": 8},
    "qwen3_moe": {**LLAMA, **_EXPERTS, "head_dim": 8, "output_router_logits": True},
    "mixtral": {**LLAMA, "num_local_experts": 4, "output_router_logits": True},
    "olmoe": {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**LLAMA, **_LATENT, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**LLAMA, **_LATENT, "n_group": 2, "topk_group": 1},
    **{name: {**LLAMA, "head_dim": 8} for name in ("gemma", "qwen3", "glm4")},
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gptj": {**_GPT2, "rotary_dim": 4},
    "gpt_neo": {
        "vocab_size": 64, "hidden_size": 16, "num_heads": 2, "num_layers": 2, "max_position_embeddings": 32,
        "attention_types": [[["global", "local"], 1]],
    },
    "gpt_neox": _BERT,
    "gpt_oss": {**_GEMMA, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    "opt": {**_WIDE, "ffn_dim": 24, "max_position_embeddings": 32, "word_embed_proj_dim": 8},
    "bloom": {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "falcon": {**_WIDE, "alibi": True},
    "mamba": {"vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
    "mamba2": {
        "vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8,
        "n_groups": 2, "chunk_size": 4,
    },
}  # fmt: skip
"""Decoders, which have the loss of the next token."""

PAIRED = {
    "t5": _T5,
    "mt5": {**_T5, "feed_forward_proj": "gated-gelu"},
    "switch_transformers": {**_T5, **_SPARSE},
    "nllb-moe": {**_BART, "num_experts": 4, "expert_capacity": 8, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "bart": {**_BART, "encoder_layerdrop": 0.4, "decoder_layerdrop": 0.4},  # layers that are skipped at random
    "m2m_100": _BART,
    "pegasus": _BART,
}
"""Encoders with decoders."""

MASKED = {
    "bert": _BERT,
    "roberta": {**_BERT, "max_position_embeddings": 34},
    "albert": {**_BERT, "embedding_size": 8},
    "distilbert": {"vocab_size": 64, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 32},
    "deberta-v2": {**_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4},
    "electra": {**_BERT, "embedding_size": 8},
    "modernbert": {
        **_BERT, "pad_token_id": 0, "local_attention": 4, "global_attn_every_n_layers": 2, "bos_token_id": 1,
        "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    },
}  # fmt: skip
"""Encoders, which predict tokens in place."""

SENSING = {
    "vit": {**_SIGHT, "num_labels": 3},
    "clip": _PROJECTED,
    "siglip": _PROJECTED,
    "whisper": {
        **_BART, "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 32, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    },
    "wav2vec2": _HEARING,
    "hubert": _HEARING,
    "llava": {
        "text_config": {**LLAMA, "model_type": "llama"}, "image_token_index": 63, "vision_feature_layer": -1,
        "vision_config": {**_SIGHT, "model_type": "clip_vision_model"},
    },
}  # fmt: skip
"""Models of images and sounds."""

ALL = {**CAUSAL, **PAIRED, **MASKED, **SENSING}


def model_named(name, *, seed=None, **options):
    """A model of the tables, to be trained; other entries of its config are options."""
    import transformers as hf

    if seed is not None:
        torch.manual_seed(seed)
    if name in CAUSAL:
        auto = hf.AutoModelForCausalLM
    elif name in PAIRED:
        auto = hf.AutoModelForSeq2SeqLM
    elif name in MASKED:
        auto = hf.AutoModelForMaskedLM
    else:
        auto = {
            "vit": hf.AutoModelForImageClassification, "whisper": hf.AutoModelForSpeechSeq2Seq,
            "wav2vec2": hf.AutoModelForCTC, "hubert": hf.AutoModelForCTC, "llava": hf.AutoModelForImageTextToText,
        }.get(name, hf.AutoModel)  # fmt: skip
    return auto.from_config(hf.AutoConfig.for_model(name, **ALL[name] | options)).train()


def inputs_of(name, step):
    """A batch of this rank: two sequences of eight tokens, images of two patches a side, or sounds."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(3, 60, (2, 8), generator=generator)
    images = torch.randn(2, 3, 16, 16, generator=generator)
    if name == "vit":
        return {"pixel_values": images, "labels": tokens[:, 0] % 3}
    if name in ("clip", "siglip"):
        return {"input_ids": tokens, "pixel_values": images, "return_loss": True}
    if name == "whisper":
        return {"input_features": torch.randn(2, 4, 16, generator=generator), "labels": tokens}
    if name in ("wav2vec2", "hubert"):
        return {"input_values": torch.randn(2, 200, generator=generator), "labels": tokens[:, :4]}
    if name == "llava":
        tokens[:, :4] = 63
        return {"input_ids": tokens, "pixel_values": images, "labels": tokens}
    return {"input_ids": tokens, "labels": tokens}
