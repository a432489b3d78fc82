"""The founding experiment's network: a segmentation U-Net small enough to train on a whole gigapixel slide.

Remedios et al., MIDL 2023: 7 convolutional layers, exactly 4,492 parameters, few large kernels with large strides first
(no pooling), skips by addition. The layer sizes were not published; those below fit every number that was.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gigagrad.errors import ImageError

WIDTH = 3
SMALLEST_SIDE_PX = 159
"""The shortest image side whose stride-160 field still has one element."""


class PaperUNet(nn.Module):
    """`(N, 1, H, W)` intensities in 0..1 -> `(N, 1, H, W)` logits, for any `H, W >= 159` px.

    Three strided convolutions (15 stride 8, 9 stride 5, 4 stride 4) reach stride 160, where an element has seen 199 px;
    three transposed ones mirror them, with the encoder's field added at strides 40 and 8. A 3 x 3 head finishes at full
    resolution. Biases are on, ReLU follows every layer but the head:
    `678 + 732 + 147 + 147 + 732 + 2028 + 28 = 4492` parameters.

    A transposed convolution can produce exactly those sizes that its mirror image maps to one coarse size (kernel 15,
    stride 8, padding 4: 8m - 1 ... 8m + 6 px for m elements; 9, 5, 2: 5m ... 5m + 4; 4, 4, 0: 4m ... 4m + 3), so asking
    for the encoder's own size with `output_size=` makes every image size legal without padding or cropping.

    Raises `ImageError` for an image with a side below 159 px.
    """

    def __init__(self) -> None:
        super().__init__()
        self.down8 = nn.Conv2d(1, WIDTH, 15, stride=8, padding=4)
        self.down40 = nn.Conv2d(WIDTH, WIDTH, 9, stride=5, padding=2)
        self.down160 = nn.Conv2d(WIDTH, WIDTH, 4, stride=4)
        self.up40 = nn.ConvTranspose2d(WIDTH, WIDTH, 4, stride=4)
        self.up8 = nn.ConvTranspose2d(WIDTH, WIDTH, 9, stride=5, padding=2)
        self.up1 = nn.ConvTranspose2d(WIDTH, WIDTH, 15, stride=8, padding=4)
        self.head = nn.Conv2d(WIDTH, 1, 3, padding=1)

    def forward(self, x_N1HW: Tensor) -> Tensor:
        height, width = x_N1HW.shape[-2:]
        if min(height, width) < SMALLEST_SIDE_PX:
            raise ImageError(
                f"got an image of {height} x {width} px; paper-unet needs {SMALLEST_SIDE_PX} px or more on both sides; "
                "choose a larger image or a finer pyramid level"
            )
        at8 = torch.relu(self.down8(x_N1HW))
        at40 = torch.relu(self.down40(at8))
        at160 = torch.relu(self.down160(at40))
        up40 = torch.relu(self.up40(at160, output_size=at40.shape[-2:]) + at40)
        up8 = torch.relu(self.up8(up40, output_size=at8.shape[-2:]) + at8)
        up1 = torch.relu(self.up1(up8, output_size=(height, width)))
        logits: Tensor = self.head(up1)
        return logits
