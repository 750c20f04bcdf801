"""Values that are valid by construction."""

from __future__ import annotations

import numpy as np
import pytest

from skydraft.types import Media


def features(num_frames: int, fill: float = 0.5) -> np.ndarray:
    return np.full((128, num_frames), fill, np.float32)


@pytest.mark.parametrize(("num_frames", "num_tokens"), [(3, 1), (4, 1), (7, 2), (10, 2), (100, 25), (3000, 750)])
def test_media_fills_one_token_per_40_ms(num_frames: int, num_tokens: int) -> None:
    assert Media(features(num_frames)).num_tokens == num_tokens


def test_media_is_its_content() -> None:
    one, same, other = Media(features(9)), Media(features(9)), Media(features(9, 0.6))
    assert one == same and hash(one) == hash(same) and one != other and one != Media(features(10)) and one != 9


def test_media_cannot_be_changed_from_outside() -> None:
    given = features(9)
    media = Media(given)
    given[:] = 7
    assert media == Media(features(9))
    with pytest.raises(ValueError, match="read-only"):
        media.features[0, 0] = 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (features(9).astype(np.float64), r"float32 \[mels, frames\], not float64 \(128, 9\)"),
        (features(9)[0], r"not float32 \(9,\)"),
        (features(9)[:0], r"not float32 \(0, 9\)"),
        (features(0), "0 frames of audio are too few"),
        (features(2), "2 frames of audio are too few"),
        (features(9, np.nan), "must be finite"),
        (features(9, np.inf), "must be finite"),
    ],
)
def test_media_is_valid_or_not_there(wrong: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Media(wrong)
