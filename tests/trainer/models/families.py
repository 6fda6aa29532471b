"""Tiny configurations of transformers' families, by name, without dropout."""

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
GPT |= {"bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SHORT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
MIXTURE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTURE |= {"n_routed_experts": 4, "shared_expert_intermediate_size": 16}
IMAGES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
LATENT |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 4}
WINDOW = {"sliding_window": 4}
T5 = {"vocab_size": 64, "d_model": 32, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "d_kv": 8}
T5 |= {"d_ff": 48, "dropout_rate": 0.0}
BART = {"vocab_size": 64, "d_model": 32, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
BART |= {"max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
for side, layers in (("encoder", 2), ("decoder", 3)):
    BART |= {f"{side}_layers": layers, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
    BART |= {f"{side}_layerdrop": 0.0}
SOUNDS = {"num_mel_bins": 6, "max_source_positions": 10, "max_target_positions": 32}
STILL = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
ROUTED = {"output_router_logits": True}


def in_turn(kind):
    return {"layer_types": [kind, "full_attention", kind]}


SLIDING = {**WINDOW, **in_turn("sliding_attention")}

FAMILIES = {
    "mistral": {**SIZES, **WINDOW},
    "gemma2": {**SIZES, **WINDOW},
    "gemma3_text": {**SIZES, **SLIDING},
    "cohere": SIZES,
    "cohere2": {**SIZES, **WINDOW},
    "llama4_text": {**SIZES, **MIXTURE, **in_turn("chunked_attention"), "attention_chunk_size": 4}
    | {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 1},
    "gpt_oss": {**SIZES, **MIXTURE, **SLIDING},
    "exaone4": {**SIZES, **SLIDING},
    "qwen2": {**SIZES, **WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "gpt_neox": {**SIZES, **STILL},
    "opt": {**SHORT, "ffn_dim": 48, "word_embed_proj_dim": 16, "max_position_embeddings": 64, "dropout": 0.0},
    "phi": SIZES,
    "falcon": {**SHORT, **STILL},
    "falcon with alibi": {**SHORT, **STILL, "alibi": True},
    "gptj": {**GPT, "rotary_dim": 4},
    "codegen": {**GPT, "rotary_dim": 4},
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 3, "n_head": 4, **STILL},
    "mpt": {"vocab_size": 64, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64},
    "gpt_neo": {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4}
    | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64}
    | {"resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0},
    "mamba": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4},
    "jamba": {**SIZES, **MIXTURE, "mamba_d_state": 4, "mamba_dt_rank": 2, "use_mamba_kernels": False}
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "minimax": {**SIZES, **MIXTURE, **in_turn("linear_attention"), "block_size": 4},
    "bert": {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "vit": {**IMAGES, "intermediate_size": 48},
    "mixtral with its routers' loss": {**SIZES, **MIXTURE, **ROUTED},
    "qwen2_moe with its routers' loss": {**SIZES, **MIXTURE, **ROUTED},
    "gpt_oss with its routers' loss": {**SIZES, **MIXTURE, **SLIDING, **ROUTED},
    "granitemoe with its routers' loss": {**SIZES, **MIXTURE, **ROUTED},
    "llama": SIZES,
    "gpt2": GPT,
    "qwen3_moe with its routers' loss": {**SIZES, **MIXTURE, **ROUTED},
    "olmoe with its routers' loss": {**SIZES, **MIXTURE, **ROUTED},
    "bitnet": SIZES,
    "deepseek_v2": {**SIZES, **MIXTURE, **LATENT},
    "deepseek_v3": {**SIZES, **MIXTURE, **LATENT},
    "longcat_flash": {**SIZES, **MIXTURE, **LATENT, "ffn_hidden_size": 48, "moe_topk": 2}
    | {"expert_ffn_hidden_size": 24, "moe_intermediate_size": 24, "zero_expert_num": 2},
    "diffllama": SIZES,
    "dinov2": {**IMAGES, "mlp_ratio": 2},
    "ernie4_5": SIZES,
    "gemma": SIZES,
    "glm4": SIZES,
    "gpt_bigcode": GPT,
    "granite": SIZES,
    "lfm2": {**SIZES, **in_turn("conv")},
    "nemotron": SIZES,
    "olmo2 with one head of keys": {**SIZES, "num_key_value_heads": 1},
    "olmo3": {**SIZES, **WINDOW},
    "phi3": SIZES,
    "phimoe": {**SIZES, **MIXTURE, "input_jitter_noise": 0.0, "router_jitter_noise": 0.0},
    "qwen3": SIZES,
    "smollm3": SIZES,
    "stablelm": SIZES,
    "starcoder2": {**SIZES, **WINDOW},
    "mamba2": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4, "num_heads": 8}
    | {"head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "mamba2 with heads in groups": {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "state_size": 4,
    }
    | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "nemotron_h": {
        **SIZES,
        "layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention"],
    }
    | {"num_hidden_layers": 4, "head_dim": 8, "ssm_state_size": 4, "mamba_num_heads": 8, "mamba_head_dim": 8}
    | {"n_groups": 2, "chunk_size": 4, "n_routed_experts": 4, "moe_intermediate_size": 16}
    | {"moe_shared_expert_intermediate_size": 32},
    "t5": T5,
    "whisper": {**BART, **SOUNDS, "decoder_start_token_id": 2},
    "bart": BART,
    "umt5": T5,
    "longt5": T5,
    "m2m_100": BART,
    "marian": BART,
    "pegasus": BART,
    "recurrent_gemma": {**SIZES, "lru_width": 32, "attention_window_size": 4}
    | {"block_types": ["recurrent", "attention"]},
}
"""Those that were refused as long as layers made their masks themselves first; then a few of the others."""


def arguments(name):
    """Of ``from_config``."""
    return {"model_type": name.split()[0], **FAMILIES[name]}


def model(name):
    """Of a configuration."""
    return {"name": "ballast_trainer.models.hugging_face:from_config", "args": arguments(name)}


def batches(kind="next"):
    """Text to continue (``next``) or to repeat (``same``), 16 tokens a sample."""
    import torch

    def batch(seed, step, size):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        tokens = torch.randint(3, 64, (size, 16), generator=generator)
        ahead = torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:]
        return tokens, ahead if kind == "next" else tokens

    return batch
