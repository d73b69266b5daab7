"""Small PyTorch models of many kinds: modules with random weights, and what they are called with.

Those of transformers are made from their configuration classes; the others are written here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class Example(NamedTuple):
    """A model of the zoo."""

    module: nn.Module
    inputs: dict[str, Any]
    """Keywords of its forward."""
    loss: Callable[[Any], torch.Tensor] | None = None
    """Makes the loss from the outputs; None where they hold it."""


Maker = Callable[[], Example]

_WORDS = 120


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, _WORDS, shape)


# --- transformers --------------------------------------------------------------------------------


def _text(config: str, model: str, labels: bool = True, **settings: Any) -> Maker:
    def make() -> Example:
        import transformers

        made = getattr(transformers, config)(vocab_size=_WORDS, pad_token_id=0, bos_token_id=1,
                                             eos_token_id=2, **settings)  # fmt: skip
        module = getattr(transformers, model)(made)
        if getattr(module.config, "use_cache", False):
            module.config.use_cache = False
        ids = _ids(2, 12)
        inputs: dict[str, Any] = {"input_ids": ids}
        if labels:
            inputs["labels"] = ids
        return Example(module, inputs, None if labels else _mean_of_first)

    return make


def _image(config: str, model: str, labels: bool = True, size: int = 32, **settings: Any) -> Maker:
    def make() -> Example:
        import transformers

        made = getattr(transformers, config)(**settings)
        module = getattr(transformers, model)(made)
        inputs: dict[str, Any] = {"pixel_values": torch.randn(2, 3, size, size)}
        if labels:
            inputs["labels"] = torch.tensor([0, 1])
        return Example(module, inputs, None if labels else _mean_of_first)

    return make


def _mean_of_first(outputs: Any) -> torch.Tensor:
    first = next(iter(outputs.values())) if isinstance(outputs, dict) else outputs
    first = first[0] if isinstance(first, tuple | list) else first
    loss: torch.Tensor = first.float().square().mean()
    return loss


def _seq2seq(config: str, model: str, **settings: Any) -> Maker:
    def make() -> Example:
        import transformers

        made = getattr(transformers, config)(vocab_size=_WORDS, pad_token_id=0,
                                             decoder_start_token_id=0, **settings)  # fmt: skip
        module = getattr(transformers, model)(made)
        module.config.use_cache = False
        inputs = {"input_ids": _ids(2, 10), "labels": _ids(2, 8), "use_cache": False}
        return Example(module, inputs)

    return make


def _clip() -> Example:
    import transformers

    text = {"vocab_size": _WORDS, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 16,
            "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "image_size": 32, "patch_size": 8}  # fmt: skip
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    inputs = {"input_ids": _ids(2, 8), "pixel_values": torch.randn(2, 3, 32, 32),
              "return_loss": True}  # fmt: skip
    return Example(transformers.CLIPModel(config), inputs)


def _whisper() -> Example:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=_WORDS, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=20, max_target_positions=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False,
    )  # fmt: skip
    module = transformers.WhisperForConditionalGeneration(config)
    return Example(module, {"input_features": torch.randn(2, 16, 40), "labels": _ids(2, 8)})


def _wav2vec2() -> Example:
    import transformers

    config = transformers.Wav2Vec2Config(
        vocab_size=_WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, conv_dim=(16, 16), conv_stride=(4, 4), conv_kernel=(8, 4),
        num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
        layerdrop=0.0, mask_time_prob=0.0, apply_spec_augment=False,
    )  # fmt: skip
    module = transformers.Wav2Vec2ForCTC(config)
    return Example(module, {"input_values": torch.randn(2, 400)}, _mean_of_first)


def _segformer() -> Example:
    import transformers

    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 16, 32], decoder_hidden_size=16,
        num_attention_heads=[1, 2, 2, 4], num_labels=4,
    )  # fmt: skip
    module = transformers.SegformerForSemanticSegmentation(config)
    labels = torch.randint(0, 4, (2, 64, 64))
    return Example(module, {"pixel_values": torch.randn(2, 3, 64, 64), "labels": labels})


_ENCODER: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 64, "max_position_embeddings": 32}  # fmt: skip
_DECODER: dict[str, Any] = {**_ENCODER, "num_key_value_heads": 2}
_GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
_BART: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
}  # fmt: skip
_VISION: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
           "intermediate_size": 64, "image_size": 32, "patch_size": 8}  # fmt: skip

TRANSFORMERS: dict[str, Maker] = {
    "bert": _text("BertConfig", "BertForMaskedLM", **_ENCODER),
    "roberta": _text("RobertaConfig", "RobertaForMaskedLM", **_ENCODER),
    "distilbert": _text("DistilBertConfig", "DistilBertForMaskedLM", dim=32, n_layers=2,
                        n_heads=4, hidden_dim=64, max_position_embeddings=32),
    "albert": _text("AlbertConfig", "AlbertForMaskedLM", embedding_size=16, **_ENCODER),
    "electra": _text("ElectraConfig", "ElectraForMaskedLM", embedding_size=16, **_ENCODER),
    "deberta-v2": _text("DebertaV2Config", "DebertaV2ForMaskedLM", relative_attention=True,
                        pos_att_type=["p2c", "c2p"], **_ENCODER),
    "gpt2": _text("GPT2Config", "GPT2LMHeadModel", **_GPT),
    "gpt-neo": _text("GPTNeoConfig", "GPTNeoForCausalLM", hidden_size=32, num_layers=2,
                     num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8,
                     max_position_embeddings=32),
    "gpt-j": _text("GPTJConfig", "GPTJForCausalLM", rotary_dim=4, **_GPT),
    "gpt-neox": _text("GPTNeoXConfig", "GPTNeoXForCausalLM", **_ENCODER),
    "opt": _text("OPTConfig", "OPTForCausalLM", hidden_size=32, num_hidden_layers=2, ffn_dim=64,
                 num_attention_heads=4, max_position_embeddings=32, word_embed_proj_dim=32),
    "bloom": _text("BloomConfig", "BloomForCausalLM", hidden_size=32, n_layer=2, n_head=4),
    "falcon": _text("FalconConfig", "FalconForCausalLM", hidden_size=32, num_hidden_layers=2,
                    num_attention_heads=4),
    "llama": _text("LlamaConfig", "LlamaForCausalLM", **_DECODER),
    "mistral": _text("MistralConfig", "MistralForCausalLM", **_DECODER),
    "mixtral": _text("MixtralConfig", "MixtralForCausalLM", num_local_experts=4, **_DECODER),
    "qwen2": _text("Qwen2Config", "Qwen2ForCausalLM", **_DECODER),
    "gemma": _text("GemmaConfig", "GemmaForCausalLM", head_dim=8, **_DECODER),
    "phi": _text("PhiConfig", "PhiForCausalLM", **_DECODER),
    "mamba": _text("MambaConfig", "MambaForCausalLM", hidden_size=32, num_hidden_layers=2,
                   state_size=4, use_cache=False),
    "xlnet": _text("XLNetConfig", "XLNetLMHeadModel", d_model=32, n_layer=2, n_head=4, d_inner=64),
    "t5": _seq2seq("T5Config", "T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=64,
                   num_layers=2, num_heads=4),
    "bart": _seq2seq("BartConfig", "BartForConditionalGeneration", **_BART),
    "marian": _seq2seq("MarianConfig", "MarianMTModel", **_BART),
    "pegasus": _seq2seq("PegasusConfig", "PegasusForConditionalGeneration", **_BART),
    "vit": _image("ViTConfig", "ViTForImageClassification", **_VISION),
    "deit": _image("DeiTConfig", "DeiTForImageClassification", **_VISION),
    "beit": _image("BeitConfig", "BeitForImageClassification", **_VISION),
    "swin": _image("SwinConfig", "SwinForImageClassification", image_size=32, patch_size=4,
                   embed_dim=8, depths=[1, 1], num_heads=[2, 4], window_size=4),
    "convnext": _image("ConvNextConfig", "ConvNextForImageClassification",
                       hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1]),
    "resnet-hf": _image("ResNetConfig", "ResNetForImageClassification", embedding_size=8,
                        hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1]),
    "segformer": _segformer,
    "clip": _clip,
    "whisper": _whisper,
    "wav2vec2": _wav2vec2,
}  # fmt: skip


# --- written here --------------------------------------------------------------------------------


class ConvBlock(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class Inception(nn.Module):
    """Four branches, concatenated; twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvBlock(3, 16)
        self.blocks = nn.ModuleList([self._block(16), self._block(32)])
        self.head = nn.Linear(32, 10)

    @staticmethod
    def _block(inputs: int) -> nn.ModuleList:
        return nn.ModuleList(
            [
                ConvBlock(inputs, 8, 1),
                nn.Sequential(ConvBlock(inputs, 8, 1), ConvBlock(8, 8)),
                nn.Sequential(ConvBlock(inputs, 8, 1), ConvBlock(8, 8, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), ConvBlock(inputs, 8, 1)),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for branches in self.blocks:
            x = torch.cat([branch(x) for branch in branches], 1)  # type: ignore[attr-defined]
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = ConvBlock(channels, channels)
        self.two = nn.Sequential(nn.Conv2d(channels, channels, 3, 1, 1), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu_(x + self.two(self.one(x)))


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ConvBlock(3 + 8 * i, 8) for i in range(4)])
        self.head = nn.Linear(35, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([ConvBlock(3, 8), ConvBlock(8, 16), ConvBlock(16, 32)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.merge = nn.ModuleList([ConvBlock(32, 16), ConvBlock(16, 8)])
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for number, layer in enumerate(self.down):
            x = layer(x if number == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for up, merge, skip in zip(self.up, self.merge, kept[-2::-1], strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        out: torch.Tensor = self.out(x)
        return out


class Dlrm(nn.Module):
    """Embedding tables, a dense part, and the products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(50, 8, mode="sum") for _ in range(4)])
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 10, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: torch.Tensor, sparse: list[torch.Tensor]) -> torch.Tensor:
        x = self.bottom(dense)
        vectors = [x, *(table(ids) for table, ids in zip(self.tables, sparse, strict=True))]
        stacked = torch.stack(vectors, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        rows, columns = torch.tril_indices(5, 5, -1)
        out: torch.Tensor = self.top(torch.cat([x, products[:, rows, columns]], 1))
        return torch.sigmoid(out)


class LstmModel(nn.Module):
    """A language model with tied embeddings."""

    def __init__(self, kind: str = "LSTM") -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, 24)
        self.rnn = getattr(nn, kind)(24, 24, num_layers=2, batch_first=True)
        self.out = nn.Linear(24, _WORDS)
        self.out.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h, _ = self.rnn(self.embedding(ids))
        out: torch.Tensor = self.out(h)
        return out


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, 16)
        self.encoder = nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(16 + 32, 32)
        self.out = nn.Linear(32, _WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, _ = self.encoder(self.embedding(source))
        state = memory[:, -1]
        outputs = []
        for step in range(target.shape[1]):
            scores = torch.einsum("bsd,bd->bs", memory, state).softmax(-1)
            context = torch.einsum("bs,bsd->bd", scores, memory)
            state = self.cell(torch.cat([self.embedding(target[:, step]), context], -1), state)
            outputs.append(self.out(state))
        return torch.stack(outputs, 1)


class Detector(nn.Module):
    """A pyramid of features, and heads for classes and boxes that all levels share."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([ConvBlock(3, 8, stride=2), ConvBlock(8, 16, stride=2),
                                     ConvBlock(16, 32, stride=2)])  # fmt: skip
        self.lateral = nn.ModuleList([nn.Conv2d(c, 16, 1) for c in (8, 16, 32)])
        self.classes = nn.Conv2d(16, 3 * 4, 3, padding=1)
        self.boxes = nn.Conv2d(16, 3 * 4, 3, padding=1)
        self.register_buffer("anchors", torch.rand(3, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        levels = [conv(f) for conv, f in zip(self.lateral, features, strict=True)]
        for i in (1, 0):
            levels[i] = levels[i] + F.interpolate(levels[i + 1], scale_factor=2.0)
        anchors: torch.Tensor = self.anchors  # type: ignore[assignment]
        classes = [self.classes(f).flatten(2).transpose(1, 2).reshape(x.shape[0], -1, 4)
                   for f in levels]  # fmt: skip
        boxes = [self.boxes(f).flatten(2).transpose(1, 2).reshape(x.shape[0], -1, 3, 4) + anchors
                 for f in levels]  # fmt: skip
        return {
            "classes": torch.cat(classes, 1),
            "boxes": torch.cat([b.flatten(1, 2) for b in boxes], 1),
        }


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.tokens = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.channels = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        for tokens, channels in zip(self.tokens, self.channels, strict=True):
            h = h + F.gelu(tokens(self.norm(h).transpose(1, 2))).transpose(1, 2)
            h = h + F.gelu(channels(self.norm(h)))
        out: torch.Tensor = self.head(h.mean(1))
        return out


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, 16, 1)
        self.filters = nn.ModuleList([nn.Conv1d(16, 32, 2, dilation=2**i) for i in range(4)])
        self.out = nn.Conv1d(16, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.start(x)
        total = torch.zeros_like(h)
        for number, layer in enumerate(self.filters):
            a, b = layer(F.pad(h, (2**number, 0))).chunk(2, 1)
            z = torch.tanh(a) * torch.sigmoid(b)
            total += z
            h = h + z
        out: torch.Tensor = self.out(F.relu(total))
        return out


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log).exp()
        recon = self.decoder(z)
        kl = -0.5 * (1 + log - mean.square() - log.exp()).sum(-1).mean()
        return F.mse_loss(recon, x) + kl, recon


class Experts(nn.Module):
    """A mixture of experts, all computed and weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)) for _ in range(4)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        outs = torch.stack([expert(x) for expert in self.experts], -1)
        mixed: torch.Tensor = (outs * weights.unsqueeze(-2)).sum(-1)
        return mixed


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            messages = torch.zeros_like(x).index_add(0, edges[1], layer(x)[edges[0]])
            x = F.relu(x + messages)
        return x


class EarlyExit(nn.Module):
    """Stops where it is sure: the values decide what is computed, so that it has no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
            if x.mean() > 10:
                break
        out: torch.Tensor = self.head(x)
        return out


def _pixels(module: nn.Module, size: int = 32) -> Example:
    return Example(module, {"x": torch.randn(2, 3, size, size)}, _mean_of_first)


def _named(module: nn.Module, **inputs: Any) -> Example:
    return Example(module, inputs, _mean_of_first)


class Classifier(nn.Module):
    def __init__(self, body: nn.Module, features: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(features, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x).mean((2, 3)))
        return out


def _depthwise() -> nn.Module:
    layers: list[nn.Module] = [ConvBlock(3, 8)]
    for _ in range(3):
        layers += [nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Hardswish(), ConvBlock(8, 8, 1)]
    return Classifier(nn.Sequential(*layers), 8)


OURS: dict[str, Maker] = {
    "mlp": lambda: _named(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1),
                                        nn.Linear(32, 4)), input=torch.randn(4, 8)),
    "inception": lambda: _pixels(Inception()),
    "resnet": lambda: _pixels(Classifier(nn.Sequential(ConvBlock(3, 8), Residual(8),
                                                       Residual(8)), 8)),
    "densenet": lambda: _pixels(DenseNet()),
    "depthwise": lambda: _pixels(_depthwise()),
    "unet": lambda: _pixels(UNet()),
    "dlrm": lambda: _named(Dlrm(), dense=torch.randn(4, 6),
                           sparse=[torch.randint(0, 50, (4, 3)) for _ in range(4)]),
    "lstm": lambda: _named(LstmModel(), ids=_ids(2, 7)),
    "gru": lambda: _named(LstmModel("GRU"), ids=_ids(2, 7)),
    "seq2seq": lambda: _named(Seq2Seq(), source=_ids(2, 6), target=_ids(2, 5)),
    "detector": lambda: _pixels(Detector()),
    "mixer": lambda: _pixels(Mixer()),
    "wavenet": lambda: _named(WaveNet(), x=torch.randn(2, 1, 32)),
    "transformer": lambda: _named(nn.Transformer(16, 4, 2, 2, 32, batch_first=True),
                                  src=torch.randn(2, 6, 16), tgt=torch.randn(2, 5, 16)),
    "vae": lambda: Example(Vae(), {"x": torch.randn(4, 64)}),
    "experts": lambda: _named(Experts(), x=torch.randn(4, 16)),
    "graph-net": lambda: _named(GraphNet(), x=torch.randn(10, 8),
                                edges=torch.randint(0, 10, (2, 30))),
    "early-exit": lambda: _named(EarlyExit(), x=torch.randn(4, 16)),
}  # fmt: skip
