"""Tiny random configurations of every family, for tests, benchmarks and the table of families.

Most families agree on the names of their sizes, so one set of small numbers serves: each configuration takes those
it has. `_OWN` holds what a family needs besides: patterns of block kinds whose borders the tests then cut at, sizes
that must fit each other. Widths are kept apart where it matters, so that a mix-up of two of them shows.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from corolla.models.family import quiet
from corolla.models.skeleton import text_config

TINY_BLOCKS: Final = 6
TINY_VOCABULARY: Final = 128
TINY_WINDOW: Final = 5
"""Sliding window of the families that have one: short, so that tests exceed it."""

MAX_TINY_PARAMETERS: Final = 24_000_000
"""A configuration that left a default at its real size is refused before it takes gigabytes."""

Settings = Mapping[str, Any]

_COMMON: Final[Settings] = {
    # sizes, under the names that families have for them
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "lru_width", "embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), TINY_BLOCKS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "kv_channels", "qk_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "block_ff_dim"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "intermediate_size_mlp", "dff"), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), TINY_VOCABULARY),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "type_vocab_size": 2,
    # what may be seen of the past
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size"), TINY_WINDOW),
    "attention_chunk_size": 8,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    # low-rank attention and its indexer
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 64,
    # recurrence and convolutions
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    "mamba_d_ssm": 128,
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("mamba_expand", "expand"), 2),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank", "mamba_chunk_size", "chunk_size", "mamba_d_conv"), 4),
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "linear_conv_kernel_dim": 4,
    "conv_L_cache": 3,
    "conv_dim": 64,
    "block_dim": 64,
    # the rest
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), 8),
    "num_kv_shared_layers": 0,
    "logits_soft_cap": 30.0,
    "rotary_dim": 8,
    "num_mem_heads": 4,
    "attention_dropout": 0.0,
}


def _pattern(*kinds: str) -> list[str]:
    """A pattern of block kinds, repeated to the tiny model's length."""
    return [kinds[index % len(kinds)] for index in range(TINY_BLOCKS)]


_SLIDING_THRICE: Final[Settings] = {"layer_types": _pattern("sliding_attention", "sliding_attention", "full_attention")}
_SLIDING_TWICE: Final[Settings] = {"layer_types": _pattern("sliding_attention", "full_attention")}
_LINEAR_THRICE: Final[Settings] = {"layer_types": _pattern("linear_attention", "linear_attention", "full_attention")}
_CONV_THRICE: Final[Settings] = {"layer_types": _pattern("conv", "conv", "full_attention")}
_LEAVE_OUT: Final = object()
"""In a family's own settings: take the family's default instead of the common setting."""

