"""What there is to know of one layer to go on training it elsewhere.

The same record travels between workers and into checkpoints, so a layer that moves and a layer that is restored
cannot differ. It speaks of parameters by name only: who reads it needs neither the module nor the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

PARAMETER, BUFFER, MASTER, STATE, EXTRA = "parameter/", "buffer/", "master/", "state/", "extra/"


@dataclass(frozen=True, slots=True)
class UnitState:
    """The state of one unit: a layer, or a tied layer with all its uses.

    Attributes:
        name: of the unit: `<layer>` or `<first layer>:<key>`.
        tensors: `parameter/<name>` (frozen ones too), `buffer/<name>` (persistent or not), `master/<name>` (the fp32
            master of a low-precision parameter) and `state/<name>/<key>` (of the optimizer).
        values: what the optimizer keeps that is no tensor, under `state/<name>/<key>`, and what modules keep besides
            tensors (`get_extra_state`), under `extra/<key in a state_dict>`; JSON can tell all of it.
    """

    name: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
