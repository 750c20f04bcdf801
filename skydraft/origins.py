"""The meaning and look of each token origin, for the terminal and the report. A test compares the chat page with it."""

from dataclasses import dataclass

from skydraft.types import Origin


@dataclass(frozen=True, slots=True)
class Look:
    """A meaning, and its colours for a terminal, light and dark pages. `line`, a CSS `text-decoration`, helps
    colour-blind readers."""

    meaning: str
    terminal: str
    light: str
    dark: str
    line: str


LOOKS: dict[Origin, Look] = {
    "accepted": Look("Drafted by the small model, confirmed by the large one.",
                     "green", "#1a6b48", "#82d0a6", "underline solid 1.5px"),
    "recovered": Look("Written by the large model in place of a wrong draft.",
                      "bold underline yellow", "#9c460a", "#f0ab6c", "underline wavy 1.5px"),
    "bonus": Look("Written by the large model after a draft without mistakes.",
                  "bold cyan", "#0c6685", "#7ccbe8", "underline double 1.5px"),
    "skipped": Look("Drafted by the small model, which was sure. Not checked.",
                    "default", "#4f5863", "#b5bdc7", "underline dotted 1.5px"),
    "edge": Look("Written by the small model alone.", "default", "#24272b", "#dedbd4", "none"),
    "cloud": Look("Written by the large model itself, without a draft.",
                  "bold blue", "#2f4bb3", "#a3b8ff", "underline solid 2.5px"),
    "edge-fallback": Look("Drafted by the small model while the cloud was gone. Not checked.",
                          "reverse magenta", "#a3204f", "#f692b1", "underline dashed 1.5px"),
}  # fmt: skip
