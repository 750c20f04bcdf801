"""Rows of logits, as every engine gives them: numpy in host memory."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Rows: TypeAlias = npt.NDArray[np.float32]  # [num_rows, vocab.size]
