"""Which class is which number in a mask: a table from names, or from the values in mask files, to class ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gigagrad.errors import ConfigError, did_you_mean
from gigagrad.images.layout import MaskClass

IGNORED = 255
"""The class id of pixels that no loss and no score looks at."""
UNCLASSIFIED = "Unclassified"
"""The class of outlines that were given none."""
UNLABELLED = "unlabelled"
"""The name, in a table, of what no outline covers."""
_IGNORE = "ignore"
_BACKGROUND = "background"
"""In any case, the name of what has the id 0, unless somebody gives it another."""
_REGION = "Region*"
"""QuPath's class of areas in which something is to be looked for: no class of pixels."""
_IGNORED_BY_QUPATH = "*"
"""The end of names of QuPath's classes that are not to be learnt or measured: Ignore*, Artefact*."""
_PALETTE = ((0, 200, 255), (213, 94, 0), (0, 158, 115), (204, 121, 167), (0, 114, 178), (230, 159, 0), (240, 228, 66))
"""After a cyan that stands out on pink and purple, colours of Okabe and Ito (2008), told apart by colour-blind eyes."""


@dataclass(frozen=True, slots=True)
class ClassTable:
    """Class ids by name, in the order they were given, and the id of `unlabelled` pixels.

    A name that is a number stands for that value in mask files. Ids are 0 (background) to 254, or `IGNORED`.

    Where classes are `regions`, which may overlap, they count from 1 in their order, and `regions` has the ids of each
    in mask files, of which the first stands for it in a label map (nnU-Net's region-based training).
    """

    ids: tuple[tuple[str, int], ...]
    unlabelled: int = IGNORED
    regions: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def parse(cls, entries: Sequence[str]) -> Self:
        """Make a table of entries `NAME=ID`, where ID may be `ignore`; an entry without an id has the next free one,
        from 1, but `Background` has 0, and a name that ends in an asterisk is ignored, as in QuPath.

        `unlabelled=0` makes background of what is not annotated; without it, it is ignored, unless there is but one
        class. A class of several ids, `NAME=1+2`, makes regions of all. Raises `ConfigError` for an id that is none and
        for a name that is given twice.
        """
        found: dict[str, tuple[int, ...]] = {}
        following = 1
        for entry in entries:
            name, equals, text = (part.strip() for part in entry.rpartition("="))
            if not equals:
                own = _own_id(text)
                name, text = text, str(following if own is None else own)
                if name.isdecimal():
                    raise ConfigError(f"classes: {name!r} is a number; name each class but the background: tumour=1")
            if not name:
                raise ConfigError(f"classes: {entry!r} names no class; write NAME=ID, for example tumour=1")
            if name in found:
                raise ConfigError(f"classes: {name!r} is given twice")
            found[name] = tuple(_id(part.strip(), entry) for part in text.split("+"))
            following = max(following, *(number + 1 for number in found[name] if number != IGNORED), 0)
        regions = _regions(found)
        ids = {name: numbers[0] for name, numbers in found.items()}
        ids |= {name: number for number, name in enumerate(regions, 1)}
        unlabelled = ids.pop(UNLABELLED, None)
        if not ids:
            raise ConfigError("classes: no class is named; write NAME=ID, for example tumour=1")
        return cls(tuple(ids.items()), _default(ids) if unlabelled is None else unlabelled, tuple(regions.values()))

    @classmethod
    def of_names(cls, names: Iterable[str]) -> Self:
        """Make the table of all names that occur, in alphabetical order from 1; those without a class only if alone.

        `Background` is 0. What QuPath ignores is ignored, and its `Region*` is no class.
        """
        found = set(names)
        named = sorted(name for name in found - {UNCLASSIFIED} if _own_id(name) is None)
        if not named and (UNCLASSIFIED in found or not found):
            named = [UNCLASSIFIED]
        ids = {name: 0 for name in sorted(found) if _own_id(name) == 0}
        ids |= {name: number for number, name in enumerate(named, 1)}
        if not ids:
            raise ConfigError(
                f"annotations are of {', '.join(sorted(found))} alone, which QuPath ignores; annotate what is to be "
                "found, or give a class an id: --classes NAME=ID"
            )
        if len(named) >= IGNORED:
            raise ConfigError(f"annotations of {len(named)} classes; a mask of bytes holds at most {IGNORED - 1}")
        return cls(tuple(ids.items()), _default(ids)).ignoring(found)

    def ignoring(self, names: Iterable[str]) -> Self:
        """Add to this table, and return it with of these names those that QuPath ignores, where it does not name
        them itself.
        """
        known = dict(self.ids)
        further = sorted(name for name in {*names} - {*known, _REGION} if is_ignored(name))
        return replace(self, ids=(*self.ids, *((name, IGNORED) for name in further)))

    def __str__(self) -> str:
        return ", ".join(f"{name} = {text}" for name, text in self._written())

    @property
    def entries(self) -> tuple[str, ...]:
        """Return what `parse` makes this table of."""
        return tuple(f"{name}={text}" for name, text in self._written())

    def _written(self) -> list[tuple[str, str]]:
        held = {number: "+".join(map(str, ids)) for number, ids in enumerate(self.regions, 1)} | {IGNORED: _IGNORE}
        return [(name, held.get(number, str(number))) for name, number in (*self.ids, (UNLABELLED, self.unlabelled))]

    @property
    def values(self) -> dict[int, int]:
        """Return class ids by the values in mask files, of the names that are numbers."""
        return {int(name): number for name, number in self.ids if name.isdecimal()}

    @property
    def ignores(self) -> bool:
        """Return whether masks of this table may hold `IGNORED`."""
        return self.unlabelled == IGNORED or IGNORED in dict(self.ids).values()

    @property
    def count(self) -> int:
        """Count the classes, the background included."""
        return max([0, *(number for _, number in self.ids if number != IGNORED)]) + 1

    @property
    def foreground(self) -> tuple[str, ...]:
        """Return names of the classes 1, 2, ...; of several names for one id the first."""
        names: dict[int, str] = {}
        for name, number in self.ids:
            names.setdefault(number, name)
        return tuple(names.get(number, f"Class {number}") for number in range(1, self.count))

    def check_used(self, found: Iterable[str], where: str) -> None:
        """Raise `ConfigError` for a name that none of the annotations has, which a misspelt one would not."""
        found = set(found)
        for name, _ in self.ids:
            if name not in found and not name.isdecimal():
                known = did_you_mean(name, found) or f"; they have {', '.join(sorted(found)[:20]) or 'none'}"
                raise ConfigError(f"classes: no annotation of {where} is of the class {name!r}{known}")

    def check_any_used(self, found: Iterable[str], where: str) -> None:
        """Raise `ConfigError` where the annotations have none of the names: all of them would be background."""
        found, named = set(found), [name for name, _ in self.ids]
        if found.isdisjoint(named):
            known = did_you_mean(named[0], found) or f"; they have {', '.join(sorted(found)[:20])}"
            raise ConfigError(
                f"classes: no annotation of {where} is of the class{'es' * (len(named) > 1)} "
                f"{', '.join(map(repr, named[:20]))}{known}; name what they have, with 0 for background"
            )

    def check_spelt(self, found: Iterable[str], where: str) -> None:
        """Raise `ConfigError` for annotations of a class that differs from a name by capitals alone."""
        known = {name.casefold(): (name, number) for name, number in self.ids}
        names = {name for name, _ in self.ids}
        for other in sorted(set(found) - names):
            if other.casefold() in known:
                name, number = known[other.casefold()]
                raise ConfigError(
                    f"classes: annotations of {where} are of the class {other!r}, and {name!r} is another one; write "
                    f"{other}={_IGNORE if number == IGNORED else number}, in the place of {name} or beside it"
                )


