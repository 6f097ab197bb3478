"""Peak figures of accelerators, from their makers' public data sheets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """Peak figures of one accelerator, of which real programs reach a part."""

    name: str
    flops: float
    """Dense bfloat16 operations per second, without sparsity; float16 where the card has no bfloat16."""
    bandwidth: float
    """Bandwidth of the card's memory, in bytes per second."""
    memory: float
    """Size of the card's memory, in bytes."""
    link: float
    """Bandwidth to the other cards of the node, in bytes per second and one direction."""
    source: str = "data sheet"


CARDS = {
    one.name: one
    for one in (
        Card("B200", 2250e12, 7.7e12, 180e9, 900e9),
        Card("H200", 989e12, 4.8e12, 141e9, 450e9),
        Card("H100 NVL", 835e12, 3.9e12, 94e9, 300e9),
        Card("H100 PCIe", 756e12, 2.0e12, 80e9, 64e9),
        Card("H100", 989e12, 3.35e12, 80e9, 450e9),
        Card("A100", 312e12, 2.039e12, 80e9, 300e9),
        Card("MI300X", 1307e12, 5.3e12, 192e9, 448e9),
        Card("L40S", 362e12, 864e9, 48e9, 32e9),
        Card("A10", 125e12, 600e9, 24e9, 32e9),
        Card("L4", 121e12, 300e9, 24e9, 32e9),
        Card("T4", 65e12, 320e9, 16e9, 32e9),
    )
}
"""Name → card: H100, H200, B200, A100 as the SXM modules (NVLink), the others as PCIe cards."""


def card_of(device: str) -> Card | None:
    """Find the card with a device name of torch or `nvidia-smi` (`NVIDIA H100 80GB HBM3`); None for an unknown one."""
    words = device.replace("-", " ").upper().split()
    return next((one for name, one in CARDS.items() if set(name.upper().split()) <= set(words)), None)
