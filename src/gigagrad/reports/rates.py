"""What a calibration measured, as a table for a person."""

from __future__ import annotations

from rich.table import Table

from gigagrad.execution.calibration import Calibration


def rates_table(calibration: Calibration) -> Table:
    """The rates of one thread, of its further threads, and of the tiers."""
    machine, disk = calibration.machine, calibration.disk
    way = "direct" if disk.direct else "through the page cache"
    rows = {
        "convolutions": f"{machine.flops_per_second / 1e9:,.0f} GFLOP/s",
        "operators, values in the cache": f"{machine.cached_bytes_per_second / 1e9:,.1f} GB/s",
        "operators, values in memory": f"{machine.memory_bytes_per_second / 1e9:,.1f} GB/s",
        "a call of an operator": f"{machine.seconds_per_operator * 1e6:,.0f} us",
        "a further thread, a tile each": f"{machine.side_by_side_efficiency:.0%}",
        "a further thread, the same tile": f"{machine.shared_efficiency:.0%}",
        "copies in memory": f"{machine.copy_bytes_per_second / 1e9:,.1f} GB/s",
        f"disk, write ({way})": f"{disk.write / 1e9:,.2f} GB/s",
        f"disk, read ({way})": f"{disk.read / 1e9:,.2f} GB/s",
        "fields in files, one thread's work": f"{machine.file_bytes_per_second / 1e9:,.2f} GB/s",
        "lossless codec": f"{machine.codec_bytes_per_second / 1e9:,.2f} GB/s, {machine.codec_ratio:.2f} : 1",
    }
    table = Table(header_style="bold")
    table.add_column("What one thread does")
    table.add_column("Rate", justify="right")
    for name, rate in rows.items():
        table.add_row(name, rate)
    table.caption = f"measured in {calibration.seconds:.0f} s"
    return table
