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
TRAIN = False


def build():
    return UNet()


def inputs():
    import torch

    return (torch.randn(1, 3, 16, 16),)
