"""What a caption says about a clip: five attributes with known classes."""

from dataclasses import asdict, dataclass, fields

import numpy as np

CLASSES: dict[str, tuple[str, ...]] = {
    "speaker": ("male", "female"),
    "rate": ("slow", "medium", "fast"),
    "pitch": ("low", "medium", "high"),
    "loudness": ("soft", "medium", "loud"),
    "pauses": ("few", "many"),
}


@dataclass(frozen=True, slots=True)
class Attributes:
    """The truth about a clip, each one of its `CLASSES`. Pitch is relative to the speaker, loudness is absolute."""

    speaker: str
    rate: str
    pitch: str
    loudness: str
    pauses: str

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) not in CLASSES[field.name]:
                raise ValueError(f"{field.name} cannot be '{getattr(self, field.name)}'.")

    def as_dict(self) -> dict[str, str]:
        """Name to class, in the order of `CLASSES`."""
        return asdict(self)


def draw(rng: np.random.Generator) -> Attributes:
    """Attributes drawn evenly and independently."""
    return Attributes(**{name: str(rng.choice(classes)) for name, classes in CLASSES.items()})
