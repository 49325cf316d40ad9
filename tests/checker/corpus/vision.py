"""Vision models: images spliced into a text, convolutions, U-Nets."""

import torch
import torch.nn.functional as F
from torch import nn
from seeded import case


# case: fault_splice_boolean_setitem
"""A vision-language model that writes image features over the placeholders' embeddings.

The tower lies on cuda:1, the embeddings on cuda:0: `embeds[mask] = features` is an `index_put_`
whose values are on another card than the tensor that it writes into.
"""


IMAGE_TOKEN = 31


class VisionLanguage(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(32, width)
        self.visual = nn.Sequential(nn.Linear(48, width), nn.GELU(), nn.Linear(width, width))
        self.decoder = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.lm_head = nn.Linear(width, 32, bias=False)

    def forward(self, input_ids, patches):
        embeds = self.embed_tokens(input_ids)
        features = self.visual(patches)
        mask = input_ids == IMAGE_TOKEN
        embeds = embeds.clone()
        embeds[mask] = features.to(embeds.dtype)  # fault: in-place
        return self.lm_head(self.decoder(embeds))


PLACEMENT = {"embed_tokens": 0, "visual": 1, "decoder": 1, "lm_head": 1}
build = VisionLanguage


def inputs():
    ids = torch.tensor([[1, 31, 31, 4, 5, 31]])
    return {"input_ids": ids, "patches": torch.randn(3, 48)}


# case: fault_splice_masked_scatter
"""A vision-language model that splices with `masked_scatter`.

The features come from a tower on cuda:1; embeddings and mask are on cuda:0. The tower runs last
before the splice, yet it is the embeddings that are written into.
"""


class PatchTower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.norm = nn.LayerNorm(width)
        self.merge = nn.Linear(width, width)

    def forward(self, pixels):
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        return self.merge(self.norm(x)).flatten(0, 1)


class Spliced(nn.Module):
    image_token_id = 7

    def __init__(self, width=16):
        super().__init__()
        self.visual = PatchTower(width)
        self.embed = nn.Embedding(40, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 40)

    def merge(self, input_ids, embeds, features):
        mask = (input_ids == self.image_token_id).unsqueeze(-1).expand_as(embeds)
        return embeds.masked_scatter(mask, features)  # fault: mixed-devices

    def forward(self, input_ids, pixel_values):
        embeds = self.embed(input_ids)
        h = self.merge(input_ids, embeds, self.visual(pixel_values))
        for layer in self.layers:
            h = layer(h).relu()
        return self.head(h)


PLACEMENT = {"embed": "cuda:0", "visual": "cuda:1", "layers.0": 0, "layers.1": 1, "head": 1}
build = Spliced


def inputs():
    ids = torch.tensor([[7, 7, 7, 7, 1, 2]])
    return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 8, 8)}


# case: fault_unet_skip_add
"""A small U-Net whose skip connections are added.

The up path lies on cuda:1, the skips come from cuda:0; the addition itself belongs to no placed
module, so CUDA is asked to add tensors of two cards.
"""

from torch import Tensor, nn


class UNet(nn.Module):
    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Conv2d(width, width, 3, stride=2, padding=1) for _ in range(depth)
        )
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.ModuleList(nn.ConvTranspose2d(width, width, 2, 2) for _ in range(depth))
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.stem(pixels)
        skips = []
        for layer in self.down:
            skips.append(x)
            x = layer(x).relu()
        x = self.middle(x)
        for layer in self.up:
            x = layer(x) + skips.pop()  # fault: mixed-devices
        return self.out(x)


PLACEMENT = {"stem": "cuda:0", "down": "cuda:0", "middle": "cuda:1", "up": "cuda:1", "out": 1}
build = UNet


def inputs():
    import torch

    return (torch.randn(1, 3, 16, 16),)


# case: fault_unet_skip_cat
"""A U-Net that concatenates its skips with the upsampled features.

`torch.cat` gets one tensor of cuda:1 (out of the upsampling) and one of cuda:0 (the skip).
"""


def double_conv(inside, outside):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1),
        nn.GroupNorm(2, outside),
        nn.SiLU(),
        nn.Conv2d(outside, outside, 3, padding=1),
    )


