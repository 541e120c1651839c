"""Small models of many makes, each with a batch and, where its output is not a loss, a step."""

from itertools import pairwise

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from support.blocks import square


def token_batch(length=32, *, rows=4, vocabulary=128, device=None):
    """Random tokens as the input and the labels of a language model."""
    ids = tokens(vocabulary, rows, length).to(device)
    return {"input_ids": ids, "labels": ids}


def own_loss(model, batch):
    """A step: the loss that a model of Transformers returns."""
    return model(**batch).loss


def tokens(vocabulary=128, rows=4, length=32):
    return torch.randint(0, vocabulary, (rows, length))


def _language(config_class, model_class, **config):
    model = model_class(config_class(**config))
    return model, token_batch(), None


def gpt2():
    sizes = {"n_layer": 5, "n_embd": 48, "n_head": 4, "n_positions": 32}
    return _language(hf.GPT2Config, hf.GPT2LMHeadModel, vocab_size=128, bos_token_id=0, eos_token_id=0, **sizes)


def small_gpt2(**settings):
    """GPT-2 of width 16 with 3 layers, seeded and in training mode; `settings` go to its configuration."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**{**sizes, "bos_token_id": 0, "eos_token_id": 0, **settings})).train()


def small_llama(**settings):
    """Llama of width 16 with 3 layers, seeded and in training mode; `settings` go to its configuration."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**sizes, **heads, **settings})).train()


def small_bert(**settings):
    """BERT of width 16 with 3 layers, seeded and in training mode."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    return hf.BertForMaskedLM(hf.BertConfig(**{**sizes, **settings})).train()


def small_mistral(**settings):
    """Mistral of width 16 with 3 layers and a sliding window of 6, seeded and in training mode."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "sliding_window": 6}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return hf.MistralForCausalLM(hf.MistralConfig(**{**sizes, **heads, **settings})).train()


def small_t5(**settings):
    """T5 of width 16 with 2 layers on each side, seeded and in training mode."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(**{**sizes, "decoder_start_token_id": 0, **settings})).train()


_DECODER = {"vocab_size": 128, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 5}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama():
    return _language(hf.LlamaConfig, hf.LlamaForCausalLM, **_DECODER, **_HEADS)


def mixtral():
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return _language(hf.MixtralConfig, hf.MixtralForCausalLM, **_DECODER, **_HEADS, **experts)


def bert():
    config = hf.BertConfig(**_DECODER, num_attention_heads=4, max_position_embeddings=32)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[:, -5:] = 0
    return hf.BertForMaskedLM(config), {"input_ids": ids, "attention_mask": mask, "labels": ids}, None


def t5():
    config = hf.T5Config(
        vocab_size=128,
        d_model=48,
        d_kv=12,
        d_ff=96,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config), {"input_ids": tokens(), "labels": tokens(length=24)}, None


def vit():
    config = hf.ViTConfig(
        hidden_size=48, num_hidden_layers=5, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8
    )
    batch = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 2, (4,))}
    return hf.ViTForImageClassification(config), batch, None


class Bottleneck(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.convolve = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        same = inside == outside and stride == 1
        self.shortcut = None if same else nn.Sequential(nn.Conv2d(inside, outside, 1, stride), nn.BatchNorm2d(outside))

    def forward(self, x):
        return F.relu(self.convolve(x) + (x if self.shortcut is None else self.shortcut(x)), inplace=True)


class ResNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(*[Bottleneck(width, width, 1) for _ in range(3)])
        self.layer2 = nn.Sequential(
            Bottleneck(width, 2 * width, 2), *[Bottleneck(2 * width, 2 * width, 1) for _ in range(2)]
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images):
        return self.head(self.layer2(self.layer1(self.stem(images))).mean((2, 3)))


def classify(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def resnet():
    return ResNet(), (torch.randn(4, 3, 24, 24), torch.randint(0, 10, (4,))), classify


class DoubleConvolution(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1),
            nn.GroupNorm(2, outside),
            nn.SiLU(),
            nn.Conv2d(outside, outside, 3, padding=1),
            nn.SiLU(),
        )

    def forward(self, x):
        return self.layers(x)


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down1, self.down2 = DoubleConvolution(3, width), DoubleConvolution(width, 2 * width)
        self.middle = DoubleConvolution(2 * width, 2 * width)
        self.up2, self.up1 = DoubleConvolution(4 * width, width), DoubleConvolution(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        middle = self.middle(F.max_pool2d(second, 2))
        x = self.up2(torch.cat([F.interpolate(middle, scale_factor=2), second], 1))
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2), first], 1))
        return self.out(x)


def unet():
    return UNet(), torch.randn(2, 3, 32, 32), square


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(32, 4, 3, 3, 64, batch_first=True)

    def forward(self, source, target):
        return self.transformer(source, target).square().mean()


def transformer():
    return Translator(), (torch.randn(4, 20, 32), torch.randn(4, 16, 32)), None


class RecurrentStack(nn.Module):
    def __init__(self, layers=4, width=32):
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x, _ = layer(x)
        return x.square().mean()


def lstm():
    return RecurrentStack(), torch.randn(4, 24, 32), None


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank part beside it."""

    def __init__(self, linear, rank=2):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


def lora():
    model, batch, step = llama()
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
    return model, batch, step


class Widening(nn.Module):
    """Blocks of different sizes."""

    def __init__(self, widths=(16, 32, 64, 96, 48, 16)):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(a, 4 * b), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * b, b), nn.LayerNorm(b))
            for a, b in pairwise(widths)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def widening():
    return Widening(), torch.randn(64, 16), None


MODELS = (gpt2, llama, mixtral, bert, t5, vit, resnet, unet, transformer, lstm, lora, widening)


def make(name, seed=0):
    torch.manual_seed(seed)
    model, batch, step = {maker.__name__: maker for maker in MODELS}[name]()
    return model.train(), batch, step