def _own_id(name: str) -> int | None:
    """Return the id that a name has by itself: the background's, or that of what QuPath ignores; else None."""
    if is_ignored(name):
        return IGNORED
    return 0 if name.casefold() == _BACKGROUND else None


def is_ignored(name: str) -> bool:
    """Return whether QuPath ignores a class of this name."""
    return name.endswith(_IGNORED_BY_QUPATH)


def _id(text: str, entry: str) -> int:
    if text.lower() == _IGNORE:
        return IGNORED
    if not text.isdecimal() or int(text) > IGNORED:
        raise ConfigError(f"classes: {entry!r} has no class id; write NAME=ID with an id from 0 to 254, or ignore")
    return int(text)


def _regions(found: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Find the classes that are regions; none where each has one id."""
    if all(len(numbers) == 1 for numbers in found.values()):
        return {}
    regions = {name: numbers for name, numbers in found.items() if numbers not in ((0,), (IGNORED,))}
    for name, numbers in regions.items():
        if name.isdecimal() or name == UNLABELLED or {0, IGNORED} & set(numbers):
            raise ConfigError(
                f"classes: {name}={'+'.join(map(str, numbers))} beside regions; these have names, and ids from 1 to "
                "254, and other ids can be background or ignored"
            )
    return regions


def _default(ids: dict[str, int]) -> int:
    """Return the id of what is not annotated: where only one thing is, the rest is what it is told from."""
    return 0 if set(ids.values()) - {IGNORED} == {1} else IGNORED


def mask_classes(count: int, names: Sequence[str] = ()) -> tuple[MaskClass, ...]:
    """Make foreground classes 1 to `count`, named `names` or else "Foreground" (one class) or "Class 1", "Class 2", ...

    Raises `ConfigError` when there are names for another number of classes.
    """
    if names and len(names) != count:
        raise ConfigError(
            f"got {len(names)} class names ({', '.join(names)}) for {count} foreground classes; "
            "name every class except the background"
        )
    chosen = names or (["Foreground"] if count == 1 else [f"Class {k}" for k in range(1, count + 1)])
    return tuple(MaskClass(k + 1, name, _PALETTE[k % len(_PALETTE)]) for k, name in enumerate(chosen))


def class_names(count: int, table: ClassTable | None) -> tuple[str, ...]:
    """Name a mask's class ids 0 to `count - 1`: by the table, else "Background" and as `mask_classes` has it."""
    background = next((name for name, number in table.ids if number == 0), "") if table is not None else ""
    known = table.foreground if table is not None else ()
    named = [*known, *(each.name for each in mask_classes(max(count - 1, 1))[len(known) :])]
    if not background:
        background = "Class 0" if any(name.casefold() == "background" for name in known) else "Background"
    return (background, *named[: count - 1])


def as_bytes(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Convert class ids to bytes; values beyond one count as its nearest."""
    return np.asarray(pixels if pixels.dtype == np.uint8 else pixels.clip(0, 255), np.uint8)
