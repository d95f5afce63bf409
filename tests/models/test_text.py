"""Texts as windows of bytes: every byte in its place, and the same on every worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bamboo_ds.models.text import ByteWindows, load_text, standard_library_sources


def content(part: torch.Tensor) -> bytes:
    return bytes(part.tolist())


def write(path: Path, text: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return path


def test_each_group_gives_its_end_to_validation(tmp_path: Path) -> None:
    one = write(tmp_path / "one.txt", b"a" * 95 + b"b" * 5)
    two = write(tmp_path / "two.txt", b"c" * 190 + b"d" * 10)
    text = load_text([one, two])
    assert content(text.training) == b"a" * 95 + b"c" * 190
    assert content(text.validation) == b"b" * 5 + b"d" * 10
    assert text.size_bytes == 300


def test_a_folder_is_read_in_the_order_of_its_paths_without_hidden_and_binary_files(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", b"2")
    write(tmp_path / "a" / "z.txt", b"1")
    write(tmp_path / "c.bin", b"x\0y")
    write(tmp_path / ".git" / "config", b"hidden")
    write(tmp_path / "site-packages" / "m.py", b"foreign")
    assert content(load_text([tmp_path], validation_share=0).training) == b"12"


def test_the_default_text_is_the_standard_library_without_what_is_installed() -> None:
    sources = standard_library_sources()
    assert "argparse.py" in {path.name for path in sources}
    assert not [path for path in sources if "site-packages" in path.parts or "dist-packages" in path.parts]
    text = load_text([])
    assert text.size_bytes > 1_000_000
    assert len(text.validation) / text.size_bytes == pytest.approx(0.05, abs=0.001)
    assert torch.equal(text.training, load_text([]).training)


@pytest.mark.parametrize("make", [lambda path: path / "missing", lambda path: path], ids=["missing", "empty"])
def test_a_path_without_text_is_named(tmp_path: Path, make: object) -> None:
    path = make(tmp_path)  # type: ignore[operator]
    with pytest.raises(ValueError, match=f"--text {path}"):
        load_text([path])


def test_labels_are_the_next_bytes() -> None:
    tokens, labels = ByteWindows(torch.arange(20, dtype=torch.uint8), sequence_length=4)[1]
    assert tokens.tolist() == [4, 5, 6, 7]
    assert labels.tolist() == [5, 6, 7, 8]
    assert tokens.dtype == labels.dtype == torch.int64


@pytest.mark.parametrize("size", [9, 10, 12, 13])
def test_windows_fit_into_the_text(size: int) -> None:
    windows = ByteWindows(torch.arange(size, dtype=torch.uint8), sequence_length=4)
    assert len(windows) == (size - 1) // 4
    assert all(len(labels) == 4 for _, labels in windows)


def test_shuffling_shows_every_window_once_in_an_order_fixed_by_the_seed() -> None:
    text = torch.arange(201, dtype=torch.uint8)
    shuffled, again, other = (ByteWindows(text, sequence_length=4, seed=seed) for seed in (1, 1, 2))

    def starts(windows: ByteWindows) -> list[int]:
        return [int(windows[index][0][0]) for index in range(len(windows))]

    assert sorted(starts(shuffled)) == starts(ByteWindows(text, sequence_length=4))
    assert starts(shuffled) == starts(again) != starts(other)


def test_a_text_shorter_than_one_window_is_refused() -> None:
    with pytest.raises(ValueError, match="has 4 bytes, but one sample needs sequence_length"):
        ByteWindows(torch.zeros(4, dtype=torch.uint8), sequence_length=4)