_OWN: Final[Mapping[str, Settings]] = {
    "bamba": {"attn_layer_indices": [1, 4]},
    "cohere2": _SLIDING_THRICE,
    "falcon": {"head_dim": _LEAVE_OUT, "alibi": False, "new_decoder_architecture": True},
    "falcon_mamba": {"intermediate_size": 128},
    "gemma2": _SLIDING_TWICE,
    "gemma3_text": _SLIDING_THRICE,
    "gemma3n_text": {
        **_SLIDING_THRICE,
        "activation_sparsity_pattern": [0.0] * TINY_BLOCKS,
        "intermediate_size": [96] * TINY_BLOCKS,
        "altup_num_inputs": 2,
    },
    "gemma4_text": _SLIDING_THRICE,
    "gpt_neo": {"attention_types": [[["global", "local"], TINY_BLOCKS // 2]], "num_heads": 4},
    "gpt_oss": _SLIDING_TWICE,
    "granitemoehybrid": {"layer_types": _pattern("mamba", "mamba", "attention")},
    "jamba": {
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2": _CONV_THRICE,
    "lfm2_moe": _CONV_THRICE,
    "llama4_text": {
        "interleave_moe_layer_step": 2,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"] + ["chunked_attention"] * 2,
    },
    "mamba": {"intermediate_size": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "minimax": {"layer_types": _pattern("linear_attention", "full_attention"), "block_size": 4},
    "mixtral": {"sliding_window": _LEAVE_OUT},
    "nemotron_h": {"layers_block_type": _pattern("linear_attention", "moe", "full_attention")},
    "olmo3": _SLIDING_THRICE,
    "phi3": {"sliding_window": _LEAVE_OUT},
    "qwen3_5_moe_text": _LINEAR_THRICE,
    "qwen3_5_text": _LINEAR_THRICE,
    "qwen3_next": _LINEAR_THRICE,
    "smollm3": {"no_rope_layer_interval": 3},
    "xglm": {"attention_heads": 4},
    "zamba2": {"layers_block_type": _pattern("mamba", "mamba", "hybrid"), "num_mem_blocks": 1},
    "cohere_compass_text": {
        **_SLIDING_THRICE,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "o_groups": 2,
        "o_lora_rank": 16,
        "hc_mult": 2,
    },
    "dots3_note_text": {
        "sliding_window": TINY_WINDOW,
        "layer_types": _pattern("indexed_attention", "indexed_attention", "sliding_attention"),
        "num_key_value_heads": 4,
        "head_dim": 16,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 8,
        "shared_experts_intermediate_size": 32,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_vision_encoder": {
        "mlp_layer_types": ["dense"] * TINY_BLOCKS,
        "adapter_in_dim": 64,
        "adapter_out_dim": 64,
    },
    "gemma4_unified_text": _SLIDING_THRICE,
    "dory": {"n_input_layers": 2, "n_output_layers": 2},
    "inkling2_loop_text": {"unpadded_vocab_size": TINY_VOCABULARY},
    "inkling2_text": {"unpadded_vocab_size": TINY_VOCABULARY},
    "longcat_flash": {"num_hidden_layers": _LEAVE_OUT, "head_dim": 8, "zero_expert_num": 2},
    "qwen4_exp_text": {
        "layer_types": _pattern("linear_attention", "linear_attention", "indexed_attention"),
        "ple_layer_ids": [2, 4],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "hc_count": 2,
        "hc_lowrank": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {
        "axial_pos_embds_dim": (16, 48),
        "axial_pos_shape": (16, 16),
        "attn_layers": _pattern("local", "lsh"),
        "num_buckets": 4,
    },
    "xlstm": {
        "embedding_dim": 64,
        "num_blocks": TINY_BLOCKS,
        "num_heads": 4,
        "qk_dim_factor": 1.0,
        "autocast_kernel_dtype": "float32",
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": _pattern("linear_attention", "linear_attention", "hybrid")},
    "zaya": {
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
        "layer_types": _pattern("hybrid_sliding", "hybrid_sliding", "hybrid"),
    },
}


def tiny_config(family: str, **changes: object) -> PreTrainedConfig:
    """A small configuration of `family` (transformers' model type), its decoder's part changed by `changes`.

    Raises ValueError when it comes out large after all.
    """
    config = _tiny(CONFIG_MAPPING[family](), changes)
    _check_small(config)
    return config


def _tiny(default: PreTrainedConfig, changes: Settings) -> PreTrainedConfig:
    """`default` made small, with the parts it may have: a decoder that sees and hears has a config for each."""
    decoder = text_config(default)
    parts = {
        name: _tiny(part, changes if part is decoder else {})
        for name in cast("Mapping[str, type]", type(default).sub_configs)
        if isinstance(part := getattr(default, name, None), PreTrainedConfig)
    }
    is_composite = any(getattr(default, name) is decoder for name in parts)
    own = dict(_OWN.get(default.model_type, {})) | ({} if is_composite else dict(changes))
    taken = {field.name for field in dataclasses.fields(default)} | default.attribute_map.keys()
    common = {} if is_composite else {name: value for name, value in _COMMON.items() if name in taken}
    if "qk_rope_head_dim" in common:  # low-rank attention has as many heads for keys as for queries
        common = {name: value for name, value in common.items() if name not in ("head_dim", "num_key_value_heads")}
    settings: dict[str, Any] = {
        name: value for name, value in (common | parts | own).items() if value is not _LEAVE_OUT
    }
    for alias, name in type(default).attribute_map.items():
        if alias in settings and name in settings:  # both ways to say it: the family's own setting wins
            settings.pop(name if alias in own else alias)
    with quiet():
        return type(default)(**settings)


def _check_small(config: PreTrainedConfig) -> None:
    with torch.device("meta"), quiet():
        outline = AutoModelForCausalLM.from_config(config)
    num_parameters = sum(parameter.numel() for parameter in outline.parameters())
    if num_parameters > MAX_TINY_PARAMETERS:
        raise ValueError(f"{config.model_type}: the tiny configuration has {num_parameters} parameters")
