"""Networks that keep fields, and a loss that is not a mean over pixels."""

from torch import nn


class Net(nn.Module):
    """Norms, a skip and a stride: fields of several sizes are kept."""

    def __init__(self):
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.up, self.head = nn.ConvTranspose2d(12, 8, 2, stride=2), nn.Conv2d(8, 1, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(12), nn.GroupNorm(2, 8)])

    def forward(self, x):
        x = self.norms[0](self.stem(x)).relu()
        return self.head(self.norms[2](self.up(self.norms[1](self.down(x)).relu())) + x)


def dice(output, target):
    p = output.sigmoid()
    return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)


class Residual(nn.Module):
    """A stem, so many blocks with a norm before each sum, a head."""

    def __init__(self, blocks):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 1, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1))
            for _ in range(blocks)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(blocks))

    def forward(self, x):
        x = self.stem(x)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = (x + norm(block(x))).relu()
        return self.head(x)
