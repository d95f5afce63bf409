"""What can go wrong with a cloud, in one sentence with its remedy. Training never stops for any of it."""

from __future__ import annotations

from dataclasses import dataclass

from bamboo_ds.errors import BambooError

__all__ = ["CloudError", "Trouble"]


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that a cloud refused, or that went wrong on the way to it.

    Attributes:
        code: of the cloud, such as InsufficientInstanceCapacity.
        text: what it means, with what the cloud said.
        remedy: what to do; "none is needed" where waiting helps.
        zone: of which it is true; empty for all.
        patience: by how much longer than after a full zone the next try should wait: 1 as long, 10 ten times.
    """

    code: str
    text: str
    remedy: str
    zone: str = ""
    patience: float = 1.0

    def __str__(self) -> str:
        where = f" in zone {self.zone}" if self.zone else ""
        return f"{self.code}{where}: {self.text}; {self.remedy}"


class CloudError(BambooError):
    """Report a request that a cloud did not fulfil.

    Args:
        trouble: what it was.
        indefinite: whether it may have been fulfilled all the same.
    """

    def __init__(self, trouble: Trouble, indefinite: bool = False) -> None:
        super().__init__(trouble, indefinite)
        self.trouble, self.indefinite = trouble, indefinite

    def __str__(self) -> str:
        return str(self.trouble)