class CatUNet(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.enc1 = double_conv(1, width)
        self.enc2 = double_conv(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.dec = double_conv(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, image):
        first = self.enc1(image)
        second = self.enc2(F.max_pool2d(first, 2))
        upper = self.up(second)
        merged = torch.cat([first, upper], dim=1)  # fault: mixed-devices
        return self.head(self.dec(merged))


case(CatUNet, {"enc1": 0, "enc2": 0, "up": 1, "dec": 1, "head": 1}, {"image": (2, 1, 8, 8)})


# case: fault_blur_kernel
"""An anti-aliasing filter kept as a plain tensor and given to `conv2d`.

The convolution's weight stays on the CPU.
"""


class BlurPool(nn.Module):
    def __init__(self, channels):
        super().__init__()
        row = torch.tensor([1.0, 2.0, 1.0])
        self.kernel = (row[:, None] * row[None, :] / 16).expand(channels, 1, 3, 3)

    def forward(self, x):
        groups = x.shape[1]
        return F.conv2d(x, self.kernel, None, 2, 1, 1, groups)  # fault: mixed-devices


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.pool = BlurPool(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return self.pool(self.conv2(self.pool(self.conv1(x)).relu()))


case(Net, {"conv1": "cuda:0", "conv2": "cuda:1"}, [(1, 3, 8, 8)])


# case: fault_tensor_channel_stats
"""Images are normalised with `torch.tensor([...])` constants inside forward.

Both constants are CPU vectors: the subtraction fails, and the division after it on its own.
"""


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Linear(6, 3)

    def scaled(self, pixels):
        mean = torch.tensor([0.48, 0.45, 0.40]).view(1, 3, 1, 1)
        deviation = torch.tensor([0.22, 0.22, 0.22]).view(1, 3, 1, 1)
        pixels = pixels - mean  # fault: mixed-devices
        return pixels / deviation  # fault: mixed-devices

    def forward(self, pixels):
        return self.classifier(self.features(self.scaled(pixels)).flatten(1))


case(Normalised, {"features": 0, "classifier": 1}, lambda: (torch.rand(2, 3, 8, 8),))


# case: fault_table_list
"""Per-level anchors kept in a Python list of tensors, as detectors do.

The list isn't part of the module's state: its tensors stay on the CPU while the heads' outputs are
on GPUs.
"""


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.ModuleList(nn.Conv2d(3 if i == 0 else 6, 6, 3, 2, 1) for i in range(2))
        self.heads = nn.ModuleList(nn.Conv2d(6, 4, 1) for _ in range(2))
        self.anchors = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])]

    def decode(self, raw, level):
        boxes = raw.flatten(2).transpose(1, 2)
        size = boxes[..., 2:].exp() * self.anchors[level]  # fault: mixed-devices
        return torch.cat((boxes[..., :2], size), dim=-1)

    def forward(self, image):
        found = []
        for level, (stage, head) in enumerate(zip(self.backbone, self.heads, strict=True)):
            image = stage(image).relu()
            found.append(self.decode(head(image), level))
        return found


case(Detector, {"backbone": "cuda:0", "heads.0": "cuda:0", "heads.1": "cuda:1"}, [(1, 3, 8, 8)])


# case: clean_splice_moved
"""Image features go to the embeddings before they are spliced in, in two ways."""


class VisionLanguage(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.visual = nn.Linear(12, width)
        self.embed = nn.Embedding(16, width)
        self.decoder = nn.Linear(width, width)

    def forward(self, input_ids, patches):
        features = self.visual(patches)
        embeds = self.embed(input_ids)
        mask = (input_ids == 7).to(embeds.device)
        features = features.to(embeds.device, embeds.dtype)
        spliced = embeds.masked_scatter(mask.unsqueeze(-1).expand_as(embeds), features)
        again = embeds.clone()
        again[mask] = features
        return self.decoder(spliced + again)


case(
    VisionLanguage,
    {"embed": 0, "visual": 1, "decoder": 1},
    lambda: {"input_ids": torch.tensor([[7, 7, 1, 2]]), "patches": torch.randn(2, 12)},
)


# case: clean_unet_moved
"""A U-Net whose skips follow the upsampled features."""


class UNet(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.enc = nn.Conv2d(1, width, 3, 2, 1)
        self.mid = nn.Conv2d(width, width, 3, padding=1)
        self.dec = nn.Conv2d(2 * width, width, 3, padding=1)
        self.out = nn.ConvTranspose2d(width, 1, 2, 2)

    def forward(self, x):
        skip = self.enc(x).relu()
        h = self.mid(skip)
        h = self.dec(torch.cat((h, skip.to(h.device)), 1))
        h = h + nn.functional.interpolate(skip, size=h.shape[-2:]).to(h)
        return self.out(h)


case(UNet, {"enc": "cuda:0", "mid": "cuda:1", "dec": "cuda:1", "out": "cuda:1"}, [(1, 1, 8, 8)])


# case: clean_convolutions
"""A ResNet with batch norm in training mode: buffers are updated where they are."""


class Residual(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Conv2d(inside, outside, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = Residual(3, 4, 1)
        self.layer2 = Residual(4, 8, 2)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        x = self.layer2(self.layer1(x))
        return nn.functional.log_softmax(self.fc(x.mean((2, 3))), -1)[:, 0].mean()


case(ResNet, {"layer1": "cuda:0", "layer2": "cuda:1", "fc": "cuda:1"}, [(2, 3, 8, 8)], train=True)
