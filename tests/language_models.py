"""Language models of transformers at random weights: a class, and the options of its config."""

import contextlib
import io
import logging
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 37
_DECODER = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 32,
}  # fmt: skip
_GROUPED = {**_DECODER, "num_key_value_heads": 1}
ENCODER_DECODER = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 32,
    "decoder_start_token_id": 2,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "GPTNeoXForCausalLM": _DECODER,
    "OPTForCausalLM": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24,
        "max_position_embeddings": 32, "word_embed_proj_dim": 16,
    },
    "BloomForCausalLM": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "FalconForCausalLM": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "LlamaForCausalLM": _GROUPED,
    "Qwen2ForCausalLM": _GROUPED,
    "Qwen3ForCausalLM": {**_GROUPED, "head_dim": 8},
    "MistralForCausalLM": _GROUPED,
    "Gemma2ForCausalLM": {**_GROUPED, "head_dim": 8, "final_logit_softcapping": None},
    "MixtralForCausalLM": {**_GROUPED, "num_local_experts": 2, "experts_implementation": "eager"},
    "Olmo2ForCausalLM": _GROUPED,
    "PhiForCausalLM": _DECODER,
    "MambaForCausalLM": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    "BertLMHeadModel": {**_DECODER, "is_decoder": True},
    "BertForMaskedLM": _DECODER,
    "RobertaForMaskedLM": {**_DECODER, "pad_token_id": 0},
    "ElectraForMaskedLM": {**_DECODER, "embedding_size": 16},
    "ModernBertForMaskedLM": {**_DECODER, "attn_implementation": "eager", "pad_token_id": 0},
    "DistilBertForMaskedLM": {
        "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 32,
    },
    "T5ForConditionalGeneration": {
        "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
        "decoder_start_token_id": 0,
    },
    "BartForConditionalGeneration": ENCODER_DECODER,
    "PegasusForConditionalGeneration": ENCODER_DECODER,
}  # fmt: skip


def language_model(name: str, **options: Any) -> nn.Module:
    """The model in eval mode and float64, the same at every call; options go to its config."""
    import transformers

    transformers.logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    cls = getattr(transformers, name)
    config = cls.config_class(vocab_size=VOCABULARY, **{**CONFIGS.get(name, {}), **options})
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        model: nn.Module = cls(config)
    return model.double().eval()


def padded_batch(rows: int = 3, length: int = 6) -> dict[str, Tensor]:
    """Sequences of which the first is shorter; labels are the tokens, -100 where there is padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, length - 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask != 0, ids, -100)}
