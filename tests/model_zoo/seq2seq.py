"""Encoder-decoders of text."""

from __future__ import annotations

from typing import Any

from torch import nn

from model_zoo.entry import Entry, hf, ids, mask_of, seq2seq

_T5 = {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}


def _same_length(model: nn.Module) -> dict[str, Any]:
    tokens = ids()
    more = {"decoder_input_ids": ids(), "labels": ids()}
    return {"input_ids": tokens, "attention_mask": mask_of(tokens), **more}


ENTRIES: tuple[Entry, ...] = (
    hf("t5", "T5ForConditionalGeneration", seq2seq, **_T5),
    hf("mt5", "MT5ForConditionalGeneration", seq2seq, **_T5),
    hf("umt5", "UMT5ForConditionalGeneration", seq2seq, **_T5),
    hf("longt5", "LongT5ForConditionalGeneration", seq2seq, **_T5, local_radius=3),
    hf("bart", "BartForConditionalGeneration", seq2seq),
    hf("mbart", "MBartForConditionalGeneration", seq2seq),
    hf("pegasus", "PegasusForConditionalGeneration", seq2seq),
    hf("pegasus-x", "PegasusXForConditionalGeneration", seq2seq, block_size=4, num_global_tokens=4),
    hf("marian", "MarianMTModel", seq2seq),
    hf("blenderbot", "BlenderbotForConditionalGeneration", seq2seq),
    hf("blenderbot-small", "BlenderbotSmallForConditionalGeneration", seq2seq),
    hf("m2m100", "M2M100ForConditionalGeneration", seq2seq),
    hf("plbart", "PLBartForConditionalGeneration", seq2seq),
    hf("mvp", "MvpForConditionalGeneration", seq2seq),
    hf("led", "LEDForConditionalGeneration", seq2seq, attention_window=4,
       max_encoder_position_embeddings=32, max_decoder_position_embeddings=32),
    hf("fsmt", "FSMTForConditionalGeneration", _same_length, src_vocab_size=64,
       tgt_vocab_size=64, double=False),
    hf("prophetnet", "ProphetNetForConditionalGeneration", seq2seq, num_encoder_layers=2,
       num_decoder_layers=2, num_encoder_attention_heads=4, num_decoder_attention_heads=4,
       ngram=2, double=False),
    hf("bigbird-pegasus", "BigBirdPegasusForConditionalGeneration", seq2seq,
       attention_type="original_full"),
)  # fmt: skip
