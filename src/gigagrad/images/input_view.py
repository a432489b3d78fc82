"""View slides alike for a whole run, in training, prediction and evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from gigagrad.images.image import Image


@dataclass(frozen=True, slots=True)
class InputView:
    """The bands that are read, by name or counted from 1 as GDAL counts them, none given: all; and whether in grey."""

    grey: bool = False
    bands: tuple[int | str, ...] = ()

    def of(self, slide: Image) -> Image:
        """View `slide` as the network gets to see it, 0 where it has no data. Closing it leaves `slide` open.

        What is missing is missing in all the bands that are read. Raises `ImageError`.
        """
        seen = (slide.bands(self.bands) if self.bands else slide).filled()
        return seen.grey() if self.grey else seen

    def __str__(self) -> str:
        bands = f"bands {', '.join(map(str, self.bands))}" if self.bands else ""
        return ", ".join(filter(None, (bands, "grey, one channel" if self.grey else ""))) or "as stored"


AS_STORED = InputView()
