"""The model zoo: small random configurations of many architectures, one declaration each."""

from __future__ import annotations

import torch
from torch import nn

from model_zoo import (
    audio,
    decoders,
    encoders,
    experts,
    multimodal,
    plain,
    seq2seq,
    series,
    vision,
)
from model_zoo.entry import Entry

FAMILIES: dict[str, tuple[Entry, ...]] = {
    "decoder language models": decoders.ENTRIES,
    "mixtures of experts": experts.ENTRIES,
    "encoders": encoders.ENTRIES,
    "encoder-decoders": seq2seq.ENTRIES,
    "vision": vision.ENTRIES,
    "several kinds of input": multimodal.ENTRIES,
    "audio": audio.ENTRIES,
    "series": series.ENTRIES,
    "plain PyTorch": plain.ENTRIES,
}

#: Every model by its name.
MODELS: dict[str, Entry] = {entry.name: entry for family in FAMILIES.values() for entry in family}

#: One of each kind, for the quick run.
QUICK = ("gru", "recommender", "own-function")

#: Those whose every plan is checked, by family; the rest are traced for `docs/models.md`.
CHECKED = (
    *QUICK,
    *("gpt2", "gpt-neo", "gpt-j", "gpt-neox", "codegen", "opt", "bloom", "falcon", "mpt", "llama"),
    *("mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "stablelm", "olmo2", "granite"),
    *("cohere", "starcoder2", "smollm3", "glm", "nemotron", "mamba", "bitnet"),
    *("mixtral", "mixtral-batched", "qwen2-moe", "olmoe", "granitemoe", "gpt-oss"),
    *("bert", "roberta", "distilbert", "deberta-v2", "albert", "electra", "modernbert", "mpnet"),
    *("fnet", "longformer", "t5", "bart", "pegasus", "marian", "mbart", "whisper"),
    *("vit", "deit", "swin", "convnext", "segformer", "resnet", "mobilenet-v2", "beit", "dinov2"),
    *("detr", "clip", "siglip", "blip", "wav2vec2", "wav2vec2-ctc", "hubert"),
    *("lstm-bidirectional", "u-net", "gan", "vae", "graph-network", "nn-transformer"),
    *("convolutions", "mixed-operators"),
)


def build_entry(entry: Entry, mode: str, seed: int = 0) -> tuple[nn.Module, dict[str, object]]:
    """A model of the zoo in a mode ("train" or "eval"), with an example call.

    Weights and inputs are in double precision where the model can run so.
    """
    torch.manual_seed(seed)
    model = entry.make()
    call = entry.call(model)
    if entry.double:
        model = model.double()
        call = {
            k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in call.items()
        }
    return model.train(mode == "train"), call


__all__ = ["CHECKED", "FAMILIES", "MODELS", "QUICK", "Entry", "build_entry"]
