"""Close what reads from files once, whoever asks and how often."""

from __future__ import annotations

from typing import Self, final

from gigagrad.errors import ImageError


class Closing:
    """Base of what is opened, read and closed: an image, a bag. `name` is how messages call it."""

    name: str
    _closed = False

    def _require_open(self) -> None:
        if self._closed:
            raise ImageError(f"{self.name} is closed; open it again to read from it")

    @final
    def close(self) -> None:
        """Release files and caches. Closing twice is fine; reading afterwards is an `ImageError`."""
        if not self._closed:
            self._closed = True
            self._release()

    def _release(self) -> None:
        """Give back what the reader holds; called once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
