"""Refuse an sdist without the page of `gigagrad view`: wheels are made of it, and nobody would see what is missing.

A wheel of a checkout (`pip install .`) may lack the page, so that Node.js is not needed to try gigagrad from one.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

PAGE = Path("src/gigagrad/view/page/page.js")


class SdistWithPage(sdist):
    def run(self) -> None:
        if not PAGE.is_file():
            raise SystemExit(f"{PAGE} is missing: build the page of 'gigagrad view' first, with 'make page'")
        super().run()


setup(cmdclass={"sdist": SdistWithPage})
