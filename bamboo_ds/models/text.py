"""Text files as windows of bytes: the data of the main job.

Everything here is a pure function of the files and a seed, so every worker that loads the same files holds the same
samples in the same order, whatever stage or pipeline it serves.
"""

from __future__ import annotations

import dataclasses
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset

VALIDATION_SHARE = 0.05
"""Share of each group's bytes, at its end, that is kept for validation."""

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_PROBE_BYTES = 8192


@dataclasses.dataclass(frozen=True)
class ByteText:
    """A text, split for training and validation; each part is a uint8 tensor ``[bytes]``."""

    training: torch.Tensor
    validation: torch.Tensor

    @property
    def size_bytes(self) -> int:
        """Bytes of both parts together."""
        return len(self.training) + len(self.validation)


class ByteWindows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Fixed windows of a text: sample ``i`` is (tokens, labels), int64 ``[sequence_length]`` each.

    The labels are the tokens one byte later. Windows do not overlap; bytes that fill no window are left out.

    Args:
        text: uint8 ``[bytes]``.
        sequence_length: Tokens per sample.
        seed: Shuffles the windows; without one they keep the order of the text.

    Raises:
        ValueError: If the text does not fill one window.
    """

    def __init__(self, text: torch.Tensor, *, sequence_length: int, seed: int | None = None) -> None:
        count = (len(text) - 1) // sequence_length
        if count < 1:
            raise ValueError(
                f"the text has {len(text)} bytes, but one sample needs sequence_length + 1 = {sequence_length + 1}: "
                "give more text or a shorter sequence"
            )
        self._text = text
        self._sequence_length = sequence_length
        self._order = torch.arange(count) if seed is None else _shuffled(count, seed=seed)

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self._order)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (tokens, labels) of one window."""
        start = int(self._order[index]) * self._sequence_length
        window = self._text[start : start + self._sequence_length + 1].long()
        return window[:-1], window[1:]


def load_text(paths: Sequence[Path], *, validation_share: float = VALIDATION_SHARE) -> ByteText:
    """Read texts and split each at its end.

    Args:
        paths: Files or folders, each one group; none means the standard library's sources.
        validation_share: Share of each group's bytes that goes to validation.

    Raises:
        ValueError: If a path does not exist or holds no text.
    """
    groups = [_read_group(path) for path in paths] or [_read_files(standard_library_sources())]
    cuts = [len(group) - int(len(group) * validation_share) for group in groups]
    training = b"".join(group[:cut] for group, cut in zip(groups, cuts, strict=True))
    validation = b"".join(group[cut:] for group, cut in zip(groups, cuts, strict=True))
    return ByteText(_tensor(training), _tensor(validation))


def standard_library_sources() -> list[Path]:
    """List the ``.py`` files of the running Python's standard library, tests left out, in a fixed order."""
    return _files_under(Path(sysconfig.get_paths()["stdlib"]), pattern="*.py")


def _read_group(path: Path) -> bytes:
    if not path.exists():
        raise ValueError(f"--text {path}: no such file or folder")
    text = _read_files([path] if path.is_file() else _files_under(path, pattern="*"))
    if not text:
        raise ValueError(f"--text {path}: holds no text")
    return text


def _files_under(folder: Path, *, pattern: str) -> list[Path]:
    inner = (path.relative_to(folder) for path in folder.rglob(pattern) if path.is_file())
    kept = (path for path in inner if not any(_is_skipped(part) for part in path.parts))
    return [folder / path for path in sorted(kept, key=Path.as_posix)]


def _is_skipped(part: str) -> bool:
    return part.startswith(".") or part in _SKIPPED_FOLDERS


def _read_files(files: Iterable[Path]) -> bytes:
    contents = (path.read_bytes() for path in files)
    return b"".join(content for content in contents if b"\0" not in content[:_PROBE_BYTES])


def _tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def _shuffled(count: int, *, seed: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
