"""Damage to images for `attack_images.py`: blind, and with knowledge of TIFF, JPEG, PNG and JSON."""

from __future__ import annotations

import json
import random
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.attack_image_bases import HEIGHT, WIDTH, Base, Files, tiff_entries

NUMBERS = (0, 1, 2, 3, 7, 255, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 2, 2**63 - 1, 2**64 - 1, 10**8)
JSON_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 1.5, 1e308, float("nan"), 10**8, 10**12, 10**30, -(10**12), "", "x", "NaN"),
    *("<u2", "|O", ">f8", "|V100000000", "../..", "pickle", "zstd", "blosc", [], [0], [-1, -1], [1, 1, 1, 1], {}),
    *([10**9, 10**9, 10**9], [[1]], {"id": "pickle"}, {"id": "zlib"}, {"name": "zstd"}, [{"id": "pickle"}], "y" * 999),
)
BLIND = ("bit", "byte", "byte", "number", "zero", "ones", "remove", "double", "foreign", "cut", "join")


def damage_field(data: bytearray, rng: random.Random) -> None:
    """Another number in a field of a directory, or in a value that stands elsewhere."""
    entries = tiff_entries(data)
    order = "<" if data[:2] == b"II" else ">"
    if not entries:
        return
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at, _, kind, count, value, big = rng.choice(entries)
        wide = 8 if big else 4
        code = {2: "H", 4: "L", 8: "Q"}
        number = rng.choice((*NUMBERS, value, count, value + 1, count - 1, len(data), rng.randrange(2**32)))
        size = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 16: 8}.get(kind, 4)
        field = rng.choice(("tag", "type", "count", "value", "value", "value", "elsewhere", "short"))
        if field in ("tag", "type"):
            struct.pack_into(
                order + "H", data, at + 2 * (field == "type"), number % 2**16 if rng.random() < 0.5 else 330
            )
        elif field in ("count", "value"):
            place = at + 4 + (wide if field == "value" else 0)
            struct.pack_into(order + code[wide], data, place, number % 2 ** (8 * wide))
        elif field == "short" or count * size <= wide or value + count * size > len(data) or size == 1:
            struct.pack_into(order + "H", data, at + 4 + wide, number % 2**16)
        else:
            place = value + size * rng.randrange(count)
            unit = min(size, 8)
            struct.pack_into(order + code[unit], data, place, number % 2 ** (8 * unit))


def damage_chain(data: bytearray, rng: random.Random) -> None:
    """Directories that lead to themselves, to another place, or nowhere."""
    entries = tiff_entries(data)
    if not entries:
        return
    order, big = ("<" if data[:2] == b"II" else ">"), entries[0][5]
    size, wide = (20, 8) if big else (12, 4)
    ends = [one[0] + size for one, two in zip(entries, [*entries[1:], (0,)], strict=True) if two[0] != one[0] + size]
    starts = [entries[0][0] - (8 if big else 2)] + [end + wide for end in ends]
    target = rng.choice((*starts, len(data) - 1, len(data), rng.randrange(len(data)), *NUMBERS))
    place = rng.choice((8 if big else 4, *ends))
    struct.pack_into(order + ("Q" if big else "L"), data, place, target % 2 ** (8 * wide))


def damage_description(data: bytearray, rng: random.Random) -> None:
    """A new description at the end of the file, which declares what is not there."""
    described = [entry for entry in tiff_entries(data) if entry[1] in (270, 305)]
    if not described:
        return
    at, _, _, count, value, big = rng.choice(described)
    order, wide = ("<" if data[:2] == b"II" else ">"), 8 if big else 4
    number = rng.choice((10**8, 10**5, 2, 0, -1, 10**18))
    shares = rng.choice(("", f'PlaneCount="{number}"'))
    ome = (
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0"><Pixels DimensionOrder='
        f'"XYCZT" SizeX="{WIDTH}" SizeY="{HEIGHT}" SizeC="3" SizeZ="1" SizeT="{number}" Type="uint8" ID="P:0"><Channel '
        f'SamplesPerPixel="{rng.choice((1, 3, number))}"/><TiffData {shares}/>'
        "</Pixels></Image></OME>"
    )
    text = bytes(data[value : value + count])
    new = rng.choice(
        (
            ome.encode(),
            f'{{"shape": [{number}, {HEIGHT}, {WIDTH}, 3]}}'.encode(),
            f'{{"shape": [{HEIGHT}, {WIDTH}, 3], "axes": {number}}}'.encode(),
            f"ImageJ=1.11a\nimages={number}\nchannels={number}\nslices=1\nhyperstack=true\n".encode(),
            re.sub(rb"\d+", lambda found: str(number).encode() if rng.random() < 0.3 else found.group(), text),
            rng.choice((b"MedScan", b"Philips", b"<MetaData>", b'{"shape": null}', b"SCANIMAGE", b"Aperio Image")),
        )
    )
    new += b"\0"
    struct.pack_into(order + ("QQ" if big else "LL"), data, at + 4, len(new), len(data))
    if len(new) <= wide:
        data[at + 4 + wide : at + 4 + wide + len(new)] = new
    data += new


