"""What a calibration measured, as a table for a person."""

from __future__ import annotations

from rich.table import Table

from gigagrad.execution.calibration import Calibration

_LAYERS = {
    "dense": "convolution, many channels",
    "thin_in": "convolution, few channels in",
    "thin_out": "convolution, few channels out",
    "thin": "convolution, few channels",
    "pointwise": "convolution, 1 x 1",
    "depthwise": "convolution, depthwise",
    "grouped": "convolution, grouped",
    "transposed": "transposed convolution",
    "transposed.thin": "transposed conv., few channels",
    "transposed.blocks": "transposed conv., large strides",
    "linear": "linear layer",
}
_MOVING = {
    "simple": "sums, products, ReLU",
    "costly": "GELU, sigmoid, losses",
    "norm": "batch and group norm",
    "layernorm": "layer norm",
    "moments": "statistics of a norm",
    "pool": "pooling",
    "resize": "resizing, bilinear",
    "nearest": "resizing, nearest",
    "copy": "joining, padding",
}
_INCREDIBLE = 1e12
"""Operations or bytes a second above which the fit has given a kind's time to its neighbours."""


def rates_table(calibration: Calibration) -> Table:
    """Rates of one thread forward and backward; of the tiers; and how well they predict."""
    machine = calibration.machine
    assert machine.model is not None

    def per_second(kind: str, unit: str) -> str:
        found = calibration.achieved.get(kind)
        return "too fast to tell" if found is None or found > _INCREDIBLE else f"{found / 1e9:,.1f} {unit}"

    table = Table(header_style="bold")
    for column, side in (("What", "left"), ("Forward", "right"), ("Backward", "right")):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    for kind, name in _LAYERS.items():
        table.add_row(name, per_second(f"{kind}.f", "GFLOP/s"), per_second(f"{kind}.w", "GFLOP/s"))
    for kind, name in _MOVING.items():
        table.add_row(
            name, per_second(f"{kind}.f", "GB/s"), per_second(f"{kind}.b", "GB/s"), end_section=kind == "copy"
        )
    disk = calibration.disk
    way = "direct" if disk.direct else "through the page cache"
    table.add_row("copies in memory", f"{machine.copy_bytes_per_second / 1e9:,.1f} GB/s", "")
    table.add_row(f"disk, write ({way})", f"{disk.write / 1e9:,.2f} GB/s", "")
    table.add_row(f"disk, read ({way})", f"{disk.read / 1e9:,.2f} GB/s", "")
    table.add_row("fields in files, one thread's work", f"{machine.file_bytes_per_second / 1e9:,.2f} GB/s", "")
    rate, ratio = machine.codec_bytes_per_second, machine.codec_ratio
    table.add_row("lossless codec", f"{rate / 1e9:,.2f} GB/s, {ratio:.2f} : 1", "", end_section=True)
    for way, sharing in (("spinning", machine.spinning), ("sleeping", machine.passive)):
        table.add_row(f"a further thread, a tile each ({way})", f"{sharing.side_by_side_efficiency:.0%}", "")
        table.add_row(f"a further thread, the same tile ({way})", f"{sharing.shared_efficiency:.0%}", "")
    table.add_row("mean error on unseen networks", f"{machine.model.error:.0%}", "")
    table.caption = f"{calibration.samples} passes of {calibration.networks} networks in {calibration.seconds:.0f} s"
    return table
