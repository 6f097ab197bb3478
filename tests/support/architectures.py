"""Small models of many architectures with random weights, from transformers' own configuration classes.

Settings that change numbers have values of their own: scales, soft-caps, sinks, windows, dropout; heads are tied and untied.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 61
_SIZE: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY, "eos_token_id": 2}
_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "eos_token_id": 2}
_WINDOWED = ["sliding_attention", "full_attention"]
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}

_ORIGINAL = "original_max_position_embeddings"
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, _ORIGINAL: 24, "beta_fast": 32.0, "beta_slow": 1.0}
_FOUR = {"head_dim": 8, "num_hidden_layers": 4, "sliding_window": 5, "layer_types": [*_WINDOWED, *_WINDOWED]}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
           "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_SIZE, "attention_bias": True}),
    "mistral": ("MistralConfig", {**_SIZE, "sliding_window": 6}),
    "mixtral": ("MixtralConfig", {**_SIZE, "num_local_experts": 4, "sliding_window": 5}),
    "qwen2": ("Qwen2Config", {**_SIZE, "tie_word_embeddings": True}),
    "qwen2_window": ("Qwen2Config", {**_SIZE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2_moe": ("Qwen2MoeConfig", {**_SIZE, **_EXPERTS, "shared_expert_intermediate_size": 24}),
    "qwen3": ("Qwen3Config", {**_SIZE, "head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_SIZE, **_EXPERTS, "head_dim": 16}),
    "qwen3_next": ("Qwen3NextConfig", {**_SIZE, **_EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 24,
                   "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                   "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}),
    "gemma": ("GemmaConfig", {**_SIZE, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {**_SIZE, "head_dim": 8, "sliding_window": 5, "final_logit_softcapping": 3.0,
               "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 11}),
    "gemma3_text": ("Gemma3TextConfig", {**_SIZE, "head_dim": 8, "sliding_window": 5, "layer_types": _WINDOWED,
                    "query_pre_attn_scalar": 11}),
    "gemma3": ("Gemma3Config", {"text_config": {**_SIZE, "head_dim": 8, "sliding_window": 5, "layer_types": _WINDOWED},
               "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
               "num_attention_heads": 2, "image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4,
               "boi_token_index": 57, "eoi_token_index": 58, "image_token_index": 59}),
    "phi": ("PhiConfig", {**_SIZE, "num_key_value_heads": 4, "partial_rotary_factor": 0.5, "resid_pdrop": 0.1}),
    "phi3": ("Phi3Config", {**_SIZE, "sliding_window": 5, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    "smollm3": ("SmolLM3Config", {**_SIZE, "no_rope_layers": [1, 0]}),
    "olmo2": ("Olmo2Config", _SIZE),
    "granite": ("GraniteConfig", {**_SIZE, "logits_scaling": 0.3, "attention_multiplier": 0.4,
                "embedding_multiplier": 3.0, "residual_multiplier": 0.7}),
    "granitemoe": ("GraniteMoeConfig", {**_SIZE, "num_local_experts": 4, "logits_scaling": 0.3,
                   "attention_multiplier": 0.4, "embedding_multiplier": 3.0, "residual_multiplier": 0.7}),
    "cohere": ("CohereConfig", {**_SIZE, "logit_scale": 2.5, "use_qk_norm": True}),
    "cohere2": ("Cohere2Config", {**_SIZE, "logit_scale": 2.5, "sliding_window": 5, "layer_types": _WINDOWED}),
    "gpt2": ("GPT2Config", {**_GPT2, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    "gpt_neo": ("GPTNeoConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
                "attention_types": [[["global", "local"], 1]], "window_size": 5, "max_position_embeddings": 64}),
    "gpt_neox": ("GPTNeoXConfig", {**_SIZE, "rotary_pct": 0.5, "hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "gptj": ("GPTJConfig", {**_GPT2, "rotary_dim": 4}),
    "gpt_bigcode": ("GPTBigCodeConfig", _GPT2),
    "codegen": ("CodeGenConfig", {**_GPT2, "rotary_dim": 4}),
    "bloom": ("BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4,
              "hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "falcon_alibi": ("FalconConfig", {**_SIZE, "alibi": True, "new_decoder_architecture": False, "multi_query": False,
                     "parallel_attn": False, "bias": True}),
    "falcon": ("FalconConfig", {**_SIZE, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "mpt": ("MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": VOCABULARY}),
    "opt": ("OPTConfig", {**_SIZE, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False,
            "dropout": 0.1}),
    "starcoder2": ("Starcoder2Config", {**_SIZE, "sliding_window": 5, "residual_dropout": 0.1}),
    "stablelm": ("StableLmConfig", {**_SIZE, "use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "nemotron": ("NemotronConfig", {**_SIZE, "head_dim": 8, "partial_rotary_factor": 0.5}),
    "glm4": ("Glm4Config", {**_SIZE, "head_dim": 8}),
    "deepseek_v3": ("DeepseekV3Config", {**_SIZE, **_LATENT, "num_key_value_heads": 4, "n_routed_experts": 4,
                    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1,
                    "first_k_dense_replace": 1, "n_shared_experts": 1}),
    "gpt_oss": ("GptOssConfig", {**_SIZE, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": 5, "layer_types": _WINDOWED}),
    "minicpm3": ("MiniCPM3Config", {**_SIZE, **_LATENT, "num_key_value_heads": 4, "dim_model_base": 8,
                 "scale_emb": 2.0, "scale_depth": 1.4}),
    "lfm2": ("Lfm2Config", {**_SIZE, "layer_types": ["conv", "full_attention"], "block_ff_dim": 48}),
    "mamba": ("MambaConfig", _MAMBA),
    "mamba2": ("Mamba2Config", {**_MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8}),
    "rwkv": ("RwkvConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}),
    "falcon_h1": ("FalconH1Config", {**_SIZE, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8,
                  "mamba_d_state": 8, "mamba_chunk_size": 8, "lm_head_multiplier": 2.0, "embedding_multiplier": 3.0}),
    "jamba": ("JambaConfig", {**_SIZE, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4,
              "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}),
    "recurrent_gemma": ("RecurrentGemmaConfig", {**_SIZE, "lru_width": 32, "attention_window_size": 5,
                        "block_types": ["recurrent", "attention"], "logits_soft_cap": 3.0, "num_hidden_layers": 2}),
    "bert": ("BertConfig", {**_SIZE, "is_decoder": True}),
    # those that change their numbers beyond a length: each has one of 24 tokens in a model of 64
    "ministral3": ("Ministral3Config", {**_SIZE, "head_dim": 8, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.3}}),
    "llama4": ("Llama4TextConfig", {**_SIZE, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2,
               "num_experts_per_tok": 1, "no_rope_layers": [1, 0], "floor_scale": 24, "attn_scale": 0.3,
               "attention_chunk_size": 24, "layer_types": ["chunked_attention", "full_attention"], "moe_layers": [1]}),
    "llama_yarn": ("LlamaConfig", {**_SIZE, "rope_parameters": _YARN}),
    "llama_llama3": ("LlamaConfig", {**_SIZE, "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4,
                     "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, _ORIGINAL: 24}}),
    "llama_linear": ("LlamaConfig", {**_SIZE, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4,
                     "factor": 4.0}}),
    "llama_dynamic": ("LlamaConfig", {**_SIZE, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4,
                      "factor": 4.0, _ORIGINAL: 24}}),
    "phi3_longrope": ("Phi3Config", {**_SIZE, _ORIGINAL: 24, "rope_parameters": {"rope_type": "longrope",
                      "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0], _ORIGINAL: 24}}),
    "mistral_window": ("MistralConfig", {**_SIZE, "sliding_window": 24}),
    "ernie4_5": ("Ernie4_5Config", {**_SIZE, "head_dim": 8}),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", {**_SIZE, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24,
                     "moe_num_shared_experts": 1, "moe_layer_start_index": 1}),
    "gemma3n": ("Gemma3nTextConfig", {**_SIZE, **_FOUR, **_PER_LAYER, "intermediate_size": [48] * 3 + [64],
                "laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "altup_num_inputs": 2,
                "num_kv_shared_layers": 2}),
    "gemma4": ("Gemma4TextConfig", {**_SIZE, **_FOUR, **_PER_LAYER, "global_head_dim": 16, "num_kv_shared_layers": 0}),
    "ministral": ("MinistralConfig", {**_SIZE, "head_dim": 8, "sliding_window": 5, "layer_types": _WINDOWED}),
    "cwm": ("CwmConfig", {**_SIZE, "head_dim": 8, "sliding_window": 5, "layer_types": _WINDOWED, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4}}),
    "seed_oss": ("SeedOssConfig", {**_SIZE, "head_dim": 8}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {**_SIZE, "head_dim": 8}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", {**_SIZE, "head_dim": 8, "num_experts": 4, "moe_topk": 2}),
    "arcee": ("ArceeConfig", {**_SIZE, "head_dim": 8}),
    "helium": ("HeliumConfig", {**_SIZE, "head_dim": 8}),
    "apertus": ("ApertusConfig", {**_SIZE, "head_dim": 8}),
    "exaone4": ("Exaone4Config", {**_SIZE, "sliding_window": 5, "layer_types": _WINDOWED}),
    "olmo3": ("Olmo3Config", {**_SIZE, "sliding_window": 5, "layer_types": _WINDOWED}),
    "olmo_hybrid": ("OlmoHybridConfig", {**_SIZE, "layer_types": ["linear_attention", "full_attention"],
                    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                    "linear_value_head_dim": 8}),
    "flex_olmo": ("FlexOlmoConfig", {**_SIZE, "num_experts": 4, "num_experts_per_tok": 2}),
    "minimax_m2": ("MiniMaxM2Config", {**_SIZE, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "minimax": ("MiniMaxConfig", {**_SIZE, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                "block_size": 8, "layer_types": ["linear_attention", "full_attention"]}),
    "glm4_moe": ("Glm4MoeConfig", {**_SIZE, **_EXPERTS, "head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1,
                 "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
    "deepseek_v2": ("DeepseekV2Config", {**_SIZE, **_LATENT, "num_key_value_heads": 4, "n_routed_experts": 4,
                    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1,
                    "topk_group": 1, "first_k_dense_replace": 1}),
    "phimoe": ("PhimoeConfig", {**_SIZE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoehybrid": ("GraniteMoeHybridConfig", {**_SIZE, "num_local_experts": 4, "num_experts_per_tok": 2,
                         "shared_intermediate_size": 24, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8,
                         "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}),
    "zamba2": ("Zamba2Config", {**_SIZE, "num_key_value_heads": 4, "attention_head_dim": 16, "num_mem_blocks": 1,
               "layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "n_mamba_heads": 4, "mamba_ngroups": 1,
               "mamba_headdim": 16, "chunk_size": 8, "use_mem_rope": True, "adapter_rank": 4}),
    "nemotron_h": ("NemotronHConfig", {**_SIZE, "head_dim": 8, "layers_block_type": ["mamba", "attention"],
                   "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8}),
    "qwen3_5": ("Qwen3_5TextConfig", {**_SIZE, "head_dim": 16, **_LINEAR}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**_SIZE, **_EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 24,
                    **_LINEAR}),
    "lfm2_moe": ("Lfm2MoeConfig", {**_SIZE, "layer_types": ["conv", "full_attention"], "num_experts": 4,
                 "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1}),
    "solar_open": ("SolarOpenConfig", {**_SIZE, **_EXPERTS, "head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1,
                   "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}),
    "jais2": ("Jais2Config", {**_SIZE, "head_dim": 8}),
    "dots1": ("Dots1Config", {**_SIZE, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
              "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
              "first_k_dense_replace": 1}),
    "nanochat": ("NanoChatConfig", {**_SIZE, "head_dim": 8}),
    "vaultgemma": ("VaultGemmaConfig", {**_SIZE, "head_dim": 8, "sliding_window": 5, "layer_types": _WINDOWED}),
}  # fmt: skip
"""Name → (configuration class, its arguments)."""
TELLING = ("qwen3_moe", "gemma2", "gemma3", "granite", "bloom", "mamba", "ministral3", "gemma4")
"""Those whose tests are in the quick loop."""
EXTRA = (
    *("mixtral", "qwen2_window", "qwen2_moe", "qwen3", "gemma", "phi", "cohere", "gpt_neo", "gpt_neox", "gpt_bigcode"),
    *("codegen", "falcon", "starcoder2", "stablelm", "nemotron", "glm4", "minicpm3", "mamba2", "jamba"),
    *(
        "llama_yarn",
        "llama_llama3",
        "llama_linear",
        "llama_dynamic",
        "mistral_window",
        "ernie4_5_moe",
        "ministral",
        "cwm",
    ),
    *(
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "arcee",
        "helium",
        "apertus",
        "exaone4",
        "olmo3",
        "olmo_hybrid",
        "flex_olmo",
    ),
    *(
        "minimax_m2",
        "minimax",
        "glm4_moe",
        "deepseek_v2",
        "phimoe",
        "granitemoehybrid",
        "zamba2",
        "nemotron_h",
        "lfm2_moe",
    ),
    *("qwen3_5_moe", "solar_open", "jais2", "dots1", "nanochat", "vaultgemma"),
)
"""Those whose tests are in the long loop alone: each has a near relation among the others."""


def make(name: str, folder: str | Path, seed: int = 0) -> Path:
    """Write a random model of an architecture, and a word-level tokenizer, to a folder; returns its path."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    kind, given = ARCHITECTURES[name]
    config = getattr(transformers, kind)(**given)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        roughen(model)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w3"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"eos_token": "w2", "pad_token": "w0", "unk_token": "w3"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **named).save_pretrained(folder)
    return Path(folder)


def roughen(model: Any) -> None:
    """Make weights so large that logits differ by more than 1, and biases, norms and sinks take part."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15 if parameter.dim() > 1 else 0.2)