def damage_stream(data: bytearray, rng: random.Random) -> None:
    """A JPEG stream that ends early and says that it is whole."""
    starts = [found.start() for found in re.finditer(rb"\xff\xda", data)]
    if not starts:
        return
    start = rng.choice(starts)
    end = data.find(b"\xff\xd9", start)
    if end > start + 20:
        cut = rng.randrange(start + 14, end)
        data[cut : cut + 2] = b"\xff\xd9"
        if data[:2] == b"\xff\xd8" and rng.random() < 0.5:
            frame = re.search(rb"\xff[\xc0-\xc2]\x00[\x08-\x14]", data)
            if frame:
                struct.pack_into(">HH", data, frame.start() + 5, rng.choice((HEIGHT, 8192)), rng.choice((WIDTH, 8192)))


def damage_png(data: bytearray, rng: random.Random) -> None:
    """Chunks changed, left out or cut, with checksums that are right."""
    chunks: list[tuple[bytes, bytearray]] = []
    at = 8
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">L", data, at)
        chunks.append((bytes(data[at + 4 : at + 8]), data[at + 8 : at + 8 + length]))
        at += 12 + length
    kind, body = rng.choice(chunks)
    if kind == b"IHDR":
        struct.pack_into(">L", body, rng.choice((0, 4)), rng.choice(NUMBERS[:12]))
    elif kind == b"IDAT":
        raw = bytearray(zlib.decompress(body))
        del raw[rng.randrange(len(raw)) :]
        body[:] = zlib.compress(raw) if rng.random() < 0.7 else body[: rng.randrange(len(body))]
    elif body:
        body[rng.randrange(len(body))] = rng.randrange(256)
    parts = [struct.pack(">L", len(b)) + k + b + struct.pack(">L", zlib.crc32(k + b)) for k, b in chunks]
    data[8:] = b"".join(parts)


def damage_blindly(data: bytearray, rng: random.Random) -> None:
    """Bits, bytes, numbers, blocks and cuts, anywhere; half of them near the beginning or the end."""
    if not data:
        return
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        edge = min(len(data), 400)
        near = (rng.randrange(edge), len(data) - 1 - rng.randrange(edge))
        at = rng.choice((*near, rng.randrange(len(data)), rng.randrange(len(data))))
        size = min(rng.choice((1, 2, 4, 16, 256, 2000)), len(data) - at)
        kind = rng.choice(BLIND)
        if kind == "bit":
            data[at] ^= 1 << rng.randrange(8)
        elif kind == "byte":
            data[at] = rng.randrange(256)
        elif kind == "number":
            wide = rng.choice((2, 4, 8))
            data[at : at + wide] = (rng.choice(NUMBERS) % 2 ** (8 * wide)).to_bytes(wide, rng.choice(("little", "big")))
        elif kind in ("zero", "ones", "foreign"):
            data[at : at + size] = rng.randbytes(size) if kind == "foreign" else bytes([255 * (kind == "ones")]) * size
        elif kind == "remove":
            del data[at : at + size]
        elif kind == "double":
            data[at:at] = data[at : at + size]
        elif kind == "cut":
            del data[at:]
        else:
            data += data[: rng.randrange(1, 3000)]
        if not data:
            return


def damage_json(data: bytearray, rng: random.Random) -> None:
    """Values of other types, absurd numbers, keys that are missing or stand twice."""
    try:
        tree = json.loads(bytes(data))
    except ValueError:
        return damage_blindly(data, rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places: list[tuple[Any, Any]] = []
        waiting = [tree]
        while waiting:
            node = waiting.pop()
            keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []
            places += [(node, key) for key in keys]
            waiting += [node[key] for key in keys]
        if not places:
            break
        node, key = rng.choice(places)
        if rng.random() < 0.2:
            del node[key]
        elif rng.random() < 0.1:
            node[key] = [node[key]]
        else:
            node[key] = rng.choice(JSON_VALUES)
    data[:] = json.dumps(tree).encode()
    return None


def damaged(base: Base, rng: random.Random) -> Files:
    """The base's files with one of them damaged; of a folder of files, one may be missing."""
    files = dict(base.files)
    name = rng.choice(sorted(files))
    if name and rng.random() < 0.6:
        name = rng.choice([other for other in sorted(files) if "." in Path(other).name])
    data = bytearray(files[name])
    ways: list[Callable[[bytearray, random.Random], None]] = [damage_blindly]
    if bytes(data[:2]) in (b"II", b"MM"):
        ways += [damage_field, damage_field, damage_field, damage_chain, damage_description, damage_stream]
    elif data[:2] == b"\xff\xd8":
        ways += [damage_stream]
    elif data[:4] == b"\x89PNG":
        ways += [damage_png]
    elif "." in Path(name).name:
        ways = [damage_json, damage_json, damage_json, damage_blindly]
    elif name and rng.random() < 0.1:
        del files[name]
        return files
    rng.choice(ways)(data, rng)
    if rng.random() < 0.1:
        damage_blindly(data, rng)
    files[name] = bytes(data)
    return files
